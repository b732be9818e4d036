"""Metrics as JSON lines: one object a line, each with the step it belongs to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np


class MetricsLog:
    """Appends to a JSONL file; opened at step s it drops what an earlier run wrote after s."""

    def __init__(self, path: Path, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        """Writes one line and returns it as plain Python numbers."""
        record = {"step": step, "kind": kind} | {k: _plain(v) for k, v in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        return record

    def close(self) -> None:
        self._file.close()


def _complete_lines(path: Path) -> list[str]:
    """The lines of a file that may have been cut in the middle of its last one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.split("\n")[:-1]


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    rounded = np.round(array.astype(np.float64), 7).tolist()
    return rounded if array.dtype.kind == "f" else array.tolist()
