"""Standard streams that do not end a program: always open, and tolerant of encodings.

stdin    decodes invalid bytes to surrogates, which readers of text reject
stdout   escapes characters outside its encoding, as \\u00e9; its errors name the stream
stderr   escapes such characters too, and drops lines that a full device rejects

A stream that is closed at the start becomes the null device. Otherwise the next file that the
process opens would get the stream's descriptor, and libraries would write into that file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO

NAMES = ("stdin", "stdout", "stderr")


def prepare() -> None:
    """Sets up the three streams of `sys`; a replaced stream only gets an `errors` mode."""
    for number in range(len(NAMES)):
        try:
            os.fstat(number)
        except OSError:  # closed: the null device gets the lowest free descriptor
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, name in enumerate(NAMES):
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
        stream = getattr(sys, name)
        if number and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, writer(name, stream))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace" if number else "surrogateescape")


def writer(name: str, like: TextIO, number: int | None = None) -> TextIO:
    """A stream to descriptor `number`, by default that of `like`, whose settings it has.

    The settings are encoding and buffering. Characters outside the encoding are escaped. `name` is
    "stdout" or "stderr".
    """
    raw = _Descriptor(name, like.fileno() if number is None else number)
    lines = like.line_buffering or like.write_through
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, like.encoding, "backslashreplace", line_buffering=lines)


def log_writer() -> TextIO:
    """An unbuffered stream to stderr; raises OSError for a line that is not written."""
    return io.TextIOWrapper(_Descriptor("log", 2), "utf-8", write_through=True)


def finish() -> None:
    """Flushes stdout, or discards its buffer, which would make the interpreter fail at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # a stream without a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Descriptor(io.FileIO):
    """A descriptor whose errors name its stream; stderr only raises for closed pipes."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._stream = name

    def write(self, data: Any) -> int:
        try:
            while (count := super().write(data)) is None:  # made non-blocking by another process
                select.select([], [self], [])
            return count
        except OSError as error:
            if self._stream == "stderr" and error.errno != errno.EPIPE:
                return len(data)
            raise OSError(error.errno, error.strerror, self._stream) from error
