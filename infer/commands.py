"""Console scripts of the programs: `moa-distill` runs `python -m train.distill`.

`python -m` searches the current folder first, so a local train.py shadows the package; a console
script is not shadowed. pyproject.toml has the table: moa-distill = "infer.commands:train.distill".
Servers and clients need packages of the extra `serve`, and an installation may lack these.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import NoReturn

from infer.cli.program import BAD_INPUT, run


class ProgramFolder:
    """The programs of a folder as attributes, each a function without arguments."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __getattr__(self, name: str) -> Callable[[], NoReturn]:
        program = f"{self._folder}.{name}"
        try:
            return functools.partial(run, importlib.import_module(program).main)
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            line = f"the package {package} is missing; pip install it (servers: 'moa-jax[serve]')"
            sys.stderr.write(f"{program}: {line}\n")
            sys.exit(BAD_INPUT)


infer, train = ProgramFolder("infer"), ProgramFolder("train")
