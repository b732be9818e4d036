"""Network conditions on one machine, for tests and benchmarks.

    profiles.py    named networks, and what one direction of a link does to a packet
    namespaces.py  `emulate`: kernel TCP over a link with real delay, loss and queues; needs root
    tun.py         the process that carries its packets
    proxy.py       `Proxy`: a TCP proxy that is late, silent, refuses or resets; needs nothing
    __main__.py    either by hand: `python -m infer.split.network --help`

This file imports nothing, so that tun.py starts in the time that Python takes.
"""
