"""Servers as processes at one end of a link, and an event loop for clients at the other."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from infer.split.network.namespaces import ROOT, can_emulate, emulate
from infer.split.network.profiles import Profile
from infer.split.network.proxy import Proxy, in_thread
from infer.split.network.tun import NAMESPACES
from infer.split.server.app import PATH
from moa_jax.errors import InputError

Kind = Literal["direct", "namespaces", "proxy"]
READY_SECONDS = 600.0  # for models to load and compile
STOP_SECONDS = 15.0


class Stage(NamedTuple):
    """Servers that can be reached from one end of a link."""

    kind: Kind
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


def kind_of(profile: Profile) -> Kind:
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
            name: stack.enter_context(_Starting(folder / f"{index}", [*prefix], [*bind, *flags]))
            for index, (name, flags) in enumerate(servers.items())
        }
        ports = {name: starting.port() for name, starting in waiting.items()}
        if kind == "proxy":
            for name, port in ports.items():
                proxy = stack.enter_context(in_thread(Proxy(host, port, profile, seed)))
                ports[name] = proxy.port
        urls = {name: f"ws://{host}:{port}{PATH}" for name, port in ports.items()}
        yield Stage(kind, urls, namespace)


class _Starting:
    """A server's process, from its start to its end."""

    def __init__(self, place: Path, prefix: list[str], flags: list[str]) -> None:
        self._ready, self._log = place.with_suffix(".json"), place.with_suffix(".log")
        own = ["--port", "0", "--ready-file", str(self._ready)]
        self._command = [*prefix, sys.executable, "-m", "infer.server", *own, *flags]

    def __enter__(self) -> _Starting:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=log, stderr=log)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def port(self) -> int:
        """The port, once the server takes clients."""
        end = time.monotonic() + READY_SECONDS
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                said = self._log.read_text(errors="replace").strip().splitlines() or ["nothing"]
                raise InputError(f"the server did not start: {said[-1]}")
            time.sleep(0.05)
        return json.loads(self._ready.read_text())["port"]


def _enter(namespace: str) -> None:
    """Move the calling thread alone into a network namespace."""
    with (NAMESPACES / namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):  # Python 3.12 has os.setns
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
