"""Requests to stop a run: SIGTERM, Ctrl-C, or the preemption of any of its processes."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

from jax.experimental import multihost_utils

from infer.cli.program import TRY_AGAIN
from moa_jax.runtime.multihost import count, end_now

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Launch files send SIGKILL 300 s after SIGTERM: the difference is for the other processes' exits.
STOP_TIMEOUT_S = 240.0
LATE = (
    "the run has not stopped {:g} s after a signal, for example because a save hangs; give the "
    "same command again: it resumes from the newest complete checkpoint"
)
EARLY = "SIGTERM ended the run before its first update; give the same command again"

# C's `signal`: JAX handles SIGTERM in C, and Python can neither call nor restore such a handler.
_set_handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
    ("signal", ctypes.CDLL(None))
)


class StopRequest:
    """Records a request to stop, which the loop obeys between two updates.

    Before the first update nothing is to be saved: SIGTERM ends all processes at once with code 75,
    also within a long call, and Ctrl-C raises KeyboardInterrupt. From `begin` on, several processes
    stop after the same update, whichever process got the signal: JAX's preemption service chooses
    the update, and Ctrl-C counts as SIGTERM. In a single process a second signal is not deferred. A
    run that has not stopped `STOP_TIMEOUT_S` after the first signal ends with code 75, even if its
    main thread hangs.
    """

    def __init__(self) -> None:
        self._name, self._has_begun = "", False
        self._stack = contextlib.ExitStack()
        late = (LATE.format(STOP_TIMEOUT_S), TRY_AGAIN)
        self._deadline = threading.Timer(STOP_TIMEOUT_S, end_now, late)
        self._deadline.daemon = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            several = count() > 1
            notify = self._stack.enter_context(_handler_of_jax()) if several else None
            self._stack.enter_context(_received_by(lambda number: self._receive(number, notify)))
            for number in SIGNALS:
                before = signal.getsignal(number)
                self._stack.callback(signal.signal, number, before)
                note = self._interrupt if several else self._note_before(before)
                signal.signal(number, note)
        return self

    def __exit__(self, *exception: object) -> None:
        self._deadline.cancel()
        self._stack.close()

    def begin(self) -> None:
        """The first update is done, so that the run has something to save."""
        self._has_begun = True

    def reached(self, step: int) -> str:
        """The reason to stop after `step` updates, or ""; every process calls this per update."""
        if count() == 1:
            return self._name
        if not multihost_utils.reached_preemption_sync_point(step):
            return ""
        self._start_deadline()  # the signal may have come to another process, or before the run
        return "a preemption"

    def _receive(self, number: int, notify: Callable[[int], None] | None) -> None:
        """Handles a signal in a thread of its own."""
        if number == signal.SIGTERM and not self._has_begun:
            end_now(EARLY, TRY_AGAIN)
        if number in SIGNALS and self._has_begun:
            self._start_deadline()
            if notify is not None:
                notify(signal.SIGTERM)

    def _start_deadline(self) -> None:
        with contextlib.suppress(RuntimeError):  # it runs already
            self._deadline.start()

    def _interrupt(self, number: int, frame: object) -> None:
        """A handler in Python: `_received_by` gets signals with such a handler only."""
        if number == signal.SIGINT and not self._has_begun:
            raise KeyboardInterrupt

    def _note_before(self, before: Any) -> Callable[..., None]:
        def note(number: int, frame: object) -> None:
            self._interrupt(number, frame)
            self._name = signal.Signals(number).name
            signal.signal(number, before)  # a second signal is not deferred

        return note


@contextlib.contextmanager
def _received_by(receive: Callable[[int], None]) -> Iterator[None]:
    """Calls `receive` with the number of each signal, in a thread.

    Python's handlers wait for the main thread, which may be in a library, as in a save that hangs.
    """
    reader, writer = socket.socketpair()

    def read() -> None:
        while numbers := reader.recv(1):
            receive(numbers[0])

    writer.setblocking(False)
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()  # ends the thread
        thread.join()
        reader.close()


@contextlib.contextmanager
def _handler_of_jax() -> Iterator[Callable[[int], None]]:
    """The function of JAX's preemption service for SIGTERM, which JAX gets back at the end."""
    handler = _set_handler(signal.SIGTERM, None)
    try:
        yield ctypes.CFUNCTYPE(None, ctypes.c_int)(handler)
    finally:
        _set_handler(signal.SIGTERM, handler)
