"""The wheel in an environment of its own: programs, models and configs outside a clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from infer.info import ROOT
from moa_jax.version import __version__

PACKAGES = ("moa_jax", "infer", "train", "configs")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('..')"
HELP = """if True:
    import contextlib, io, importlib.metadata
    for command in importlib.metadata.distribution("moa-jax").entry_points:
        with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
            command.load().args[0](["--help"])
        assert shown.getvalue().startswith("usage: " + command.value.partition(":")[2]), command
"""
NO_SERVER = "import sys; sys.modules['starlette'] = None; from infer.commands import infer as i; i."


@pytest.mark.slow
def test_the_wheel_runs_outside_the_clone(tmp_path):
    """The source distribution of a working tree makes the wheel; nothing is downloaded."""

    def run(folder: str, *command: object, code: int = 0) -> str:
        env = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
        words, place = list(map(str, command)), {"cwd": tmp_path / folder, "env": env}
        done = subprocess.run(words, **place, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    python, pip = tmp_path / "venv/bin/python", (sys.executable, "-m", "pip", "-q")
    here = ("--no-deps", "--no-index", "--no-build-isolation")
    others = shutil.ignore_patterns(".*", "*.egg-info", "runs", "build", "dist")
    shutil.copytree(ROOT, tmp_path / "clone", ignore=others)
    run("clone", sys.executable, "-c", BUILD)
    run("", *pip, "wheel", *here, *tmp_path.glob("*.tar.gz"))
    (wheel,) = tmp_path.glob("*.whl")

    names = set(zipfile.ZipFile(wheel).namelist())
    about = f"moa_jax-{__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, about}
    assert not [name for name in names if name.endswith(".pyc")] and wheel.stat().st_size < 20e6
    files = [path for top in PACKAGES for path in (ROOT / top).rglob("*.py")]
    files += filter(Path.is_file, (ROOT / "moa_jax/demo").rglob("*"))
    assert {str(path.relative_to(ROOT)) for path in files} <= names
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    (empty := tmp_path / "empty").mkdir()
    run("", sys.executable, "-m", "venv", "--without-pip", "venv")
    run("empty", *pip, "--python", python, "install", *here, wheel)
    (packages,) = tmp_path.glob("venv/lib/*/site-packages")
    # The packages of this environment, without its .pth files, which name the clone.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    run("empty", python, "-c", HELP)
    advice = "starlette is missing; pip install it (servers: 'moa-jax[serve]')\n"
    line = run("empty", python, "-c", f"{NO_SERVER}serve", code=2)
    assert line == f"infer.serve: the package {advice}"
    config = ("--config", "configs/tiny.py", "--optim.total_steps", "0")
    line = run("empty", python.with_name("moa-distill"), *config, code=2)
    assert line.startswith("train.distill: total_steps is 0")
    said = run("empty", python.with_name("moa-generate"), "--prompt", "Hello!", "--json")
    assert json.loads(said)["results"][0]["text"] and not list(empty.iterdir())
