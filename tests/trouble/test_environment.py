"""The machine, its variables and local files of a user: errors of one line name the fix."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest

from infer.info import ROOT

PROMPT = ("--prompt", "Hello", "--max-new-tokens", 4, "--mode", "plain")
SIZES = r"need \S+ GiB of memory, and \w+ has \S+ GiB; lower .*"


def test_a_backend_that_is_not_there_is_one_line(start):
    line = start("infer.generate", *PROMPT, JAX_PLATFORMS="nonsense").refusal()
    assert "JAX_PLATFORMS=nonsense" in line and "set it to cpu" in line


@pytest.mark.parametrize(
    "command",
    [
        ("infer.generate", "--prompt", "Hello", "--cache-rows", 10**22),
        ("infer.serve", "--port", 0, "--slots", 100_000),
        ("infer.server", "--port", 0, "--slots", 100_000),
    ],
)
def test_more_memory_than_there_is_is_refused_before_it_is_taken(run, command):
    line = run(*command).refusal()
    assert re.search(SIZES, line) and command[-2] in line


# ---- local files with the names of ours -----------------------------------------------------


def test_each_program_has_a_command_that_nothing_shadows(monkeypatch, capsys):
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    files = [*(ROOT / "infer").glob("*.py"), *(ROOT / "train").glob("*.py")]
    programs = {f"{f.parent.name}.{f.stem}" for f in files if "__main__" in f.read_text()}
    programs |= {f"infer.{f.parent.name}" for f in (ROOT / "infer").glob("*/__main__.py")}
    assert {value.partition(":")[2] for value in table.values()} == programs
    for name in ("moa-generate", "moa-distill"):
        monkeypatch.setattr(sys, "argv", [name, "--no-such-flag"])
        with pytest.raises(SystemExit):
            EntryPoint(name, table[name], "console_scripts").load()()
        assert capsys.readouterr().err.startswith(f"{table[name].partition(':')[2]}: ")


def test_a_local_infer_is_named(start, tmp_path):
    (tmp_path / "infer.py").write_text("raise SystemExit('the own file runs')")
    line = start("train.distill", "--help", cwd=tmp_path, PYTHONPATH=str(ROOT)).refusal()
    assert f"{tmp_path}/infer.py shadows infer" in line and "moa-distill" in line
