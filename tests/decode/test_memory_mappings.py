"""Memory mappings of programs."""

import subprocess
import sys

import pytest

from infer.info import ROOT
from moa_jax.decode import background

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")


PROGRAM = """
import jax, jax.numpy as jnp
from moa_jax.decode import background
before = background.num_mappings()
program = jax.jit(lambda x: jnp.sort(jnp.tanh(x @ x), axis=0)).lower(jnp.eye(7)).compile()
assert before < background.num_mappings() < before + 1000
"""


@linux
def test_a_program_takes_some():
    """In a process of its own, where no program of another test is forgotten meanwhile."""
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, check=True)


@linux
def test_there_is_room_up_to_a_share(monkeypatch, tmp_path):
    most = tmp_path / "max_map_count"
    monkeypatch.setattr(background, "MOST", most)
    most.write_text(f"{background.num_mappings() * 2}\n")
    assert background.can_compile_more()
    most.write_text(f"{background.num_mappings()}\n")
    assert not background.can_compile_more()


def test_where_nobody_tells_there_is_room(monkeypatch, tmp_path):
    monkeypatch.setattr(background, "MOST", tmp_path / "absent")
    monkeypatch.setattr(background, "MAPPINGS", tmp_path / "absent")
    assert background.can_compile_more() and background.num_mappings() == 0
