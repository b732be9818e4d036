"""An output that grows a batch at a time and survives being cut: OUTPUT.partial, then OUTPUT."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from moa_jax.errors import InputError, first_line


class Answered(Protocol):
    """One record that is done: its line, or why there is none."""

    fault: str

    def line(self) -> str | None: ...


class Partial:
    """The growing output: a line for the flags that decide its text, then a line for each batch.

    A process that is killed leaves whole batches and at most part of a line, which is removed.
    """

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        """Raises InputError for a file that other flags began or that cannot be written."""
        self.output, self.path = output, output.with_name(output.name + ".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._blocks = self._continue(json.dumps(settings, sort_keys=True).encode())
        except OSError as error:
            reason = first_line(error)
            raise InputError(
                f"{self.path} cannot be written ({reason}): change --output"
            ) from error

    def _continue(self, header: bytes) -> list[dict[str, Any]]:
        """The batches that are there; a new file, or one cut at its creation, gets the header."""
        content = self.path.read_bytes() if self.path.exists() else b""
        length = content.rfind(b"\n") + 1
        first, *blocks = content[:length].splitlines() or [header]
        if first != header:
            raise InputError(f"{self.path} was made with other flags: repeat those or remove it")
        if length:
            os.truncate(self.path, length)
        else:
            self.path.write_bytes(header + b"\n")
        return [json.loads(block) for block in blocks]

    @property
    def done(self) -> int:
        """Conversations that are over so far."""
        return sum(len(block["lines"]) + len(block["faults"]) for block in self._blocks)

    def append(self, talks: Sequence[Answered]) -> None:
        """Adds one batch: the lines of its conversations, and the faults of those without."""
        lines = [talk.line() for talk in talks]
        faults = [talk.fault for talk, line in zip(talks, lines, strict=True) if line is None]
        block = {"lines": [line for line in lines if line is not None], "faults": faults}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(block) + "\n")
        self._blocks.append(block)

    def finish(self) -> Counter[str]:
        """Writes the lines of all batches as the output; returns the faults of the others.

        Raises InputError, and starts from nothing the next time, where there is no line.
        """
        faults = Counter(fault for block in self._blocks for fault in block["faults"])
        if len(faults) and self.done == faults.total():
            self.path.unlink()
            ((fault, count),) = faults.most_common(1)
            raise InputError(f"none of {self.done} conversations got an answer; {count}: {fault}")
        whole = self.output.with_name(self.output.name + ".tmp")
        with whole.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for block in self._blocks for line in block["lines"])
        os.replace(whole, self.output)
        self.path.unlink()
        return faults
