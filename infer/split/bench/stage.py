"""Servers as processes at one end of a link, and an event loop for clients at the other."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infer.server_process import Child
from infer.split.network.namespaces import can_emulate, emulate
from infer.split.network.profiles import Profile
from infer.split.network.proxy import Proxy, in_thread
from infer.split.network.tun import NAMESPACES
from infer.split.server.app import PATH

LinkKind = Literal["direct", "namespaces", "proxy"]


class Stage(NamedTuple):
    """Servers that can be reached from one end of a link."""

    kind: LinkKind
    urls: dict[str, str]
    namespace: str | None = None  # of the network that clients must be in

    def play(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine at the client's end, in a thread and event loop of its own."""
        found: list[Any] = []

        def playing() -> None:
            try:
                if self.namespace is not None:
                    _enter(self.namespace)
                found.append(asyncio.run(work()))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=playing, name="clients", daemon=True)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]


def kind_of(profile: Profile) -> LinkKind:
    """How this machine can imitate a network."""
    if not (profile.delay_ms or profile.jitter_ms or profile.loss or profile.rate_mbit):
        return "direct"
    return "proxy" if can_emulate() else "namespaces"


@contextlib.contextmanager
def staged(
    profile: Profile, servers: Mapping[str, Sequence[str]], seed: int = 0
) -> Iterator[Stage]:
    """Start an infer.server for each name, with its flags, behind a link like the profile.

    Raises InputError with the last line of a server that does not start.
    """
    kind = kind_of(profile)
    with contextlib.ExitStack() as stack:
        prefix, namespace, host = [], None, "127.0.0.1"
        if kind == "namespaces":
            link = stack.enter_context(emulate(profile, seed))
            prefix, namespace, host = link.prefix("server"), link.namespaces["client"], link.address
        bind = ["--host", "0.0.0.0", "--open"] if namespace else ["--host", host]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moa-servers-")))
        waiting = {
            name: stack.enter_context(
                Child("infer.server", [*bind, *flags], folder / f"{index}", prefix=prefix)
            )
            for index, (name, flags) in enumerate(servers.items())
        }
        ports = {name: child.ready()["port"] for name, child in waiting.items()}
        if kind == "proxy":
            for name, port in ports.items():
                proxy = stack.enter_context(in_thread(Proxy(host, port, profile, seed)))
                ports[name] = proxy.port
        urls = {name: f"ws://{host}:{port}{PATH}" for name, port in ports.items()}
        yield Stage(kind, urls, namespace)


def _enter(namespace: str) -> None:
    """Move the calling thread alone into a network namespace."""
    with (NAMESPACES / namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):  # Python 3.12 has os.setns
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
