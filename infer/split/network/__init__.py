"""Network conditions on one machine, for tests and benchmarks.

    profiles.py    Profile: named networks; Lane: what one direction of a link does to a packet
    namespaces.py  emulate: kernel TCP over a link with delay, loss and queues; needs root
    tun.py         the process that carries its packets
    proxy.py       Proxy: a TCP proxy that delays, hangs, refuses or resets; needs no rights
    __main__.py    both from a shell: `python -m infer.split.network --help`

This file imports nothing, so that tun.py starts quickly.
"""
