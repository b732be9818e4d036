"""Several processes end as one: whatever fails in one of them, all say so and none waits."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from infer.info import ROOT
from moa_jax.config import DistillConfig
from tests.model_folders import refusal
from tests.train.test_training import distill_config
from train import distill

# What process 0 and process 1 do once they have met; what does not fail waits for the others.
WAIT = "processes.gathered(jax.numpy.ones(1))"
PROGRAM = """
import jax
import time
from pathlib import Path
from infer.program import Parser, run
from moa_jax.errors import InputError
from moa_jax.training import processes
from train.run import cluster

def raising(error):
    raise error

def main(arguments=None):
    parser = Parser("toy")
    cluster.add_flags(parser)
    args = parser.parse_args(arguments)
    with cluster.joined(args, parser.prog):
        print(jax.process_count())
        if jax.process_index() == 0:
            {first}
        else:
            {second}

run(main)
"""
MISSING = "processes.on_first(lambda: Path('missing/file').read_text())"
NO_FILE = "missing/file: No such file or directory: choose a path that can be used"


def ends(first: str, second: str, within: float = 30.0) -> list[tuple[int, list[str], str]]:
    """Exit code, lines of the program and all of stderr, by process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    code = PROGRAM.format(first=first, second=second)
    command = [sys.executable, "-c", code, "--coordinator", place, "--processes", "2", "--process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    both = [subprocess.Popen([*command, str(index)], **pipes) for index in range(2)]
    until, found = time.monotonic() + within, []
    try:
        for each in both:
            _, told = each.communicate(timeout=until - time.monotonic())
            lines = [line for line in told.splitlines() if line.startswith("toy: ")]
            found.append((each.returncode, lines, told))
    finally:
        for each in both:
            each.kill()
            each.communicate()
    return found


def test_a_fault_on_one_process_ends_both():
    (code, lines, told), (own_code, own_lines, own_told) = ends(WAIT, "raising(ValueError('ours'))")
    assert (code, own_code) == (1, 1)
    assert own_lines == ["toy: ValueError: ours"] and own_told.startswith("Traceback")
    assert lines == ["toy: process 1: ValueError: ours"] and "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "first, second, code, lines",
    [
        (MISSING, MISSING, 2, [f"toy: {NO_FILE}", f"toy: (process 0: )?{NO_FILE}"]),
        (
            "Path('missing/file').read_text()",
            WAIT,
            2,
            [f"toy: {NO_FILE}", f"toy: process 0: {NO_FILE}"],
        ),
        (WAIT, "raising(InputError('x: bad: mend it'))", 2, ["process 1: x: bad", "x: bad"]),
        (WAIT, "raising(KeyboardInterrupt())", 130, ["process 1: interrupted", "interrupted"]),
        (
            "processes.on_first(lambda: 1 / 0)",
            "processes.on_first(lambda: 2)",
            1,
            ["toy: ZeroDivisionError: division", "process 0: ZeroDivisionError: division"],
        ),
        ("raising(InputError('x: bad: mend it'))", "pass", 2, ["x: bad", "process 0: x: bad"]),
        ("pass", "raising(InputError('x: bad: mend it'))", 2, ["process 1: x: bad", "x: bad"]),
        ("time.sleep(2)", "pass", 0, []),
    ],
    ids=["told of", "path", "refused", "interrupted", "fault told of", "late", "later", "nothing"],
)
def test_both_end_alike(first, second, code, lines):
    found = ends(first, second)
    assert [ended for ended, _, _ in found] == [code, code], found
    for wanted, (_, told, _) in zip(lines, found, strict=False):
        assert len(told) == 1 and re.search(wanted, told[0]), told


def test_decoding_in_training_is_refused_before_anything_is_loaded(monkeypatch, tmp_path: Path):
    config: DistillConfig = distill_config(tmp_path, tmp_path / "no target")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    run = dataclasses.replace(config.run, decode_prompts=2)
    config = dataclasses.replace(config, run=run)
    line = refusal(distill.distill, config)
    assert line.startswith("run.decode_prompts needs one process: set it to 0")
