"""Programs as users start them, in separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from infer.info import ROOT
from tests.conftest import Done
from tests.meeting import wait_for
from tests.model_folders import save_random_pair


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """A random pair of two layers, in the folder `llama`; programs compile layer by layer."""
    root = tmp_path_factory.mktemp("pairs")
    save_random_pair(root / "llama", "llama", seed=0, num_hidden_layers=2)
    return root


@pytest.fixture
def start() -> Callable[..., Done]:
    """Runs a program in a separate process: slower, with separate streams and variables."""

    def start(name: str, *arguments: object, cwd: Path = ROOT, **variables: str) -> Done:
        command = [sys.executable, "-m", name, *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True)
        out, err = (each.decode(errors="backslashreplace") for each in (done.stdout, done.stderr))
        return Done(done.returncode, out, err)

    return start


@pytest.fixture
def served(tmp_path) -> Callable[..., contextlib.AbstractContextManager]:
    """Starts a server with redirected streams; returns its address without /v1, and its process."""

    @contextlib.contextmanager
    def served(name: str, *flags: object, streams="2>/dev/null") -> Iterator[tuple[str, Popen]]:
        ready = tmp_path / f"{name}.json"
        words = [sys.executable, "-m", name, "--port", 0, "--ready-file", ready, *flags]
        command = f"exec {shlex.join(map(str, words))} {streams}"
        process = Popen(["bash", "-c", command], cwd=ROOT)
        try:
            wait_for(lambda: ready.exists() or process.poll() is not None, 300)
            yield f"http://127.0.0.1:{json.loads(ready.read_text())['port']}", process
        finally:
            process.kill()
            process.wait()

    return served
