"""The standard streams of a process, open and tolerant, so that none of them ends its work.

stdin    decodes bytes that its encoding lacks to surrogates; the reader of a text refuses these
stdout   writes letters that its encoding lacks as \\u00e9; its errors name the stream
stderr   writes such letters likewise, and drops lines that a full device refuses

A stream that is closed at the start becomes the null device. Otherwise the next file that the
process opens gets the number of the stream, and output of libraries ends in that file.
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
    """Sets up the three streams of `sys`; others than the process's own only get `errors`."""
    for number in range(len(NAMES)):
        try:
            os.fstat(number)
        except OSError:  # closed; the null device gets the lowest number that is free
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
    """A stream to a descriptor with the encoding and the buffering of `like`, and its descriptor.

    Letters that the encoding lacks are escaped. `name` is "stdout" or "stderr".
    """
    raw = _Descriptor(name, like.fileno() if number is None else number)
    lines = like.line_buffering or like.write_through
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, like.encoding, "backslashreplace", line_buffering=lines)


def log_writer() -> TextIO:
    """A stream to stderr without a buffer; it raises OSError for a line that is not written."""
    return io.TextIOWrapper(_Descriptor("log", 2), "utf-8", write_through=True)


def finish() -> None:
    """Writes the rest of stdout, or drops it: the interpreter would fail at it when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):  # a stream without a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Descriptor(io.FileIO):
    """A descriptor whose errors name its stream; stderr has errors of closed pipes alone."""

    def __init__(self, name: str, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._stream = name

    def write(self, data: Any) -> int:
        try:
            while (count := super().write(data)) is None:  # another process made it non-blocking
                select.select([], [self], [])
            return count
        except OSError as error:
            if self._stream == "stderr" and error.errno != errno.EPIPE:
                return len(data)
            raise OSError(error.errno, error.strerror, self._stream) from error
