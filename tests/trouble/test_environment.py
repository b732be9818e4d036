"""The machine, its variables and local files of a user: errors of one line name the fix."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib

import pytest

from infer.info import ROOT
from moa_jax.runtime import memory

PROMPT = ("--prompt", "Hello", "--max-new-tokens", 4, "--mode", "plain")
SIZES = r"need \S+ GiB of memory, and \w+ has \S+ GiB; lower .*"


def test_a_backend_that_is_not_there_is_one_line(start):
    line = start("infer.generate", *PROMPT, JAX_PLATFORMS="nonsense").refusal()
    assert "JAX_PLATFORMS=nonsense" in line and "set it to cpu" in line


SLOTS = ("--port", 0, "--slots", 100_000)
LARGE = {"serve": SLOTS, "server": SLOTS, "generate": (*PROMPT[:2], "--cache-rows", 10**22)}


@pytest.mark.parametrize("program", LARGE)
def test_more_memory_than_there_is_is_refused_before_it_is_taken(run, program):
    line = run(f"infer.{program}", *LARGE[program]).refusal()
    assert re.search(SIZES, line) and LARGE[program][-2] in line


CGROUPS = [("", "memory.max", "anon"), ("memory", "memory.limit_in_bytes", "total_rss")]


@pytest.mark.parametrize("controllers, name, field", CGROUPS)
def test_what_a_container_uses_is_not_free(controllers, name, field, tmp_path, monkeypatch):
    """The limit of a group counts without what its processes hold; page cache is free."""
    groups = {".": ("max", 9), "outer": ("9000", 2000), "outer/inner": ("8000", 7000)}
    for group, (limit, used) in groups.items():
        (tmp_path / "top" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "top" / group / name).write_text(f"{limit}\n")
        (tmp_path / "top" / group / "memory.stat").write_text(f"file 900\n{field} {used}\n")
    (tmp_path / "cgroup").write_text(f"3:cpuset:/\n0:{controllers}:/outer/inner\n")
    (tmp_path / "meminfo").write_text("MemAvailable: 50 kB\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setitem(memory.CGROUP_LIMITS, controllers, tmp_path / "top" / name)
    assert memory.free_bytes() == 1000
    (tmp_path / "top/outer/memory.stat").unlink()
    (tmp_path / "top/outer/inner/memory.stat").write_text(f"{field} 8500\n")
    assert memory.free_bytes() == 0


@pytest.mark.parametrize("name, package", [("serve", "uvicorn"), ("server", "websockets")])
def test_a_server_without_its_packages_names_the_extra(name, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / f"infer/{name}.py"), run_name="__main__")
    advice = "is missing; pip install 'moa-jax[serve]'"
    assert capsys.readouterr().err == f"infer.{name}: the package {package} {advice}\n"


# ---- local files with the names of ours -----------------------------------------------------


def test_each_program_has_a_command():
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    files = [*(ROOT / "infer").glob("*.py"), *(ROOT / "train").glob("*.py")]
    programs = {f"{f.parent.name}.{f.stem}" for f in files if "__main__" in f.read_text()}
    programs |= {f"infer.{f.parent.name}" for f in (ROOT / "infer").glob("*/__main__.py")}
    assert {value.partition(":")[2] for value in table.values()} == programs


def test_a_local_infer_is_named(start, tmp_path):
    (tmp_path / "infer.py").write_text("raise SystemExit('the own file runs')")
    line = start("train.distill", "--help", cwd=tmp_path, PYTHONPATH=str(ROOT)).refusal()
    assert f"{tmp_path}/infer.py shadows infer" in line and "moa-distill" in line
