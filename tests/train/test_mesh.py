"""Training on several devices and processes has the same losses for any placement of arrays."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.info import ROOT
from moa_jax.config import MeshConfig
from moa_jax.model import convert, sharding
from moa_jax.training.distillation import abstract_frozen, make_train_step
from moa_jax.training.flops import abstract_batch, programs_in
from tests.meeting import free_port
from tests.model_folders import refusal
from tests.train import mesh_run

STEPS = 8
MESHES = {  # with the case of one device that each must equal
    "2,2,1": "1,1,1",
    "1,2,2,copied/blocks": "1,1,1",
    "1,2,2/cached": "1,1,1",
    "1,2,2/parts,sliced": "1,1,1/parts,sliced",
    "1,2,2/bfloat16": "1,1,1/bfloat16",
    "1,2,2/experts": "1,1,1/experts",
}


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.train.mesh_run", str(STEPS), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def results_of(process: subprocess.Popen) -> dict[str, Any]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-2000:]
    words = (line.partition(" ") for line in out.splitlines())  # gloo writes there too
    return dict(json.loads(rest) for word, _, rest in words if word == "result")


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Returns all cases, computed by one process with four devices."""
    cases = dict.fromkeys((*MESHES.values(), *MESHES, "1,2,2/sent"))
    return results_of(start(*cases, "--devices", "4"))


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_meshes_train_as_one_device(results, case):
    """The target is split over the mesh, or copied to each device.

    Each device drafts different rows over `tensor`; with too few rows, the drafter is split like
    the target. Partial sums of bfloat16 activations are rounded, and those of gradients are not.
    """
    found, alone = results[case], results[MESHES[case]]
    assert len(found) == len(alone) == STEPS
    if case.endswith("bfloat16"):
        np.testing.assert_allclose(found[:2], alone[:2], rtol=1e-4)  # later, errors add up
    np.testing.assert_allclose(found, alone, rtol=1e-2 if "bfloat16" in case else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", mesh_run.DRAFTER_KINDS)
def test_no_collective_carries_logits(results, drafter):
    """Neither logits of tokens nor the whole head are sent; the loss is parallel over its parts.

    Logits of a draft vocabulary alone are summed, since each device holds some of its tokens.
    """
    tokens, vocab = {mesh_run.T, mesh_run.ROWS // 2 * mesh_run.T}, mesh_run.VOCAB
    subset = {mesh_run.DRAFT_VOCAB, mesh_run.DRAFT_VOCAB // 2}
    collectives = [(kind, set(shape)) for kind, shape in results["1,2,2/sent"][drafter]]
    assert collectives and not any(vocab in shape for _, shape in collectives)
    of_tokens = [(kind, shape) for kind, shape in collectives if tokens & shape]
    assert not any(vocab // 2 in shape for _, shape in of_tokens)
    assert {kind for kind, shape in of_tokens if subset & shape} <= {"all-reduce"}


@pytest.mark.slow
def test_two_processes_on_one_mesh_train_as_one(results):
    place = f"127.0.0.1:{free_port()}"
    flags = ("--devices", "2", "--coordinator", place, "--processes", "2", "--process")
    first, second = (start("1,2,2", *flags, index) for index in "01")
    found = results_of(first)["1,2,2"]
    assert results_of(second) == {}  # process 0 prints for all
    assert len(found) == STEPS
    np.testing.assert_allclose(found, results["1,1,1"], rtol=1e-5)


def test_gradients_of_a_step_in_bfloat16_are_summed_in_float32():
    """Covers gradients of weights, norms and biases: sums over tokens, and so over devices."""
    config = mesh_run.config_of(MeshConfig(1, 1, 1), dtype="bfloat16")
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    program = make_train_step(config, mesh_run.TARGET, mesh)
    frozen = abstract_frozen(mesh_run.TARGET, jnp.bfloat16)
    state = jax.eval_shape(program.init, jax.random.key(0))
    batch = abstract_batch(mesh_run.ROWS, mesh_run.T)
    traced = jax.make_jaxpr(program.update)(state, frozen, batch)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.params)}
    shapes |= {(math.prod(shape[:1]), math.prod(shape[1:])) for shape in shapes if len(shape) > 1}
    made = {
        (eqn.primitive.name, str(out.aval.dtype))
        for eqn in equations(traced.jaxpr)
        for out in eqn.outvars
        if eqn.primitive.name in ("dot_general", "reduce_sum") and out.aval.shape in shapes
    }
    assert {dtype for _, dtype in made} == {"float32"} and len(made) == 2, made


def equations(jaxpr):
    """Yields the equations of a program and of all nested programs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in programs_in(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


# ---- rules and refusals -------------------------------------------------------------------


def abstract_mesh(fsdp: int, tensor: int) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh((1, fsdp, tensor), sharding.MESH_AXES)


def test_meshes_that_cannot_be_are_refused():
    one = jax.devices()[:1]
    assert sharding.make_mesh(MeshConfig(1, -1, 1), one).devices.shape == (1, 1, 1)
    assert "does not use 1 devices" in refusal(sharding.make_mesh, MeshConfig(1, 2, -1), one)
    two = [SimpleNamespace(platform="tpu", slice_index=index) for index in range(2)]
    assert "no mesh over several slices (a DCN" in refusal(sharding.make_mesh, MeshConfig(), two)
    assert "at most one of them -1" in refusal(MeshConfig, -1, -1, 1)
    config = mesh_run.config_of(MeshConfig(1, 3, 1))
    said = refusal(make_train_step, config, mesh_run.TARGET, abstract_mesh(3, 1))
    assert "choose a multiple of 3" in said
    of_target = sharding.of_table(convert.target_table(mesh_run.TARGET), abstract_mesh(1, 4))
    line = refusal(sharding.tree_of, abstract_frozen(mesh_run.TARGET), of_target)
    assert "qkv.kernel has an axis of 2, which mesh tensor = 4" in line
