"""Console scripts of the programs: `moa-distill` runs `python -m train.distill`.

`python -m` searches the current folder first, so a local train.py shadows the package; a console
script is not shadowed. pyproject.toml has the table: moa-distill = "infer.commands:train.distill".
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import NoReturn

from infer.cli.program import run


class ProgramFolder:
    """The programs of a folder as attributes, each a function without arguments."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Callable[[], NoReturn]:
        program = importlib.import_module(f"{self._folder}.{name}")
        return functools.partial(run, program.main)


infer, train = ProgramFolder("infer"), ProgramFolder("train")
