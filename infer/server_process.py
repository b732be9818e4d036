"""Server processes for benchmarks and tests, and SIGTERM as an exception."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moa_jax.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
READY_SECONDS = 600.0  # to load and compile the models
STOP_SECONDS = 15.0
SIGTERM_CODE = 128 + signal.SIGTERM  # as in shells


class Child:
    """A server process; the context manager starts and terminates the process."""

    def __init__(
        self,
        program: str,
        flags: Sequence[str],
        place: Path,
        *,
        env: Mapping[str, str] | None = None,
        of: str = "",
    ) -> None:
        """Runs `program`, for example infer.serve, on a free port.

        The log and the ready file are `place` with the suffixes .log and .json. `env` is added to
        the environment of the parent process. `of` names the server in errors.
        """
        self.name = f"the server of {of}" if of else program
        self._ready, self._log = place.with_suffix(".json"), place.with_suffix(".log")
        own = ["--port", "0", "--ready-file", str(self._ready)]
        # With -P a file in the current folder does not shadow the program.
        self._command = [sys.executable, "-P", "-m", program, *own, *flags]
        paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})}
        self._env.pop("MOA_PAIR", None)  # the flags, or defaults, name the models

    def __enter__(self) -> Child:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, env=self._env, stdout=log, stderr=log)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ready(self) -> dict[str, Any]:
        """Waits for the server; returns its URL and port.

        Raises InputError with the last line of the log if the server does not start.
        """
        end = time.monotonic() + READY_SECONDS
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise InputError(f"{self.name} did not start: {self.last_line()}")
            time.sleep(0.05)
        return json.loads(self._ready.read_text())

    def check(self) -> None:
        """Raises InputError with the last line of the log if the server has exited."""
        if (code := self._process.poll()) is not None:
            raise InputError(f"{self.name} ended with code {code}: {self.last_line()}")

    def last_line(self) -> str:
        """The last line of the log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"

    def cpu_seconds(self) -> float | None:
        """CPU seconds of all threads of the server; None if the system does not report them."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()  # the process name may contain spaces
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Raises SystemExit on SIGTERM within the block, so that child processes end too."""
    if threading.current_thread() is not threading.main_thread():  # signals need the main thread
        yield
        return

    def leave(*_: object) -> None:
        sys.exit(SIGTERM_CODE)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
