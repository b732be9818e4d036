"""An OpenAI server on the engine, for `infer.serve`.

One request passes through these files from top to bottom, and the answer comes back up:

    app.py         OpenAIServer: paths, keys, bodies, errors, clients that leave
    requests.py    a body as a GenerationRequest, with every field checked
    responses.py   answers as JSON and as events, in the shapes of completions and of chats
    streams.py     RequestStream: the choices of a request, from the engine's news to text
    decode/engine  in moa_jax: continuous batching

Beside them:

    model.py       Model: the name, the limits and the tokenizer
    tokens.py      single tokens as text and bytes
    errors.py      OpenAI's shape of errors
    metrics.py     /metrics
"""
