"""Split decoding over a network: the parts of `infer.server` and `infer.client`.

    client/         one answer, from the prompt to its text, over a link that may fail
    link.py         one connection of a client
    server/         WebSocket, sessions, and scheduling of the target
    network.py      a program that emulates a slow or lossy link to a server and can cut it

infer/bench/split has `infer.bench --split`; moa_jax/split has messages and arrays. README.md
describes how the parts work together.
"""
