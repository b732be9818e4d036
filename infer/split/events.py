"""The server's log: one JSON object a line on stderr, without texts, tokens or secrets."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Log = Callable[..., None]  # log("open", session="...", tokens=12)


def write_event(event: str, **facts: Any) -> None:
    """Write one event with its time; facts that are None are left out."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
    known = {name: fact for name, fact in facts.items() if fact is not None}
    # One write a line, so that lines of several threads do not mix.
    sys.stderr.write(json.dumps({"time": stamp, "event": event} | known) + "\n")
    sys.stderr.flush()


def place_of(error: BaseException) -> str:
    """Kind of an exception and the lines it came through; its text could hold what users wrote."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    lines = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    return f"{type(error).__name__} at {' < '.join(reversed(list(lines)))}"


class _AsEvent(logging.Handler):
    """Warnings of libraries as events; tracebacks shrink to their places."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        message = place_of(error) if error else record.getMessage().splitlines()[0]
        write_event("library", name=record.name, level=record.levelname.lower(), what=message)


def log_warnings() -> None:
    """Have uvicorn's warnings and errors in the same log."""
    logger = logging.getLogger("uvicorn")
    if not logger.handlers:
        logger.addHandler(_AsEvent(logging.WARNING))
        logger.setLevel(logging.WARNING)
        logger.propagate = False
