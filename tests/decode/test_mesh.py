"""Decoding on several devices writes the text of one device, for any mesh."""

import argparse
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from infer.cli.flags.mesh import mesh_sizes
from infer.cli.flags.pair import DEMO
from infer.info import ROOT
from moa_jax import InputError, Session, load_drafter, load_target
from moa_jax.model import sharding
from moa_jax.model.cache import KV, HiddenCache
from moa_jax.pretrained import check_mesh
from tests.decode.mesh_run import CONFIG, WIDE
from tests.model_folders import refusal

# tests/serve/test_processes.py has more devices than key-value heads.
CASES = """
    batch:eagle3-ids:wide@tensor=4 batch:glide:wide@tensor=2
    batch:independent:wide@tensor=2,data=2 batch:lookup:chain@data=3
    batch:moa-1+words+experts:wide@tensor=2,data=2 engine:eagle:lagging@tensor=2,data=2
    engine:moa-1:chain:grammar@tensor=2
    split:moa-0+int8:chain@tensor=2
    files:moa-0@tensor=4 files:moa-0+int8+experts@tensor=2,data=2
    batch:moa-1+gemma:wide@tensor=2
""".split()


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    """Returns the result of each case, from a process with four devices."""
    command = [sys.executable, "-m", "tests.decode.mesh_run", *CASES]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, text=True, capture_output=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {found["case"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_writes_the_texts_of_one_device(found, case):
    """Files are streamed: each device receives its part of every array, never a whole array."""
    one = found[case]
    assert one["found"] == one["expected"]
    if "wide" in case or "lookup" in case:
        assert one["accepted"] > 0
    if "files" in case:
        tensor = mesh_sizes(case.split("@")[1])["tensor"]
        assert one["put"] > 30
        assert 1 / tensor < one["share"] < 1 / tensor + 0.06  # norms are whole everywhere


def test_a_pair_lies_on_one_mesh():
    """The drafter is loaded on the target's mesh; a drafter on another mesh is refused."""
    one = sharding.decoding_mesh(tensor=1)
    target = load_target(DEMO / "target", mesh=one)
    assert sharding.mesh_of(load_drafter(DEMO / "draft", target).params) == one
    elsewhere = load_drafter(DEMO / "draft", load_target(DEMO / "target"))
    with pytest.raises(InputError, match="load both with the same mesh"):
        Session(target, elsewhere)
    for sizes in ((0, 1), (1, 0), (-1, -1)):
        with pytest.raises(InputError, match="give sizes of at least 1"):
            sharding.decoding_mesh(*sizes)
    with pytest.raises(InputError, match="a mesh of the axes x does not decode; make one with"):
        load_target(DEMO / "target", mesh=jax.sharding.Mesh(jax.devices()[:1], ("x",)))


# ---- what is cut, and what is refused -----------------------------------------------------


def test_a_mesh_splits_what_is_kept_of_a_text():
    """Caches are split by heads, the states for a lagging drafter by features, all by rows."""
    array = lambda *sizes: jax.ShapeDtypeStruct(sizes, np.float32)
    state = (KV(*[array(2, 4, 6, 8)] * 2), HiddenCache(array(2, 1, 6, 32)), array(2, 6, 32))
    specs = sharding.specs_of(state, AbstractMesh((2, 4), sharding.DECODE_AXES))
    heads = P("data", "tensor", None, None)
    assert specs == (KV(heads, heads), HiddenCache(P("data", None, None, "tensor")), P("data"))


def test_the_flag_names_sizes():
    assert mesh_sizes("tensor=4,data=2") == {"tensor": 4, "data": 2}
    assert mesh_sizes("tensor=1") == {}
    for wrong in ("4", "fsdp=2", "tensor=2,tensor=2", "tensor=0", "tensor=x"):
        with pytest.raises(argparse.ArgumentTypeError):
            mesh_sizes(wrong)


def test_meshes_that_cannot_be_are_refused():
    count = len(jax.devices())
    found = refusal(sharding.decoding_mesh, tensor=count + 1)
    assert f"tensor={count + 1},data=1 needs {count + 1} devices" in found
    mesh = AbstractMesh((1, 5), sharding.DECODE_AXES)
    with pytest.raises(
        InputError, match="tensor=5 does not divide the target's feed-forward of 48"
    ):
        check_mesh(CONFIG, mesh)
    with pytest.raises(InputError, match="tensor=5 does not divide the target's experts of 12"):
        check_mesh(WIDE.experts.config, mesh)
