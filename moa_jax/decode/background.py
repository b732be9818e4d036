"""Work that nobody waits for, such as compiling what may be wanted soon."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable

Job = Callable[[], object]
INTERRUPTED = 130  # 128 + SIGINT, as shells count


class Background:
    """Does jobs one after the other in a thread, each of them once.

    A process that ends waits for the job that was begun, since a compiler must not lose the ground
    under its feet, and leaves out the others. A job that fails is logged: what it would have made
    is simply not there.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._known: set[Hashable] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        _ALL.add(self)

    def submit(self, name: Hashable, job: Job, next: bool = False) -> None:
        """Does a job, unless one of this name was ever given; `next` is before all that wait."""
        with self._lock:
            if name in self._known:
                return
            self._known.add(name)
            (self._jobs.appendleft if next else self._jobs.append)(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="background", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Returns when nothing is left to do."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """Leaves out what was not begun, and returns when what was begun is done."""
        with self._lock:
            self._jobs.clear()
        self.wait()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # of any kind, since nobody waits for this thread
                logging.getLogger(__name__).warning("work in the background failed: %s", error)


_ALL: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Before the interpreter ends; whoever interrupts the wait ends the process at once."""
    try:
        for background in list(_ALL):
            background.stop()
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(INTERRUPTED)
