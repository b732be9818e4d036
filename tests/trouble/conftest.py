"""Programs as their users start them: in this process, or in one of their own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from infer.cli.program import run as run_program

ROOT = Path(__file__).parents[2]


class Done(NamedTuple):
    """The exit code of a program and its output."""

    code: int
    out: str
    err: str

    def refusal(self) -> str:
        """The only line of a refusal, which is the last one on stderr, with exit code 2."""
        assert self.code == 2 and "Traceback" not in self.err, self
        return self.err.rstrip("\n").rpartition("\n")[2]


@pytest.fixture
def run(capsys) -> Callable[..., Done]:
    """Runs a program, such as "infer.generate", in this process: fast, with its main alone."""

    def run(name: str, *arguments: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_program(importlib.import_module(name).main, [str(each) for each in arguments])
        code = end.value.code or 0
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def start() -> Callable[..., Done]:
    """Runs a program in a process of its own: slower, with streams and variables of its own."""

    def start(
        name: str,
        *arguments: object,
        stdin: bytes = b"",
        cwd: Path = ROOT,
        **variables: str,
    ) -> Done:
        command = [sys.executable, "-m", name, *map(str, arguments)]
        done = subprocess.run(
            command, input=stdin, cwd=cwd, env=os.environ | variables, capture_output=True
        )
        out, err = (each.decode(errors="backslashreplace") for each in (done.stdout, done.stderr))
        return Done(done.returncode, out, err)

    return start
