"""The programs as commands that no local file shadows: `moa-distill` is `python -m train.distill`.

`python -m` looks for train and infer in the current folder first, so that a train.py of one's own
would run instead. pyproject.toml has the table: moa-distill = "infer.commands:train.distill".
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import NoReturn

from infer.program import run


class ProgramFolder:
    """The programs of a folder, as functions without arguments."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Callable[[], NoReturn]:
        program = importlib.import_module(f"{self._folder}.{name}")
        return functools.partial(run, program.main)


infer, train = ProgramFolder("infer"), ProgramFolder("train")
