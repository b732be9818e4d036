"""The log of a server: one JSON object per line on stderr, without user text, tokens or secrets."""

from __future__ import annotations

import json
import logging
import queue
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TextIO

from infer.cli.streams import log_writer

Log = Callable[..., None]  # log("open", session="...", tokens=12)


class EventLog:
    """Writes events from its own thread, so a full pipe does not block the server.

    The context manager writes the remaining events on exit. An event is dropped if `most` events
    are queued already, or if the stream rejects the write; the next event that is written has the
    number of dropped events as `lost_events`.
    """

    def __init__(self, stream: TextIO | None = None, most: int = 10_000) -> None:
        self._stream = log_writer() if stream is None else stream
        self._lines: queue.Queue[tuple[str, int] | None] = queue.Queue(most)
        self._lost, self._lock = 0, threading.Lock()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)

    def __call__(self, event: str, **facts: Any) -> None:
        """Logs one event with its time, without facts that are None."""
        with self._lock:
            lost, self._lost = self._lost, 0
        facts["lost_events"] = lost or None
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        known = {name: fact for name, fact in facts.items() if fact is not None}
        line = json.dumps({"time": stamp, "event": event} | known) + "\n"
        try:
            self._lines.put_nowait((line, lost))
        except queue.Full:
            self._lose(1 + lost)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._lines.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(1.0)

    def _write(self) -> None:
        while (entry := self._lines.get()) is not None:
            line, lost = entry
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):  # ValueError: the stream is closed
                self._lose(1 + lost)

    def _lose(self, count: int) -> None:
        with self._lock:
            self._lost += count


def place_of(error: BaseException) -> str:
    """Returns the type of an exception and its last lines; its message may contain user text."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
    return f"{type(error).__name__} at {' < '.join(reversed(lines))}"


class WarningHandler(logging.Handler):
    """Turns warnings of uvicorn and moa_jax into events of a log, without their tracebacks.

    Within the context manager these warnings are written only to the log.
    """

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log
        self._loggers = [logging.getLogger(name) for name in ("uvicorn", "moa_jax")]

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        what = record.getMessage().partition("\n")[0]
        if error:
            what = f"{what}: {place_of(error)}"
        self._log("library", name=record.name, level=record.levelname.lower(), what=what)

    def __enter__(self) -> Self:
        for logger in self._loggers:
            logger.addHandler(self)
            logger.propagate = False
        self._loggers[0].setLevel(logging.WARNING)  # uvicorn logs more by default
        return self

    def __exit__(self, *exception: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
            logger.propagate = True
