"""The cache of compiled programs is on by default, bounded and silent, and can be turned off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from infer.cli import compile_cache
from infer.info import ROOT

# Compiles the given number of programs and prints the number of cache hits.
PROGRAM = """
import json, sys
from infer.cli.program import run

def main(arguments=None):
    import jax
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
    for size in range(1, 1 + int(sys.argv[1])):
        jax.jit(lambda x: (x @ x).sum() + x)(jax.numpy.ones((size, size)))
    found = {"hits": hits.count("/jax/compilation_cache/cache_hits")}
    print(json.dumps(found | {"folder": jax.config.jax_compilation_cache_dir}))

run(main)
"""
OURS = ("JAX_COMPILATION_CACHE_", "JAX_PERSISTENT_CACHE_", "JAX_ENABLE_COMPILATION_CACHE", "XDG_")


def start(programs: int, **variables: str) -> dict:
    """Returns the document that the program prints; stderr must be empty."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    command = [sys.executable, "-c", PROGRAM, str(programs)]
    done = subprocess.run(
        command, cwd=ROOT, env=kept | variables, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def entries(folder: Path) -> set[Path]:
    return set(folder.rglob("*-cache"))


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path):
    cold = start(2, XDG_CACHE_HOME=str(tmp_path))
    there = entries(tmp_path)
    assert cold["hits"] == 0 and there
    assert Path(cold["folder"]) == next(iter(there)).parent
    assert Path(cold["folder"]).parent == tmp_path / "moa-jax" / "compiled"
    warm = start(2, XDG_CACHE_HOME=str(tmp_path))
    assert warm["hits"] == len(there) and entries(tmp_path) == there


@pytest.mark.slow
def test_the_user_decides_where_it_is(tmp_path):
    own = tmp_path / "own"
    start(1, XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=str(own))
    assert entries(own) and entries(own) == entries(tmp_path)
    start(1, XDG_CACHE_HOME=str(tmp_path / "none"), JAX_COMPILATION_CACHE_DIR="")
    assert not (tmp_path / "none").exists()


def test_without_a_folder_to_write_there_is_no_cache(tmp_path):
    (tmp_path / "file").touch()
    assert start(1, XDG_CACHE_HOME=str(tmp_path / "file")) == {"hits": 0, "folder": None}


def test_leftovers_of_a_kill_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    monkeypatch.setattr(os, "environ", environment | {"XDG_CACHE_HOME": str(tmp_path)})
    folder = compile_cache.default_folder()
    folder.mkdir(parents=True)
    for name in ("whole-cache", "whole-atime", "cut-cache", "young-cache"):
        (folder / name).touch()
        os.utime(folder / name, (0, 0) if name != "young-cache" else None)  # perhaps still in use
    compile_cache.use()
    assert {path.name for path in folder.iterdir()} == {"whole-cache", "whole-atime", "young-cache"}
    assert os.environ[compile_cache.FOLDER] == str(folder)
