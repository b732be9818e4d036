"""An answer on a terminal: verified text, and after it dim text that may be taken back.

Positions are not remembered, because they move when the screen scrolls. Everything that can change
is on or below the row where the verified text ends. The widths of characters tell how far below
that row the cursor is, and each update writes the row again.
"""

from __future__ import annotations

import contextlib
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from typing import TextIO

DIM, PLAIN = "\033[2m", "\033[0m"
CLEAR = "\r\033[J"  # from the start of the row to the end of the screen


class Screen:
    """Writes one answer; others may write to the terminal only inside `aside`."""

    def __init__(
        self, out: TextIO, size: Callable[[], tuple[int, int]] = shutil.get_terminal_size
    ) -> None:
        """`size` returns columns and rows, which may change."""
        self._out, self._size = out, size
        self.begin()

    def begin(self) -> None:
        """Begins an answer; the cursor is at the start of an empty row."""
        self._row = self._dim = ""  # the last row of the verified text; the dim text
        self._num_verified = 0  # characters

    def show(self, verified: str, dim: str) -> None:
        """Shows verified text, which continues the verified text before, and new dim text."""
        new, dim = visible(verified[self._num_verified :]), visible(dim)
        self._num_verified = len(verified)
        if not new and dim == self._dim:
            return
        columns, rows = self._size()
        self._take_back()
        text = self._row + new
        self._out.write(text)
        self._row = text[row_starts(text, columns)[-1] :]
        # Dim text that scrolls away could not be taken back, so it waits.
        starts = row_starts(self._row + dim, columns)
        if len(starts) > max(rows - 1, 1):
            dim = dim[: max(starts[max(rows - 1, 1)] - len(self._row), 0)].rstrip("\n")
        self._dim = dim
        self._write_dim()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which others write whole lines, which appear above the last row."""
        self._take_back()
        self._out.flush()
        yield
        self._out.write(self._row)
        self._write_dim()

    def end(self, text: str) -> None:
        """Shows the whole answer and leaves it."""
        self.show(text, "")
        self._out.write("\n")
        self._out.flush()

    def _take_back(self) -> None:
        """Clears the last row of the verified text and everything below it."""
        below = len(row_starts(self._row + self._dim, self._size()[0])) - 1
        up = f"\033[{below}A" if below else ""
        if self._row or self._dim:
            self._out.write(up + CLEAR)

    def _write_dim(self) -> None:
        self._out.write(f"{DIM}{self._dim}{PLAIN}" if self._dim else "")
        self._out.flush()


def visible(text: str) -> str:
    """Text without characters that would move the cursor, except line ends."""
    text = text.replace("\t", "    ")
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) != "Cc")


def row_starts(text: str, columns: int) -> list[int]:
    """Indices at which screen rows begin in a text that starts at the first column."""
    starts, column = [0], 0
    for index, character in enumerate(text):
        if character == "\n":
            starts.append(index + 1)
            column = 0
            continue
        if unicodedata.category(character) in ("Mn", "Me", "Cf"):
            width = 0
        else:
            width = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if column + width > columns:
            starts.append(index)
            column = 0
        column += width
    return starts
