"""A link between two network namespaces: it has delay, loss and a rate, and can be cut."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from infer.split.network.profiles import Direction, Profile
from infer.split.network.tun import ADDRESSES, TUN, Side, ip, namespace, remove_stale
from moa_jax.errors import InputError

ROOT = Path(__file__).resolve().parents[3]


def can_emulate() -> str | None:
    """Why `emulate` cannot work here and what to do, in one line; None if it can."""
    instead = "or use the TCP proxy"
    if not sys.platform.startswith("linux"):
        return f"network emulation: only Linux has network namespaces: use Linux {instead}"
    if os.geteuid():
        return f"network emulation: it needs root: run it as root {instead}"
    if shutil.which("ip") is None:
        return f"network emulation: there is no program `ip`: install iproute2 {instead}"
    name = namespace(secrets.token_hex(4))
    try:
        os.close(os.open(TUN, os.O_RDWR))
        ip("netns", "add", name)
        ip("netns", "del", name)
    except OSError as error:
        return f"network emulation: {TUN}: {error.strerror}: give this machine access {instead}"
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())
        return f"network emulation: no network namespace ({said}): allow it {instead}"
    return None


class Emulation:
    """A link that is up; any thread may use it."""

    address = ADDRESSES["server"]  # of the server, as the client sees it

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._turn = threading.Lock()
        self.namespaces: dict[Side, str] = self._answer()

    def prefix(self, side: Side) -> list[str]:
        """The words before a command that make it run at one end of the link."""
        return ["ip", "netns", "exec", self.namespaces[side]]

    def cut(self) -> dict[Direction, dict[str, int]]:
        """Loses all packets both ways, also those under way; returns `stats`."""
        return self._ask("cut")

    def heal(self) -> dict[Direction, dict[str, int]]:
        """Carries packets again; returns `stats`."""
        return self._ask("heal")

    def stats(self) -> dict[Direction, dict[str, int]]:
        """For each direction: packets and bytes delivered; packets lost, overflowed and cut."""
        return self._ask("stats")

    def _ask(self, command: str) -> dict[Direction, dict[str, int]]:
        with self._turn:
            # After a broken pipe `_answer` finds that the process has ended.
            with contextlib.suppress(BrokenPipeError):
                print(command, file=self._process.stdin, flush=True)
            return self._answer()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the network emulator ended with code {self._process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def emulate(profile: Profile, seed: int = 0) -> Iterator[Emulation]:
    """A link with this profile, in a process that ends with this one.

    A seed gives the same losses and delays for the same packets, but the kernel chooses their
    number and times. Raises InputError with the reason that `can_emulate` gives.
    """
    if reason := can_emulate():
        raise InputError(reason)
    remove_stale()
    settings = json.dumps(dataclasses.asdict(profile))
    command = [sys.executable, "-m", "infer.split.network.tun", settings, str(seed)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    try:
        # In a session of its own, so that Ctrl-C ends client and server before the link.
        with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as process:
            try:
                yield Emulation(process)
            finally:  # or what a killed process did not read makes Popen's own close fail
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
    finally:
        remove_stale()  # in case the process was killed
