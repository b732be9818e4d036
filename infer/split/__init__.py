"""Split decoding over a network: what `infer.server` and `infer.client` are made of.

    client/         one answer, from a prompt to its text, over a link that may die
    link.py         one connection of a client
    server/         WebSocket, sessions, and what the target does next
    network.py      a program: a slow or lossy link to a server, which can be cut

`infer.bench --split` is in infer/bench/split, and messages and arrays are in moa_jax/split.
README.md shows how the parts work together.
"""
