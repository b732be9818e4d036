"""An output that grows answer by answer and survives interruption: OUTPUT.partial, then OUTPUT.

{"max_new_tokens": 64, "version": 2, ...}       the settings that decide the answers
{"number": 7, "token_ids": [52, 4], ...}        conversation 7 continues after this answer
{"number": 4, "line": "{\\"messages\\": ..."}   conversation 4 is over, with its line
{"number": 7, "fault": "a prompt of ..."}       conversation 7 is over, without a line

An entry with a line may also have a fault: the reason why the conversation ends early.

Conversations end in any order; the output is sorted by conversation number.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from moa_jax.errors import InputError, first_line
from moa_jax.files.json_text import to_json
from moa_jax.files.paths import lock_output
from moa_jax.files.whole_files import whole_file
from train.run.answers import TargetAnswer

VERSION = 2  # of the entries; raise this number when their format changes


class Partial:
    """The growing output of one run; a killed run leaves at most one incomplete line at the end."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        """`settings` are the settings that decide the answers.

        Raises InputError for a file of other settings or of another version, and for a file that
        cannot be written.
        """
        self.output, self.path = output, output.with_name(output.name + ".partial")
        self.drifted = 0  # answers of earlier versions whose text re-tokenizes differently
        self._over: dict[int, dict[str, Any]] = {}
        self._answers_by_number: defaultdict[int, list[TargetAnswer]] = defaultdict(list)
        with contextlib.ExitStack() as stack:
            header = json.dumps(settings | {"version": VERSION}, sort_keys=True).encode()
            entries = self._opened(stack, header)
            self._stack = stack.pop_all()
        for entry in entries:
            self._note(entry)

    def _opened(self, stack: contextlib.ExitStack, header: bytes) -> list[dict[str, Any]]:
        """Opens and locks the file for this run, and returns its entries."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = stack.enter_context(self.path.open("a", encoding="utf-8"))
            lock_output(self._file, self.path)
            return self._continue(header)
        except OSError as error:
            reason = first_line(error)
            raise InputError(
                f"{self.path} cannot be written ({reason}); change --output"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the file, so that another run may lock it."""
        self._stack.close()

    def _continue(self, header: bytes) -> list[dict[str, Any]]:
        """The entries of the file; drops an incomplete last line, and adds a missing header."""
        content = self.path.read_bytes()
        length = content.rfind(b"\n") + 1
        first, *lines = content[:length].splitlines() or [header]
        if first != header:
            raise InputError(f"{self.path} {_difference(first, header)}")
        if not length and not header.startswith(content):
            raise InputError(f"{self.path} {_difference(content, header)}")
        if length:
            os.truncate(self.path, length)
        else:
            self.path.write_bytes(header + b"\n")
        return [json.loads(line) for line in lines]

    @property
    def over(self) -> Collection[int]:
        """Numbers of the finished conversations."""
        return self._over.keys()

    def answers_of(self, number: int) -> Sequence[TargetAnswer]:
        """The answers so far of an unfinished conversation."""
        return self._answers_by_number.get(number, ())

    def add(self, answer: TargetAnswer) -> None:
        """Adds an answer after which its conversation continues."""
        self._append(answer._asdict())

    def close(self, number: int, line: str | None, fault: str) -> None:
        """Adds the end of a conversation: its line if any, and the reason for an early end."""
        end = {"line": line, "fault": fault}
        self._append({"number": number} | {key: each for key, each in end.items() if each})

    def finish(self) -> tuple[dict[int, str], dict[int, str]]:
        """Writes the lines as the output.

        Returns the faults of conversations without a line, and of those that end early, by number.

        Raises InputError if no conversation has a line, after deleting the partial file, and if the
        output exists by now.
        """
        ends = dict(sorted(self._over.items()))
        faults = {number: end["fault"] for number, end in ends.items() if "fault" in end}
        left_out = {number: each for number, each in faults.items() if "line" not in ends[number]}
        if left_out and len(left_out) == len(ends):
            self.path.unlink()
            ((fault, count),) = Counter(left_out.values()).most_common(1)
            raise InputError(f"none of {len(ends)} conversations got an answer; {count}: {fault}")
        if self.output.exists():  # created since this run began
            raise InputError(
                f"{self.output} exists by now; move it away and give the same command again"
            )
        with whole_file(self.output) as fresh, fresh.open("w", encoding="utf-8") as file:
            file.writelines(end["line"] + "\n" for end in ends.values() if "line" in end)
            file.flush()
            os.fsync(file.fileno())  # the partial file is deleted next
        self.path.unlink()
        return left_out, {number: faults[number] for number in faults.keys() - left_out.keys()}

    def _append(self, entry: dict[str, Any]) -> None:
        self._file.write(to_json(entry) + "\n")
        self._file.flush()
        self._note(entry)

    def _note(self, entry: dict[str, Any]) -> None:
        self.drifted += bool(entry.pop("drifted", False))  # in files of earlier versions
        if "token_ids" in entry:
            self._answers_by_number[entry["number"]].append(TargetAnswer(**entry))
        else:
            self._answers_by_number.pop(entry["number"], None)
            self._over[entry["number"]] = entry


def _difference(first: bytes, header: bytes) -> str:
    """The difference between a file's header and this run's header, and a remedy."""
    try:
        ours, theirs = json.loads(header), json.loads(first)
        unlike = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    except (ValueError, TypeError, AttributeError):
        return "has no header; remove it or change --output"
    if "version" in unlike:
        return (
            "was made by another version of this program; finish it with that version or remove it"
        )
    shown = ", ".join(f"{name} {theirs.get(name)}" for name in unlike)
    return f"was made with other flags ({shown}); repeat those or remove it"
