"""Emulates a slow or lossy link between a client and a server on this machine.

    python -m infer.split.network --profile far --proxy 127.0.0.1:8765

The program opens a port that forwards to the server, and reads commands from stdin; the end of
stdin closes the link:

    cut     silently holds all data                  heal    ends all faults
    stats   prints the number of forwarded bytes     refuse  closes and refuses connections
"""

from __future__ import annotations

import argparse
import json
import sys

from infer.bench.network import PROFILES, Proxy, in_thread
from infer.cli.program import Parser, run


def address(text: str) -> tuple[str, int]:
    """Flag type: HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8000")
    return host, int(port)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("infer.split.network", __doc__)
    parser.add_argument("--profile", choices=PROFILES, default="4g", help="the network to emulate")
    parser.add_argument("--seed", type=int, default=0, help="of losses and delays")
    parser.add_argument(
        "--proxy", metavar="HOST:PORT", type=address, required=True, help="address of a server"
    )
    flags = parser.parse_args(arguments)
    profile = PROFILES[flags.profile]
    with in_thread(Proxy(*flags.proxy, profile, flags.seed)) as proxy:
        print(f"{profile}\nclient: connect to {proxy.host}:{proxy.port}", flush=True)
        named = {act.__name__: act for act in (proxy.cut, proxy.heal, proxy.refuse)}
        commands = named | {"stats": lambda: proxy.carried}
        for word in filter(None, map(str.strip, sys.stdin)):
            if act := commands.get(word):
                print(json.dumps(act() or word), flush=True)
            else:
                print(f"{word}: commands are {', '.join(commands)}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
