"""Puts a slow or lossy link between a client and a server on this machine, and cuts it.

As root it makes two network namespaces, in which client and server are started. With --proxy it
opens a port that leads to a server, and needs no rights. It obeys commands on stdin; the end of
stdin ends the link:

    cut     lets nothing pass, silently              heal    ends all faults
    stats   shows what has passed                    refuse  closes and refuses (--proxy only)
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from typing import Any

from infer.program import Parser, run
from infer.split.network.namespaces import emulate
from infer.split.network.profiles import PROFILES
from infer.split.network.proxy import Proxy, in_thread

Commands = dict[str, Callable[[], Any]]


def address(text: str) -> tuple[str, int]:
    """Type of a flag: HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, as in 127.0.0.1:8000")
    return host, int(port)


def obey(commands: Commands) -> None:
    """Runs the commands on stdin until it ends, and prints their results."""
    for line in sys.stdin:
        word = line.strip()
        if act := commands.get(word):
            print(json.dumps(act() or word), flush=True)
        elif word:
            print(f"{word}: commands are {', '.join(commands)}", file=sys.stderr)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("infer.split.network", __doc__)
    parser.add_argument("--profile", choices=PROFILES, default="4g", help="the network to emulate")
    parser.add_argument("--seed", type=int, default=0, help="of losses and delays")
    parser.add_argument("--proxy", metavar="HOST:PORT", type=address, help="address of a server")
    flags = parser.parse_args(arguments)
    profile = PROFILES[flags.profile]
    if flags.proxy:
        with in_thread(Proxy(*flags.proxy, profile, flags.seed)) as proxy:
            print(f"{profile}\nclient: connect to {proxy.host}:{proxy.port}", flush=True)
            named = (proxy.cut, proxy.heal, proxy.refuse)
            obey({act.__name__: act for act in named} | {"stats": lambda: proxy.carried})
        return
    with emulate(profile, flags.seed) as link:
        print(f"{profile}\nthe server is at {link.address}, where 0.0.0.0 is what it binds to")
        for side in ("server", "client"):
            print(f"{side}: {shlex.join(link.prefix(side))} COMMAND", flush=True)
        obey({act.__name__: act for act in (link.cut, link.heal, link.stats)})


if __name__ == "__main__":
    run(main)
