"""A worker thread that runs beside decoding, for example to compile programs in advance.

On a CPU each compiled program takes some hundred memory mappings: XLA maps the code and the data of
every kernel separately. Linux gives a process 65,530 mappings by default (`vm.max_map_count`), and
XLA crashes when a mapping is refused; `can_compile_more` keeps optional programs below that limit.
Measured with jax 0.10.2 on the bundled pair: 170 to 450 mappings per program.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import NoReturn

from moa_jax.runtime.memory import log_failure

Work = Callable[[], object]
INTERRUPTED = 130  # 128 + SIGINT, as shells count
LEAST_BETWEEN_RETURNS_S = 30.0
MAX_TRIES = 3  # runs of a job that fails
MAPPINGS, MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")  # Linux only
SHARE = 0.75  # share of the limit up to which optional programs are compiled


class BackgroundWorker:
    """Runs jobs one after the other in a thread, each job once.

    At exit the process waits for the running job, since a compiler cannot be interrupted, and drops
    the waiting jobs; `exit_now` does not wait. A failed job is logged, and runs again when it is
    submitted again, at most MAX_TRIES times. No jobs are accepted while memory mappings are short.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Hashable, Work]] = deque()
        self._known: set[Hashable] = set()  # waiting, running, done, dropped or failed for good
        self._failures: Counter[Hashable] = Counter()
        self._is_full = False  # whether a job was refused because memory mappings are short
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._returned_at = 0.0  # time at which freed memory was last returned to the system
        _ALL.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a job is running or waiting."""
        return self._thread is not None

    def submit(self, name: Hashable, job: Work) -> bool:
        """Queues a job; False if its name was submitted before, unless a retry is due.

        Also returns False if `can_compile_more` does.
        """
        with self._lock:
            if name in self._known or self._is_full:
                return False
            if not can_compile_more():
                self._is_full = True
                line = "no more programs are compiled: memory mappings are short"
                logging.getLogger(__name__).warning(line)
                return False
            self._known.add(name)
            self._jobs.append((name, job))
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="background", daemon=True)
                thread.start()
                self._thread = thread  # `wait` cannot join a thread that has not started
        return True

    def wait(self) -> None:
        """Blocks until no job is running or waiting."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def drop(self) -> None:
        """Drops the waiting jobs."""
        with self._lock:
            self._jobs.clear()

    def exit_now(self, code: int) -> None:
        """Exits with this code at once if a job, which may take minutes, is running or waiting."""
        if self.is_busy:
            exit_now(code)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                name, job = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                with self._lock:
                    self._failures[name] += 1
                    tries = self._failures[name]
                    if tries < MAX_TRIES:
                        self._known.discard(name)
                line = f"background job failed (try {tries} of {MAX_TRIES})"
                log_failure(logging.getLogger(__name__), line, error)
            if time.monotonic() - self._returned_at > LEAST_BETWEEN_RETURNS_S:
                self._returned_at = time.monotonic()
                _trim_malloc()


def _trim_malloc() -> None:
    """Returns memory that a compiler has freed to the system; glibc would keep 50 MB per program.

    Callers must call this function rarely: other threads reuse freed memory, and new pages are
    slow. A server that called it after every program took twice as long per answer.
    """
    with contextlib.suppress(OSError, AttributeError):  # other systems and C libraries
        ctypes.CDLL(None).malloc_trim(0)


_ALL: weakref.WeakSet[BackgroundWorker] = weakref.WeakSet()

# At exit, functions run in reverse order of registration. The finalizers of `weakref` take the
# constants from a trace that is not complete ("KeyError: Var(...)"), so a running job must end
# first: the first finalizer, which registers them all, is created before `_stop_all`.
weakref.finalize(_ALL, bool)


@atexit.register
def _stop_all() -> None:
    """Waits for running jobs before the interpreter exits; Ctrl-C ends the process at once."""
    try:
        for background in list(_ALL):
            background.drop()
            background.wait()
    except KeyboardInterrupt:
        exit_now(INTERRUPTED)


def exit_now(code: int) -> NoReturn:
    """Flushes the output and ends the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or file
            stream.flush()
    os._exit(code)


def num_mappings() -> int:
    """Returns the number of memory mappings of this process; 0 without `/proc/self/maps`."""
    with contextlib.suppress(OSError):  # also without a free file descriptor
        return MAPPINGS.read_bytes().count(b"\n")
    return 0


def can_compile_more() -> bool:
    """Returns whether optional programs, which only make decoding faster, may be compiled."""
    return not MOST.exists() or num_mappings() < SHARE * int(MOST.read_text())
