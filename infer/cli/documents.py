"""JSON documents that grow by one result at a time, on stdout or in a resumable file.

    {"settings": {...}, "results": [R, R, R]}

Each result is flushed. A document that Ctrl-C, SIGTERM or an exception interrupts ends with a mark,
such as `"cut": {"by": "SIGINT", "done": 3, "of": 400}`. The document of a killed process ends after
or within a result; `]}` after the last whole result makes the document valid JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from infer.cli.program import INTERRUPTED
from infer.server_process import SIGTERM_CODE, ended_by_sigterm
from moa_jax.errors import InputError, first_line
from moa_jax.files.json_text import to_json
from moa_jax.files.paths import lock_output

BETWEEN = ", "
CODES = {"SIGINT": INTERRUPTED, "SIGTERM": SIGTERM_CODE}  # exit codes of interrupted programs


class GrowingDocument:
    """A document that grows; `results` are the file's results from an earlier run.

    `rest` is written after the results.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        prompts: Sequence[list[int]],
        path: Path | None = None,
        go_on: str = "",
    ) -> None:
        """Opens a document of one result per prompt, with its `prompt_ids`, in `path` or on stdout.

        `go_on` is a hint on resuming, printed when the document is interrupted. Raises InputError
        for a file with other settings, prompts or content, and for a file that another run writes.
        """
        self._head = to_json({"settings": settings})[:-1] + ', "results": ['
        self._total, self._path, self._advice = len(prompts), path, go_on
        self._stack = contextlib.ExitStack()
        self._file: TextIO | None = None  # None: `sys.stdout` at the time of writing
        self.results: list[dict[str, Any]] = []
        self.rest: dict[str, Any] = {}
        if path is not None:
            if path.exists() and not path.is_file():
                raise InputError(f"--output {path} is not a regular file; choose another path")
            with contextlib.ExitStack() as stack:
                self._file = stack.enter_context(
                    path.open("a+", encoding="utf-8", errors="replace")
                )
                self._go_on(prompts)
                self._stack = stack.pop_all()
        self.done = len(self.results)

    def _go_on(self, prompts: Sequence[list[int]]) -> None:
        """Reads the whole results of the file, and truncates the file after them."""
        lock_output(self._file, self._path)
        self._file.seek(0)
        text = self._file.read()
        if not text.startswith(self._head):
            if not self._head.startswith(text):  # else the file ends within its head
                raise InputError(f"{self._path} {_difference(text, self._head)}")
            self._file.truncate(0)
            return
        self.results, end = _results(text, len(self._head))
        known = [result.get("prompt_ids") for result in self.results]
        if known != list(prompts[: len(known)]):
            raise InputError(
                f"{self._path} answers other prompts; repeat those, or choose another --output"
            )
        self._file.truncate(end if self.results else 0)

    def __enter__(self) -> Self:
        self._stack.enter_context(ended_by_sigterm())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends the document; an `Exception` before the first result writes nothing."""
        with self._stack:
            if error is None:
                self._end()
            elif self.done or not isinstance(error, Exception):
                self.rest |= cut_mark(error, self.done, self._total)
                with contextlib.suppress(OSError):  # OSError may be `error` itself
                    self._end()
                if name := _signal_of(error):
                    line = f"{name}: {self.done} of {self._total} answers are written{self._advice}"
                    print(line, file=sys.stderr, flush=True)

    def add(self, result: Mapping[str, Any]) -> None:
        """Writes the next result."""
        text = (BETWEEN if self.done else self._head) + to_json(result)
        self.done += 1
        self._write(text)

    def _end(self) -> None:
        rest = f", {to_json(self.rest)[1:-1]}" if self.rest else ""
        self._write(f"{'' if self.done else self._head}]{rest}}}\n")

    def _write(self, text: str) -> None:
        print(text, end="", file=self._file or sys.stdout, flush=True)


def cut_mark(error: BaseException, done: int, total: int) -> dict[str, Any]:
    """The mark of a document that `error` interrupted after `done` of `total` results."""
    by = _signal_of(error) or f"{type(error).__name__}: {first_line(error)}"
    return {"cut": {"by": by, "done": done, "of": total}}


class Interruption:
    """The signal that interrupted a block; `error` is None if the block completed."""

    error: BaseException | None = None

    @property
    def code(self) -> int:
        """The exit code of an interrupted program: 128 + signal, as in shells."""
        return CODES[_signal_of(self.error)]

    def mark(self, done: int, total: int, go_on: str = "") -> dict[str, Any]:
        """The mark of an interrupted document, also shown on stderr; {} without an interruption."""
        if self.error is None:
            return {}
        print(f"{_signal_of(self.error)} after {done} of {total}{go_on}", file=sys.stderr)
        return cut_mark(self.error, done, total)


@contextlib.contextmanager
def until_cut() -> Iterator[Interruption]:
    """Ends the block on Ctrl-C or SIGTERM; the program continues after the block."""
    cut = Interruption()
    try:
        with ended_by_sigterm():
            yield cut
    except (KeyboardInterrupt, SystemExit) as error:
        if not _signal_of(error):
            raise
        cut.error = error


def _signal_of(error: BaseException) -> str | None:
    if isinstance(error, KeyboardInterrupt):
        return "SIGINT"
    is_ours = isinstance(error, SystemExit) and error.code == SIGTERM_CODE
    return "SIGTERM" if is_ours else None


def _results(text: str, place: int) -> tuple[list[dict[str, Any]], int]:
    """The whole results of a document from offset `place` on, and the offset of their end."""
    found, end, decoder = [], place, json.JSONDecoder()
    with contextlib.suppress(ValueError):  # no result, or a truncated one
        while True:
            result, end = decoder.raw_decode(text, place)
            found.append(result)
            if not text.startswith(BETWEEN, end):
                break
            place = end + len(BETWEEN)
    return found, end


def _difference(text: str, head: str) -> str:
    """The error message for a file whose settings differ from this run's, after the path."""
    begin, decoder = len('{"settings": '), json.JSONDecoder()
    try:
        ours, theirs = (decoder.raw_decode(each, begin)[0] for each in (head, text))
        unlike = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    except (ValueError, TypeError, AttributeError):
        return "is not a document of this program; choose another --output"
    shown = ", ".join(f"{name} {theirs.get(name)!r:.60}" for name in unlike)
    return f"was made with other settings ({shown}); repeat those, or choose another --output"
