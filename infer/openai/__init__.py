"""OpenAI's HTTP API on the engine, for `infer.serve`.

A request passes through these files from top to bottom, its response from bottom to top:

    app.py         OpenAIServer: paths, keys, bodies, errors, clients that disconnect
    requests.py    a body as a GenerationRequest, with every field checked
    responses.py   answers as JSON and as events, in the formats of completions and of chats
    streams.py     RequestStream: the choices of a request, from the engine's output to text
    engine         in moa_jax: continuous batching

Other files:

    fields.py      single fields of a body
    grammars.py    the grammar of `response_format` and `structured_outputs`
    tools.py       `tools` and `tool_choice`, and a grammar for forced calls
    parsers.py     the text of an answer as reasoning, content and tool calls
    model.py       Model: the name, the limits and the tokenizer
    tokens.py      single tokens as text and bytes
    errors.py      errors in OpenAI's format
    metrics.py     /metrics
"""
