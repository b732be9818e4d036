"""Requests to stop a run: SIGTERM, Ctrl-C, or the preemption of any of its processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """Records a request to stop, which the loop obeys between two updates.

    Several processes stop after the same update, whichever process got the signal: JAX's preemption
    service chooses the update. The service handles SIGTERM itself, and Ctrl-C is forwarded as
    SIGTERM. In a single process a second Ctrl-C interrupts at once.
    """

    def __init__(self) -> None:
        self._name = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others get no signals
            if jax.process_count() > 1:
                self._listen(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            else:
                self._listen(signal.SIGTERM, self._note)
                self._listen(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def reached(self, step: int) -> str:
        """The reason to stop after `step` updates, or ""; every process calls this per update."""
        if jax.process_count() > 1:
            return "a preemption" if multihost_utils.reached_preemption_sync_point(step) else ""
        return self._name

    def _listen(self, number: int, handler: Callable[..., Any]) -> None:
        self._before[number] = signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self._name = signal.Signals(number).name
        signal.signal(number, self._before[number])  # a second signal is not deferred
