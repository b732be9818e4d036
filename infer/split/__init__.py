"""Split decoding over a network, described in README.md.

    network.py    a program that emulates a slow or lossy link to a server and can cut it

infer/split_client and infer/split_server have the two sides, moa_jax/split the messages and arrays,
infer/bench/split has `infer.bench --split`.
"""
