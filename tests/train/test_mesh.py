"""Training on several devices and processes: the same losses, wherever arrays live."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moa_jax.config import MeshConfig
from moa_jax.model import convert, sharding
from moa_jax.training.distillation import abstract_frozen, make_train_step
from moa_jax.training.flops import abstract_batch, programs_in
from tests.meeting import free_port
from tests.model_folders import refusal
from tests.train import collectives_run, mesh_run
from tests.train.test_training import changed

ROOT = Path(__file__).parents[2]
STEPS = "20"


def run(*arguments: str, module: str = "mesh_run") -> subprocess.Popen:
    command = [sys.executable, "-m", f"tests.train.{module}", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def told_of(wanted: str, process: subprocess.Popen) -> list[Any]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-2000:]
    told = (line.partition(" ") for line in out.splitlines())  # gloo speaks there too
    return [json.loads(rest) for word, _, rest in told if word == wanted]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one device."""
    return mesh_run.losses(int(STEPS), MeshConfig(1, 1, 1), jax.devices()[:1])


def assert_same(found: list[float], expected: list[float]) -> None:
    assert len(found) == int(STEPS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "flags"),
    [
        (["2,2,2"], ["--devices", "8"]),
        (["4,1,1", "1,4,1", "1,2,2", "1,2,2,copied"], ["--devices", "4"]),
        (["1,2,2"], ["--devices", "4", "--blocks", "8"]),
        (["1,4,1", "1,2,2"], ["--devices", "4", "--cached"]),
    ],
    ids=["eight devices", "any shape", "scores in blocks", "what a cache keeps"],
)
def test_meshes_train_as_one_device(alone, meshes, flags):
    """With the target cut, as without a word on memory, and with a copy of it on each device.

    Over `tensor` the drafter has rows of its own. Scores in blocks are those of the kernels of
    accelerators, where each device has its own rows and heads.
    """
    each = told_of("losses", run(STEPS, *meshes, *flags))
    assert len(each) == len(meshes)
    for found in each:
        assert_same(found, alone)


@pytest.mark.slow
def test_parts_with_too_few_rows_for_all_devices_train_as_one():
    """The drafter is then cut as the target is."""
    alone = mesh_run.losses(int(STEPS), MeshConfig(1, 1, 1), jax.devices()[:1], accumulate=4)
    (found,) = told_of("losses", run(STEPS, "1,2,2", "--devices", "4", "--parts", "4"))
    assert_same(found, alone)


