"""Programs on a mesh of two virtual devices, in one process that a test starts.

python -m tests.infer.mesh_run FOLDER     with a pair and `chats.jsonl` in it

Prints a JSON object with the exit code, stdout and stderr of each run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from infer import bench, client, server
from infer.cli.program import run
from tests import conftest  # noqa: F401  before jax compiles
from train import regenerate

MESH = ["--mesh", "tensor=2"]
PROMPT = "5,17,60,33,9"


def run_main(main: Callable[..., Any], *flags: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of a program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(main, list(flags))
        except SystemExit as end:
            return end.code, out.getvalue(), err.getvalue()
    raise AssertionError("a program ends by exiting")


def output_with_a_client(folder: Path, pair: list[str]) -> tuple[int, str, str]:
    """Returns the output of infer.server while a thread runs infer.client on it."""
    ready = folder / "ready.json"

    def ask() -> None:
        while not ready.exists():
            time.sleep(0.05)
        url = json.loads(ready.read_text())["url"]
        try:
            client.main(["--connect", url, *pair, "--prompt-ids", PROMPT, "--json", *CLIENT])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask, daemon=True).start()
    few = ["--slots", "1", "--warm", "4", "--max-tokens", "128", "--port", "0"]
    return run_main(server.main, *pair, *MESH, *few, "--ready-file", str(ready))


CLIENT = ["--mode", "chain", "--stop-ids", "2", "--max-new-tokens", "9", "--codec", "float32"]


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    folder = Path(sys.argv[1])
    target = ["--target", str(folder / "target")]
    pair = [*target, "--draft", str(folder / "draft")]
    few = ["--max-new-tokens", "9"]
    chats = str(folder / "chats.jsonl")
    weights = ["--weights", "int8", "--weights-cost", chats, "--repeats", "1", "--limit", "1"]
    prompts = ["--modes", "plain,chain", "--chain-depth", "3", "--prompts", chats]
    answers = ["--prompts", chats, "--output", str(folder / "new.jsonl"), "--ignore-stop"]
    found = {
        "bench": run_main(bench.main, *pair, *MESH, *prompts, *weights, "--json", *few),
        "regenerate": run_main(regenerate.main, *pair, *MESH, *answers, "--batch", "2", *few),
        "server": output_with_a_client(folder, pair),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
