"""Split decoding over a network: what `infer.server` and `infer.client` are made of.

    client/         one answer, from a prompt to its text, over a link that may die
    link.py         one connection of a client
    server/         WebSocket, sessions, and what the target does next
    network/        emulated links for tests and benchmarks
    bench/          infer.bench --split

Messages and arrays are in moa_jax/split; README.md tells how the parts play together.
"""
