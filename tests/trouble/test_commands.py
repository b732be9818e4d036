"""Local files with the names of ours: commands that nothing shadows, lines that name a shadow."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint

import pytest

from infer.info import ROOT


def commands() -> dict[str, EntryPoint]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return {name: EntryPoint(name, value, "console_scripts") for name, value in table.items()}


def test_each_program_has_a_command():
    files = [*(ROOT / "infer").glob("*.py"), *(ROOT / "train").glob("*.py")]
    programs = {f"{f.parent.name}.{f.stem}" for f in files if "__main__" in f.read_text()}
    programs |= {f"infer.{f.parent.name}" for f in (ROOT / "infer").glob("*/__main__.py")}
    found = {each.value.partition(":")[2] for each in commands().values()}
    assert found == programs and len(commands()) == len(programs)


def test_a_local_infer_is_named(start, tmp_path):
    (tmp_path / "infer.py").write_text("raise SystemExit('the own file runs')")
    line = start("train.distill", "--help", cwd=tmp_path, PYTHONPATH=str(ROOT)).refusal()
    assert f"{tmp_path}/infer.py shadows infer" in line and "moa-distill" in line


@pytest.mark.slow
def test_installed_commands_run_beside_a_local_train(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    for name in ("train.py", "infer.py"):
        (own / name).write_text("raise SystemExit('the own file runs')")
    copy = tmp_path / "copy"  # or the build would write into the clone
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    wanted = [name for name in files.stdout.decode().split("\0") if name.endswith((".py", ".toml"))]
    for name in [*wanted, "README.md", "LICENSE"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", tmp_path / "there", copy], check=True, capture_output=True)
    command = [tmp_path / "there" / "bin" / "moa-distill", "--no-such-flag"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "there")}
    done = subprocess.run(command, cwd=own, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("train.distill: "), done
