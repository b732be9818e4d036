"""The wall time of a run: useful updates, waits and restarts, and hosts that are slow.

Records of starts, speeds and ends of speed.jsonl count, all with their time. A
resumed run drops the records after its checkpoint, so lost updates count as part of the restart.

    start   speed ... speed   [lost]   start   speed ... speed   end
    |  waits and updates  |  a restart  |   waits and updates   |
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from moa_jax.training.metrics import Record

SLOW = 2.0  # times the median
MATTERS = 0.05  # of the time of an update: a smaller difference delays no update
NAME_BYTES = 64  # of a host's name


class WallTime:
    """The parts of the wall time of a run since its first start."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.useful_s = self.restarts_s = 0.0
        self.restarts = 0
        self._first, self._last = time.time(), None
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Takes the next record of speed.jsonl; time between an end and a start does not count."""
        is_counted = record["kind"] in ("start", "end") or "step_s" in record
        if "time" not in record or not is_counted:  # records of earlier versions have no time
            return
        if self._last is None:
            self._first = record["time"]
        elif record["kind"] == "speed":
            self.useful_s += record["step_s"] * (record["step"] - self._last["step"])
        elif record["kind"] == "start" and self._last["kind"] == "end":
            self._first += record["time"] - self._last["time"]
        elif record["kind"] == "start":
            self.restarts_s += record["time"] - self._last["time"]
            self.restarts += 1
        self._last = record

    def goodput(self, now: float) -> float:
        """The share of the wall time that useful updates took."""
        return min(1.0, self.useful_s / max(now - self._first, 1e-9))

    def line(self, now: float) -> str:
        """The shares as a line."""
        total = max(now - self._first, 1e-9)
        waits = max(0.0, total - self.useful_s - self.restarts_s)
        return (
            f"goodput {self.goodput(now):.0%} of {total / 3600:.2f} h since the first start; "
            f"{waits / total:.0%} waits (compilation, evaluations, saves), "
            f"{self.restarts_s / total:.0%} restarts ({self.restarts})"
        )


class HostTimes:
    """Seconds per update in which this process works itself, rather than waits for devices."""

    def __init__(self) -> None:
        self._own = self._all = 0.0
        self._count = 0
        self._entered: float | None = None
        self._left: float | None = None

    def enter(self) -> None:
        """An update was started; the process may wait for an earlier one from here on."""
        now = time.perf_counter()
        if self._left is not None:
            self._own += now - self._left
            self._all += now - self._entered
            self._count += 1
        self._entered = now

    def leave(self) -> None:
        """The wait is over."""
        self._left = time.perf_counter()

    def pause(self) -> None:
        """The time until the next update does not count."""
        self._left = None

    def slow_hosts(self) -> list[str]:
        """A line per slow host; every process calls this at the same step."""
        if not self._count or jax.process_count() == 1:
            return []
        name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES)
        seconds = np.array((self._own, self._all), np.float32) / self._count
        times_P2, names_PN = multihost_utils.process_allgather(
            (seconds, np.frombuffer(name, np.uint8))
        )
        names = [bytes(name_N).decode(errors="replace").strip() for name_N in names_PN]
        return slow_lines(names, times_P2[:, 0].tolist(), times_P2[:, 1].max())


def slow_lines(names: Sequence[str], own_s: Sequence[float], update_s: float) -> list[str]:
    """A line per host whose own work per update is slow, and long enough to delay updates."""
    median = sorted(own_s)[(len(own_s) - 1) // 2]  # of two hosts, the faster one
    return [
        f"process {process} on {name} is slow: {each:.2g} s of its own work per update, and the "
        f"median is {median:.2g} s; check its CPU, its disk and its other programs"
        for process, (name, each) in enumerate(zip(names, own_s, strict=True))
        if each >= SLOW * median and each - median >= MATTERS * update_s
    ]
