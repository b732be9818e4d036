"""Training on several devices and processes: the same losses, wherever arrays live."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moa_jax import InputError
from moa_jax.config import MeshConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.model import convert, sharding
from moa_jax.training.distillation import abstract_frozen, make_train_step
from moa_jax.training.flops import abstract_batch, programs_in
from tests.meeting import free_port
from tests.train import collectives_run, mesh_run

ROOT = Path(__file__).parents[2]
STEPS = 20


def run(*arguments: str) -> subprocess.Popen:
    return started("tests.train.mesh_run", str(STEPS), *arguments)


def started(module: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def losses_of(process: subprocess.Popen) -> list[list[float]]:
    return told_of("losses", process)


def told_of(wanted: str, process: subprocess.Popen) -> list[Any]:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err[-2000:]
    told = (line.partition(" ") for line in out.splitlines())  # gloo speaks there too
    return [json.loads(rest) for word, _, rest in told if word == wanted]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one device."""
    return mesh_run.losses(STEPS, MeshConfig(1, 1, 1), jax.devices()[:1])


def assert_same(found: list[float], expected: list[float]) -> None:
    assert len(found) == STEPS
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_mesh_of_eight_devices_trains_as_one(alone):
    (found,) = losses_of(run("2,2,2", "--devices", "8"))
    assert_same(found, alone)


@pytest.mark.slow
def test_meshes_of_any_shape_train_as_one(alone):
    """With the target cut, as without a word on memory, and with a copy of it on each device.

    Over `tensor` the drafter has rows of its own.
    """
    meshes = ("4,1,1", "1,4,1", "1,2,2", "1,2,2,copied")
    each = losses_of(run(*meshes, "--devices", "4"))
    assert len(each) == len(meshes)
    for found in each:
        assert_same(found, alone)


@pytest.mark.slow
def test_parts_with_too_few_rows_for_all_devices_train_as_one():
    """The drafter is then cut as the target is."""
    alone = mesh_run.losses(STEPS, MeshConfig(1, 1, 1), jax.devices()[:1], accumulate=4)
    (found,) = losses_of(run("1,2,2", "--devices", "4", "--parts", "4"))
    assert_same(found, alone)


