"""Programs as their users start them, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infer.info import ROOT
from tests.conftest import Done


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
