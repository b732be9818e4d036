"""A tracker of experiments, Weights & Biases or trackio, in a process of its own.

    run    --- numbers of a record as a JSON line; never waits -->    pipe of 64 KiB
    pipe   --- init(...), log(...) per line, finish() at the end -->  the tracker's package

So a package that raises, hangs or ends its process neither stops nor slows the run. A record that
finds the pipe full is dropped and counted; metrics.jsonl has all records. The end of the pipe ends
the process, also after a kill of the run. The process runs this file, which imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

END_S = 30.0  # for the tracker to send its last records


class Tracker:
    """Sends the numbers of a run to a tracker; prints a line on stderr for lost records."""

    def __init__(self, package: str, folder: str, run_id: str, settings: Mapping[str, Any]) -> None:
        """Starts the run FOLDER-ID of the tracker, or continues it.

        The project is $WANDB_PROJECT or $TRACKIO_PROJECT, by default moa-jax.
        """
        begin = {
            "project": os.environ.get(f"{package.upper()}_PROJECT", "moa-jax"),
            "name": f"{folder}-{run_id}",
            "resume": "allow",
            "config": settings,
        }
        if package == "wandb":  # trackio identifies a run by its name
            begin["id"] = run_id
        self._package, self._dropped, self._rest = package, 0, b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, package],
            stdin=subprocess.PIPE,
            stdout=2,  # packages print addresses, and stdout belongs to the program
            bufsize=0,
            start_new_session=True,  # Ctrl-C stops the run, which then ends the tracker
        )
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)
        self._send(begin)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers of a step, or counts them as dropped."""
        self._send({"step": step, "numbers": numbers})

    def close(self) -> None:
        """Waits up to `END_S` for the tracker to finish, and kills it then."""
        end, fault = time.monotonic() + END_S, ""
        while not self._flush() and self._process.poll() is None and time.monotonic() < end:
            select.select([], [self._pipe], [], 0.1)
        self._dropped += bool(self._rest)
        self._pipe.close()
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            fault = f"it did not finish within {END_S:g} s and was stopped; at least "
        if fault or self._dropped:
            _warn(self._package, f"{fault}{self._dropped} records were dropped")

    def _send(self, message: Mapping[str, Any]) -> None:
        if not self._flush():
            self._dropped += 1
            return
        self._rest = json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> bool:
        """Writes bytes that are left, and returns whether all are in the pipe; never waits."""
        with contextlib.suppress(OSError):  # the pipe is full, or the process has ended
            while self._rest:
                self._rest = self._rest[os.write(self._pipe.fileno(), self._rest) :]
        return not self._rest


def _warn(package: str, fault: str) -> None:
    text = f"run.tracker {package}: {' '.join(fault.split())}; metrics.jsonl has all records"
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _pass_on(package: str) -> None:
    """Calls the package for every line of stdin, until its end; prints the first error."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the end of the pipe ends this process
        signal.signal(number, signal.SIG_IGN)
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the package's processes inherit no pipe
    failed = 0
    try:
        tracker = importlib.import_module(package)
        tracker.init(**json.loads(next(lines)))
    except Exception as error:
        _warn(package, f"{type(error).__name__} at the start: {error}")
        return
    for line in lines:
        try:
            message = json.loads(line)
            tracker.log(message["numbers"], step=message["step"])
        except Exception as error:
            if not failed:
                _warn(package, f"{type(error).__name__}: {error}")
            failed += 1
    try:
        tracker.finish()
    except Exception as error:
        _warn(package, f"{type(error).__name__} at the end: {error}")
    if failed:
        _warn(package, f"{failed} records failed")


if __name__ == "__main__":
    _pass_on(sys.argv[1])
