"""Compiles decode and prefill programs for a device that need not be attached.

The time of a decoding round is mostly one read of every weight. Copying a weight or a cache within
the loop adds a write and a second read, so a round must not copy, slice, concatenate, transpose or
pad large arrays; `hlo.large_moves` lists such copies.

Compilation needs jax's CUDA plugin (`make env PLAN=1`), JAX_PLATFORMS=cpu and no CUDA library.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from infer.bench.plan.hlo import Dims
from moa_jax.config import MeshConfig
from moa_jax.decode import step
from moa_jax.decode.programs import chunks_for, compiler_options, on_mesh, split
from moa_jax.decode.sampling import BatchSampling
from moa_jax.decode.state import DecodeState, StaticConfig, StopConditions, Weights
from moa_jax.model import llama, quantize
from moa_jax.model.sharding import make_mesh
from moa_jax.training.flops import programs_in

GREEDY = BatchSampling()


class Cost(NamedTuple):
    """The `cost_estimate` of a Pallas kernel: one run on caches with all rows used."""

    flops: int
    size: int  # bytes read and written


KernelCosts = dict[tuple[str, Dims], Cost | None]  # by name and dimensions; None: not declared


class HloModule(NamedTuple):
    """A program that XLA compiled, or refused for its memory."""

    hlo: str | None = None  # the optimised module; None if the program does not fit
    temp_bytes: int | None = None  # memory besides arguments and results
    peak_bytes: int | None = None  # including arguments; None if XLA does not report it
    seconds: float = 0.0  # compile time
    costs: KernelCosts = {}  # of Pallas kernels; XLA has no costs for them  # noqa: RUF012


def compile_for(
    where: Any,
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    drafts: bool = False,
) -> HloModule:
    """Compiles a function for a device or a mesh from the shapes of its arguments.

    For a mesh the shapes must have shardings. `drafts` is True if rounds verify several tokens.
    """
    if not isinstance(where, Mesh):
        place = SingleDeviceSharding(where)
        form = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        arguments = jax.tree.map(form, arguments)
        # jax 0.11 takes a Pallas kernel's GPU from the mesh, not from the arguments.
        where = make_mesh(MeshConfig(), [where])
    with jax.set_mesh(where):
        traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
        return compiled(traced, compiler_options(_platform(where), drafts))


def _platform(where: Any) -> str:
    return (where.devices.flat[0] if isinstance(where, Mesh) else where).platform


def compiled(traced: Any, options: dict[str, Any] | None = None) -> HloModule:
    """Compiles a traced program; `hlo` is None if the program exceeds the chip's memory."""
    lowered, begin = traced.lower(), time.perf_counter()
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or needed(str(error)) is None:
            raise  # for example a kernel exhausted a GPU's shared memory
        return HloModule(peak_bytes=needed(str(error)), seconds=time.perf_counter() - begin)
    seconds, memory = time.perf_counter() - begin, program.memory_analysis()
    sizes = memory.temp_size_in_bytes, memory.peak_memory_in_bytes
    return HloModule(program.as_text(), *sizes, seconds, declared(traced.jaxpr))


def declared(jaxpr: Any) -> KernelCosts:
    """The cost estimates of all Pallas kernels of a traced program."""
    found: KernelCosts = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            dims = tuple(tuple(each.aval.shape) for each in (*eqn.invars, *eqn.outvars))
            cost = eqn.params["cost_estimate"]
            found[eqn.params["name"], dims] = cost and Cost(cost.flops, cost.bytes_accessed)
        else:
            for inner in programs_in(eqn.params):
                found |= declared(inner)
    return found


def needed(complaint: str) -> int | None:
    """Least bytes that a program needs, parsed from libtpu's out-of-memory message."""
    found = re.search(r"(?:Used |\()([\d.]+)([KMGT])\)? (?:of|exceeds)", complaint)
    return int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))) if found else None


def abstract_weights(
    setup: StaticConfig, dtype: Any = jnp.bfloat16, weights: quantize.Format | None = None
) -> Weights:
    """The shapes of both models' weights as loaded for decoding."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    cast = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype)
    inits = (functools.partial(llama.init, setup.target), setup.drafter and setup.drafter.init)
    shapes = Weights(*(init and jax.tree.map(cast, jax.eval_shape(init, key)) for init in inits))
    if weights is None:
        return shapes
    return jax.eval_shape(lambda held: quantize.quantize_params(held, weights), shapes)


def abstract_state(
    setup: StaticConfig, weights: Weights, cache_rows: int, batch: int = 1
) -> DecodeState:
    """The shapes of the state of a generation."""
    capacity = cache_rows - setup.shape.num_rows
    read = functools.partial(step.prefill, setup, capacity=capacity, chunks=(1,))
    prompt = (_integers(batch, 1), _integers(batch))
    return jax.eval_shape(read, weights, *prompt, _limits(batch), GREEDY)


def compile_decode(
    where: Any, setup: StaticConfig, weights: Weights, cache_rows: int, batch: int = 1
) -> HloModule:
    """Compiles the decode loop for caches of `cache_rows` rows; donates the state as in a session.

    `where` is a device, or the mesh of sharded weights.
    """
    state = abstract_state(setup, weights, cache_rows, batch)
    decode = functools.partial(step.decode, setup)
    return _compile(where, setup, decode, weights, state, _limits(batch), GREEDY, donate=(1,))


def compile_prefill(
    where: Any, setup: StaticConfig, weights: Weights, cache_rows: int, batch: int = 1
) -> HloModule:
    """Compiles the chunked prefill of prompts of any length for caches of `cache_rows` rows."""
    capacity = cache_rows - setup.shape.num_rows
    chunks = chunks_for(_platform(where), batch)
    read = functools.partial(step.prefill, setup, capacity=capacity, chunks=chunks)
    prompt = (_integers(batch, capacity), _integers(batch))
    return _compile(where, setup, read, weights, *prompt, _limits(batch), GREEDY)


def _compile(
    where: Any,
    setup: StaticConfig,
    function: Callable[..., Any],
    weights: Weights,
    *arrays: Any,
    **how: Any,
) -> HloModule:
    """Compiles a function as `decode.programs` does."""
    if isinstance(where, Mesh):
        function, arrays = split(function), on_mesh(arrays, where)
    drafts = setup.shape.num_drafted > 0
    return compile_for(where, function, weights, *arrays, drafts=drafts, **how)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _limits(batch: int) -> StopConditions:
    return StopConditions(_integers(batch), _integers(batch, 8), _integers())


def num_bytes(tree: Any) -> int:
    """Bytes per device of all arrays of a tree, abstract or concrete."""
    leaves = jax.tree.leaves(local(tree))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def local(tree: Any) -> Any:
    """The per-device shapes of all arrays of a tree."""

    def part(leaf: Any) -> jax.ShapeDtypeStruct:
        cut = getattr(leaf, "sharding", None)
        shape = leaf.shape if cut is None else cut.shard_shape(leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(part, tree)
