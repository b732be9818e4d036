"""Documents of many answers, written as they come: on stdout, or in a file that can go on.

    {"settings": {...}, "results": [R, R, R]}

Each result is flushed. What Ctrl-C, SIGTERM or a fault cuts ends with a mark, such as
`"cut": {"by": "SIGINT", "done": 3, "of": 400}`. What was killed ends after a result, perhaps with
a part of the next one; `]}` after the last whole result makes it JSON again.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from infer.program import INTERRUPTED
from infer.server_process import SIGTERM_CODE, ended_by_sigterm
from moa_jax.errors import InputError, first_line
from moa_jax.files.json_text import to_json
from moa_jax.files.places import lock_output

BETWEEN = ", "
CODES = {"SIGINT": INTERRUPTED, "SIGTERM": SIGTERM_CODE}  # exit codes of what was cut


class GrowingDocument:
    """A document under way; `results` are those of an earlier run that its file had at the start.

    `rest` is written after the results.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        prompts: Sequence[list[int]],
        path: Path | None = None,
        go_on: str = "",
    ) -> None:
        """A result per prompt, with its `prompt_ids`, goes to stdout, or to the file `path`.

        `go_on` is printed where the document is cut: the way to continue it.
        Raises InputError for a file with other settings, prompts or content, and for one that
        another run writes.
        """
        self._head = to_json({"settings": settings})[:-1] + ', "results": ['
        self._total, self._path, self._advice = len(prompts), path, go_on
        self._stack = contextlib.ExitStack()
        self._file: TextIO | None = None  # None: stdout, whatever that is by then
        self.results: list[dict[str, Any]] = []
        self.rest: dict[str, Any] = {}
        if path is not None:
            if path.exists() and not path.is_file():
                raise InputError(f"--output {path} is not a regular file: choose another path")
            with contextlib.ExitStack() as stack:
                self._file = stack.enter_context(
                    path.open("a+", encoding="utf-8", errors="replace")
                )
                self._go_on(prompts)
                self._stack = stack.pop_all()
        self.done = len(self.results)

    def _go_on(self, prompts: Sequence[list[int]]) -> None:
        """Reads the results that the file has, and removes what follows them."""
        lock_output(self._file, self._path)
        self._file.seek(0)
        text = self._file.read()
        if not text.startswith(self._head):
            if not self._head.startswith(text):  # else it was cut at its creation
                raise InputError(f"{self._path} {_difference(text, self._head)}")
            self._file.truncate(0)
            return
        self.results, end = _results(text, len(self._head))
        known = [result.get("prompt_ids") for result in self.results]
        if known != list(prompts[: len(known)]):
            raise InputError(
                f"{self._path} answers other prompts: repeat those, or choose another --output"
            )
        self._file.truncate(end if self.results else 0)

    def __enter__(self) -> Self:
        self._stack.enter_context(ended_by_sigterm())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends the document; a fault before the first result leaves stdout as it was."""
        with self._stack:
            if error is None:
                self._end()
            elif self.done or not isinstance(error, Exception):
                self.rest |= cut_mark(error, self.done, self._total)
                with contextlib.suppress(OSError):  # which may be the fault
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
    """The mark of a document that an exception has cut."""
    by = _signal_of(error) or f"{type(error).__name__}: {first_line(error)}"
    return {"cut": {"by": by, "done": done, "of": total}}


class Interruption:
    """The signal that cut a work short; `error` is None where it came to its end."""

    error: BaseException | None = None

    @property
    def code(self) -> int:
        """The exit code of what was cut: 128 + signal, as shells count."""
        return CODES[_signal_of(self.error)]

    def mark(self, done: int, total: int, go_on: str = "") -> dict[str, Any]:
        """The mark of a document of what was done; also a line on stderr."""
        if self.error is None:
            return {}
        print(f"{_signal_of(self.error)} after {done} of {total}{go_on}", file=sys.stderr)
        return cut_mark(self.error, done, total)


@contextlib.contextmanager
def until_cut() -> Iterator[Interruption]:
    """Ctrl-C or SIGTERM ends what is inside; the program goes on, and shows what was done."""
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
    """The whole results from a place of a document on, and the place where they end."""
    found, end, decoder = [], place, json.JSONDecoder()
    with contextlib.suppress(ValueError):  # not a result, or half of one
        while True:
            result, end = decoder.raw_decode(text, place)
            found.append(result)
            if not text.startswith(BETWEEN, end):
                break
            place = end + len(BETWEEN)
    return found, end


def _difference(text: str, head: str) -> str:
    """The difference of a file's settings from those of this run, and what to do about it."""
    begin, decoder = len('{"settings": '), json.JSONDecoder()
    try:
        ours, theirs = (decoder.raw_decode(each, begin)[0] for each in (head, text))
        unlike = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    except (ValueError, TypeError, AttributeError):
        return "is not a document of this program: choose another --output"
    shown = ", ".join(f"{name} {theirs.get(name)!r:.60}" for name in unlike)
    return f"was made with other settings ({shown}): repeat those, or choose another --output"