@pytest.mark.slow
def test_no_device_makes_or_gets_the_logits_of_others():
    """The loss is parallel over a vocabulary that is cut, also over a subset of it.

    Neither logits of tokens travel between devices, nor the whole vocabulary of the head.
    """
    tokens = {mesh_run.T, mesh_run.ROWS // 2 * mesh_run.T}
    vocab, guesses = collectives_run.VOCAB, collectives_run.GUESSES
    sent = dict(told_of("sent", started("tests.train.collectives_run", "1,2,2")))
    assert sent.keys() == collectives_run.DRAFTERS.keys()
    for name, collectives in sent.items():
        assert collectives and not any(vocab in shape for _, shape in collectives), name
        of_tokens = [(kind, set(shape)) for kind, shape in collectives if tokens & set(shape)]
        assert not any(vocab // 2 in shape for _, shape in of_tokens), name
        # What devices have of the subset is summed, each with zeros where another has the token.
        subset = {kind for kind, shape in of_tokens if {guesses, guesses // 2} & shape}
        assert subset <= {"all-reduce"}, name


@pytest.mark.slow
def test_meshes_train_as_one_with_scores_in_blocks(alone):
    """Kernels of accelerators, each device with its own rows and heads."""
    (found,) = losses_of(run("1,2,2", "--devices", "4", "--blocks", "8"))
    assert_same(found, alone)


@pytest.mark.slow
def test_a_mesh_trains_as_one_in_bfloat16():
    """Partial sums of activations are rounded, and none of gradients."""
    alone = mesh_run.losses(STEPS, MeshConfig(1, 1, 1), jax.devices()[:1], dtype="bfloat16")
    for found in losses_of(run("1,4,1", "1,2,2", "--devices", "4", "--dtype", "bfloat16")):
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
def test_meshes_train_as_one_on_what_a_cache_keeps(alone):
    for found in losses_of(run("1,4,1", "1,2,2", "--devices", "4", "--cached")):
        assert_same(found, alone)


@pytest.mark.slow
def test_two_processes_on_one_mesh_train_as_one(alone):
    place = f"127.0.0.1:{free_port()}"
    flags = ("1,2,2", "--devices", "2", "--coordinator", place, "--processes", "2", "--process")
    first, second = run(*flags, "0"), run(*flags, "1")
    (found,) = losses_of(first)
    assert losses_of(second) == []  # process 0 speaks for all
    assert_same(found, alone)


# ---- rules --------------------------------------------------------------------------------


def test_names_become_mesh_axes():
    assert sharding.spec(("embed", "kv_heads", None, None)) == P("fsdp", "tensor", None, None)
    assert sharding.spec(("rows",)) == P(("data", "fsdp"))


def test_unknown_and_colliding_names_raise():
    with pytest.raises(KeyError, match="embedd"):
        sharding.spec(("embedd",))
    with pytest.raises(ValueError, match="cannot cut twice"):
        sharding.spec(("rows", "embed"))


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
    tables = (
        convert.target_table(mesh_run.TARGET),
        DRAFTERS["moa"].table(mesh_run.DRAFTER, mesh_run.TARGET),
    )
    for table in tables:
        for path, packing in table.items():
            assert len(packing.axes) == len(packing.shape), path
            sharding.spec(packing.axes)


@pytest.mark.parametrize(
    ("rows", "where"),
    [(8, P(None, ("fsdp", "tensor"))), (6, P("tensor", "fsdp"))],
    ids=["rows for all devices", "rows for half of them"],
)
def test_a_drafter_has_rows_of_its_own_beside_a_target_that_is_cut(rows, where):
    """Where there are enough; else it is cut as the target is."""
    config = mesh_run.config_of(MeshConfig(1, 2, 2))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, rows_per_batch=rows))
    program = make_train_step(config, mesh_run.TARGET, abstract_mesh(2, 2), memory=0)
    places = program.state_sharding.params["self_attention"]["mlp"]
    assert places["down"]["kernel"].spec == where
    assert program.frozen_sharding["layers"]["mlp"]["down"]["kernel"].spec == P(
        None, "tensor", "fsdp"
    )


@pytest.mark.parametrize(
    ("sizes", "devices", "shape"),
    [((1, -1, 1), 1, (1, 1, 1)), ((1, 1, 1), 1, (1, 1, 1)), ((-1, 1, 1), 1, (1, 1, 1))],
)
def test_minus_one_takes_the_rest(sizes, devices, shape):
    mesh = sharding.make_mesh(MeshConfig(*sizes), jax.devices()[:devices])
    assert mesh.devices.shape == shape and mesh.axis_names == sharding.MESH_AXES


def test_rows_are_read_where_they_live():
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    where = sharding.rows(mesh)
    asked = []

    def read(rows: slice) -> dict:
        asked.append(rows)
        return {"x": np.arange(8).reshape(4, 2)[rows]}

    placed = sharding.place_rows(read, where, (4,))
    assert asked == [slice(0, 4)]
    np.testing.assert_array_equal(placed["x"], np.arange(8).reshape(4, 2))


def test_constrain_is_idle_without_a_mesh():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, "rows") is x


# ---- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "line"),
    [((3, 1, 1), "does not use 1 devices"), ((1, 2, -1), "does not use 1 devices")],
)
def test_meshes_of_other_sizes_are_refused(sizes, line):
    with pytest.raises(InputError, match=line):
        sharding.make_mesh(MeshConfig(*sizes), jax.devices()[:1])


@pytest.mark.parametrize("sizes", [(0, 1, 1), (-1, -1, 1), (1, 1, -2)])
def test_impossible_mesh_configs_are_refused(sizes):
    with pytest.raises(InputError, match="at most one of them -1"):
        MeshConfig(*sizes)


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
    with pytest.raises(InputError, match=line):
        sharding.tree_of(abstract_frozen(mesh_run.TARGET), of_target)


def test_batches_that_do_not_split_are_refused():
    with pytest.raises(InputError, match="choose a multiple of 3"):
        make_train_step(
            mesh_run.config_of(MeshConfig(1, 3, 1)), mesh_run.TARGET, abstract_mesh(3, 1)
        )