@pytest.mark.slow
def test_no_device_makes_or_gets_the_logits_of_others():
    """The loss is parallel over a vocabulary that is cut, also over a subset of it.

    Neither logits of tokens travel between devices, nor the whole vocabulary of the head.
    """
    tokens = {mesh_run.T, mesh_run.ROWS // 2 * mesh_run.T}
    vocab, guesses = collectives_run.VOCAB, collectives_run.GUESSES
    sent = dict(told_of("sent", run("1,2,2", module="collectives_run")))
    assert sent.keys() == collectives_run.DRAFTERS.keys()
    for name, collectives in sent.items():
        assert collectives and not any(vocab in shape for _, shape in collectives), name
        of_tokens = [(kind, set(shape)) for kind, shape in collectives if tokens & set(shape)]
        assert not any(vocab // 2 in shape for _, shape in of_tokens), name
        # What devices have of the subset is summed, each with zeros where another has the token.
        subset = {kind for kind, shape in of_tokens if {guesses, guesses // 2} & shape}
        assert subset <= {"all-reduce"}, name


@pytest.mark.slow
def test_a_mesh_trains_as_one_in_bfloat16():
    """Partial sums of activations are rounded, and none of gradients."""
    alone = mesh_run.losses(int(STEPS), MeshConfig(1, 1, 1), jax.devices()[:1], dtype="bfloat16")
    for found in told_of(
        "losses", run(STEPS, "1,4,1", "1,2,2", "--devices", "4", "--dtype", "bfloat16")
    ):
        np.testing.assert_allclose(found[:2], alone[:2], rtol=1e-4)  # then roundings add up
        np.testing.assert_allclose(found, alone, rtol=1e-2)


def test_gradients_of_a_step_in_bfloat16_are_summed_in_float32():
    """Those of weights, norms and biases: over tokens, and so over the devices that have them."""
    config = mesh_run.config_of(MeshConfig(1, 1, 1), dtype="bfloat16")
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    program = make_train_step(config, mesh_run.TARGET, mesh)
    frozen = abstract_frozen(mesh_run.TARGET, jnp.bfloat16)
    state = jax.eval_shape(program.init, jax.random.key(0))
    batch = abstract_batch(mesh_run.ROWS, mesh_run.T)
    traced = jax.make_jaxpr(program.update)(state, frozen, batch)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.params)}
    shapes |= {(math.prod(shape[:1]), math.prod(shape[1:])) for shape in shapes if len(shape) > 1}
    sums = [eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name in SUMS]
    made = {
        (eqn.primitive.name, str(out.aval.dtype))
        for eqn in sums
        for out in eqn.outvars
        if out.aval.shape in shapes
    }
    assert {dtype for _, dtype in made} == {"float32"} and len(made) == 2, made


SUMS = ("dot_general", "reduce_sum")


def equations(jaxpr):
    """Those of a program and of all within it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in programs_in(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner))


@pytest.mark.slow
def test_two_processes_on_one_mesh_train_as_one(alone):
    place = f"127.0.0.1:{free_port()}"
    flags = (
        STEPS,
        "1,2,2",
        "--devices",
        "2",
        "--coordinator",
        place,
        "--processes",
        "2",
        "--process",
    )
    first, second = run(*flags, "0"), run(*flags, "1")
    (found,) = told_of("losses", first)
    assert told_of("losses", second) == []  # process 0 speaks for all
    assert_same(found, alone)


# ---- rules --------------------------------------------------------------------------------


def test_names_become_mesh_axes():
    assert sharding.spec(("embed", "kv_heads", None, None)) == P("fsdp", "tensor", None, None)
    assert sharding.spec(("rows",)) == P(("data", "fsdp"))
    with pytest.raises(KeyError, match="embedd"):
        sharding.spec(("embedd",))
    with pytest.raises(ValueError, match="cannot cut twice"):
        sharding.spec(("rows", "embed"))
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, "rows") is x  # without a mesh


def test_every_array_of_both_models_has_a_rule():
    """No array is left out, and none is cut in a way that its rules do not say."""
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    program = make_train_step(mesh_run.config_of(MeshConfig(1, 1, 1)), mesh_run.TARGET, mesh)
    state = jax.eval_shape(program.init, jax.random.key(0))
    same = lambda arrays, places: jax.tree.structure(arrays) == jax.tree.structure(places)
    assert same(state, program.state_sharding)
    assert same(abstract_frozen(mesh_run.TARGET), program.frozen_sharding)
    layers = program.frozen_sharding["layers"]
    assert layers["mlp"]["down"]["kernel"].spec == P(None, "tensor", "fsdp")
    moments = program.state_sharding.opt_state[1][0].mu  # of Adam: they lie as their weights do
    assert moments["ekv2e"]["kernel"].spec == P("tensor", "fsdp")


@pytest.mark.parametrize(
    ("rows", "where"),
    [(8, P(None, ("fsdp", "tensor"))), (6, P("tensor", "fsdp"))],
    ids=["rows for all devices", "rows for half of them"],
)
def test_a_drafter_has_rows_of_its_own_beside_a_target_that_is_cut(rows, where):
    """Where there are enough; else it is cut as the target is."""
    config = changed(mesh_run.config_of(MeshConfig(1, 2, 2)), data_rows_per_batch=rows)
    program = make_train_step(config, mesh_run.TARGET, abstract_mesh(2, 2), memory=0)
    places = program.state_sharding.params["self_attention"]["mlp"]
    assert places["down"]["kernel"].spec == where
    assert program.frozen_sharding["layers"]["mlp"]["down"]["kernel"].spec == P(
        None, "tensor", "fsdp"
    )


# ---- refusals -----------------------------------------------------------------------------


def test_meshes_that_cannot_be_are_refused():
    one = jax.devices()[:1]
    assert sharding.make_mesh(MeshConfig(1, -1, 1), one).devices.shape == (1, 1, 1)
    for sizes in ((3, 1, 1), (1, 2, -1)):
        assert "does not use 1 devices" in refusal(sharding.make_mesh, MeshConfig(*sizes), one)
    for sizes in ((0, 1, 1), (-1, -1, 1), (1, 1, -2)):
        assert "at most one of them -1" in refusal(MeshConfig, *sizes)
    config = mesh_run.config_of(MeshConfig(1, 3, 1))
    said = refusal(make_train_step, config, mesh_run.TARGET, abstract_mesh(3, 1))
    assert "choose a multiple of 3" in said


def abstract_mesh(fsdp: int, tensor: int) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh((1, fsdp, tensor), sharding.MESH_AXES)


@pytest.mark.parametrize(
    ("fsdp", "tensor", "line"),
    [
        (1, 4, "qkv.kernel has an axis of 2, which mesh tensor = 4"),
        (5, 1, "embed has an axis of 96, which mesh fsdp x tensor = 5"),
    ],
)
def test_meshes_that_do_not_divide_the_model_are_refused(fsdp, tensor, line):
    of_target = sharding.of_table(
        convert.target_table(mesh_run.TARGET), abstract_mesh(fsdp, tensor)
    )
    assert line in refusal(sharding.tree_of, abstract_frozen(mesh_run.TARGET), of_target)
