"""An OpenAI server on the engine: what `infer.serve` is made of.

One request passes through these files from top to bottom, and its answer comes back up:

    app.py         OpenAIServer: paths, keys, bodies, errors, clients that leave
    wanted.py      a body as Wanted: every field checked; fields.py reads them one by one
    replies.py     answers as JSON and as events, in the shapes of completions and of chats
    answering.py   Answering: the choices of a request, from the engine's news to text
    decode/engine  in moa_jax: many answers at once

Beside them:

    model.py       Model: its name and limits, and texts as tokens
    tokens.py      single tokens as text and bytes
    errors.py      OpenAI's shape of errors
    metrics.py     what /metrics says
"""
