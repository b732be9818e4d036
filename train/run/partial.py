"""An output that grows answer by answer and survives being cut: OUTPUT.partial, then OUTPUT.

{"max_new_tokens": 64, "model": ...}            the settings that decide the text
{"number": 7, "answer": "It is"}                conversation 7 goes on after this answer
{"number": 4, "line": "{\\"messages\\": ..."}   conversation 4 is over, with its line
{"number": 7, "fault": "a prompt of ..."}       conversation 7 is over, without any

Conversations end in any order; the output has them in the order of their numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from moa_jax.errors import InputError, first_line


class Partial:
    """The growing output of one run; one that is killed leaves at most part of a line in it."""

    def __init__(self, output: Path, *settings: dict[str, Any]) -> None:
        """`settings` decide the text; those after the first are how earlier versions wrote them.

        Raises InputError for a file that other flags began or that cannot be written.
        """
        self.output, self.path = output, output.with_name(output.name + ".partial")
        self.drifted = 0  # answers that came as texts which do not become their tokens again
        self._over: dict[int, dict[str, Any]] = {}
        self._heard: defaultdict[int, list[str]] = defaultdict(list)
        with contextlib.ExitStack() as stack:
            headers = [json.dumps(each, sort_keys=True).encode() for each in settings]
            entries = self._opened(stack, headers)
            self._stack = stack.pop_all()
        for entry in entries:
            self._note(entry)

    def _opened(self, stack: contextlib.ExitStack, headers: list[bytes]) -> list[dict[str, Any]]:
        """Opens the file for this run alone; the entries that are there."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = stack.enter_context(self.path.open("a", encoding="utf-8"))
            self._lock()
            return self._continue(headers)
        except OSError as error:
            reason = first_line(error)
            raise InputError(
                f"{self.path} cannot be written ({reason}): change --output"
            ) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{self.path}: another run writes it: wait for its end, or name another --output"
            ) from error
        except OSError as error:  # a file system without locks
            print(f"{self.path}: no lock ({error.strerror}): start one run only", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Another run may go on."""
        self._stack.close()

    def _continue(self, headers: list[bytes]) -> list[dict[str, Any]]:
        """The entries that are there; a new file, or one cut at its creation, gets a header."""
        content = self.path.read_bytes()
        length = content.rfind(b"\n") + 1
        first, *lines = content[:length].splitlines() or headers[:1]
        if first not in headers:
            raise InputError(
                f"{self.path} was made with other flags{_other(first, headers[0])}: repeat those "
                "or remove it"
            )
        entries = [json.loads(line) for line in lines]
        if not all("number" in entry for entry in entries):
            raise InputError(f"{self.path} was made by an older version: end it there or remove it")
        if length:
            os.truncate(self.path, length)
        else:
            self.path.write_bytes(headers[0] + b"\n")
        return entries

    @property
    def over(self) -> Collection[int]:
        """Numbers of the conversations that are over."""
        return self._over.keys()

    def heard(self, number: int) -> Sequence[str]:
        """The answers so far of a conversation that is not over."""
        return self._heard.get(number, ())

    def add(self, number: int, answer: str, drifted: bool = False) -> None:
        """Adds an answer after which its conversation goes on."""
        self._append({"number": number, "answer": answer}, drifted)

    def close(self, number: int, line: str | None, fault: str, drifted: bool = False) -> None:
        """Adds the line of a conversation that is over, or why it has none."""
        end = {"fault": fault} if line is None else {"line": line}
        self._append({"number": number} | end, drifted)

    def finish(self) -> Counter[str]:
        """Writes the lines as the output; returns the faults of conversations without.

        Raises InputError, and starts from nothing the next time, where there is no line.
        """
        ends = [self._over[number] for number in sorted(self._over)]
        faults = Counter(end["fault"] for end in ends if "fault" in end)
        if len(faults) and len(ends) == faults.total():
            self.path.unlink()
            fault, count = faults.most_common(1)[0]
            raise InputError(f"none of {len(ends)} conversations got an answer; {count}: {fault}")
        whole = self.output.with_name(self.output.name + ".tmp")
        with whole.open("w", encoding="utf-8") as file:
            file.writelines(end["line"] + "\n" for end in ends if "line" in end)
            file.flush()
            os.fsync(file.fileno())  # the answers are nowhere else in a moment
        os.replace(whole, self.output)
        self.path.unlink()
        return faults

    def _append(self, entry: dict[str, Any], drifted: bool) -> None:
        entry |= {"drifted": True} if drifted else {}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self._note(entry)

    def _note(self, entry: dict[str, Any]) -> None:
        self.drifted += entry.get("drifted", False)
        if "answer" in entry:
            self._heard[entry["number"]].append(entry["answer"])
        else:
            self._heard.pop(entry["number"], None)
            self._over[entry["number"]] = entry


def _other(first: bytes, header: bytes) -> str:
    """The settings in which two headers differ, for people."""
    try:
        ours, theirs = json.loads(header), json.loads(first)
        unlike = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    except (ValueError, TypeError, AttributeError):  # no header
        return ""
    shown = (f"{name} {theirs.get(name)}" for name in unlike)
    return f" ({', '.join(shown)})"
