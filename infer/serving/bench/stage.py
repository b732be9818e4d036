"""Server processes for each way, on the same pair; all stay while one of them is measured."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from infer.listening.child import Child
from infer.serving.bench.flags import ServedWay
from moa_jax.errors import InputError

# The share of a GPU's memory that jax takes when it starts; several servers must share it.
MEMORY_SHARE, MEMORY_OF_ALL = "XLA_PYTHON_CLIENT_MEM_FRACTION", 0.9
MOST_WAITING = 1 << 20  # requests, so that none is refused where more come than can be served
IDLE_CPU, LOOK_SECONDS = 0.05, 0.5  # of one core, over so long
SETTLE_SECONDS = 180.0  # for programs that are compiled in the background


class Server(NamedTuple):
    """A server that takes requests."""

    way: ServedWay
    url: str  # of the host, without a path
    child: Child

    def check(self) -> None:
        """Raises InputError with its last line where the server has ended."""
        try:
            self.child.check()
        except InputError as error:
            raise InputError(f"the server of {self.way.label}: {error}") from error

    def settle(self) -> float | None:
        """Waits until nothing is compiled any more; the share of a core that it uses then.

        None where the system does not say what a process computes.
        """
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            before, began = self.child.cpu_seconds(), time.monotonic()
            time.sleep(LOOK_SECONDS)
            self.check()
            after = self.child.cpu_seconds()
            if before is None or after is None:
                return None
            share = (after - before) / (time.monotonic() - began)
            if share < IDLE_CPU or time.monotonic() > end:
                return share


def teams_of(servers: Sequence[Server], size: int) -> list[list[Server]]:
    """Servers in teams of this size, in their order."""
    return [list(servers[begin : begin + size]) for begin in range(0, len(servers), size)]


@contextlib.contextmanager
def serving(ways: Sequence[ServedWay], teams: int = 1) -> Iterator[list[list[Server]]]:
    """Starts all servers at once: so many teams, each with one of every way.

    Raises InputError with the last line of a server that cannot start.
    """
    share = {MEMORY_SHARE: f"{MEMORY_OF_ALL / (teams * len(ways)):.3f}"}
    share = {} if MEMORY_SHARE in os.environ else share
    more = ["--max-queue", str(MOST_WAITING), "--drain-seconds", "1"]
    more += ["--prefix-bytes", "0"]  # questions come again, and not as often to every server
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moa-serving-")))
        children = [
            stack.enter_context(
                Child("infer.serve", [*way.flags, *more], folder / f"{index}", env=share)
            )
            for index, way in enumerate([*ways] * teams)
        ]
        found = []
        for way, child in zip([*ways] * teams, children, strict=True):
            try:
                url = child.ready()["url"]
            except InputError as error:
                raise InputError(f"{way.label}: {error}") from error
            found.append(Server(way, url.removesuffix("/v1"), child))
        yield teams_of(found, len(ways))
