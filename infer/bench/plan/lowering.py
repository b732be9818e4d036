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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from moa_jax.config import MeshConfig
from moa_jax.decode import step
from moa_jax.decode.programs import chunks_for, compiler_options, on_mesh, split
from moa_jax.decode.sampling import BatchSampling
from moa_jax.decode.state import DecodeState, StaticConfig, StopConditions, Weights
from moa_jax.model import llama, quantize
from moa_jax.model.experts import EXPERTS
from moa_jax.model.sharding import make_mesh
from moa_jax.training.flops import programs_in

GREEDY = BatchSampling()
SEEN_THROUGH = {"convert_element_type", "reshape", "transpose"}


class HloModule(NamedTuple):
    """A program that XLA compiled, or refused for its memory."""

    hlo: str | None = None  # the optimised module; None if the program does not fit
    temp_bytes: int | None = None  # memory besides arguments and results
    peak_bytes: int | None = None  # including arguments; None if XLA does not report it
    jaxpr: Any = None  # the traced program


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
        return compiled(traced, compiler_options(where.devices.flat[0].platform, drafts))


def compiled(traced: Any, options: dict[str, Any] | None = None) -> HloModule:
    """Compiles a traced program; `hlo` is None if the program exceeds the chip's memory."""
    try:
        program = traced.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or needed(str(error)) is None:
            raise  # for example a kernel exhausted a GPU's shared memory
        return HloModule(peak_bytes=needed(str(error)), jaxpr=traced.jaxpr)
    memory = program.memory_analysis()
    sizes = memory.temp_size_in_bytes, memory.peak_memory_in_bytes
    return HloModule(program.as_text(), *sizes, traced.jaxpr)


class Product(NamedTuple):
    """A matrix product or a Pallas kernel of a traced program; figures are per run and chip."""

    label: str  # named scopes
    times: int
    in_loop: bool  # a loop of unknown length
    flops: float
    bytes: float  # of operands and result; declared by a Pallas kernel

    def seconds(self, bandwidth: float, peak: float) -> float:
        """The longer of the times to move all bytes and to compute, for all runs."""
        return self.times * max(self.bytes / bandwidth, self.flops / peak)


class Shares(NamedTuple):
    """The part of a program that one chip runs."""

    chips: int = 1  # that share the products
    cut: int = 1  # that share a weight
    used: float = 1.0  # share of a cache's rows that attention reads


def products(
    jaxpr: Any, shares: Shares, label: str = "", times: int = 1, in_loop: bool = False
) -> Iterator[Product]:
    """Yields the products of a traced program, once for a loop of unknown length.

    All branches of a conditional count. An operand that is only cast counts as it is stored.
    """
    stored: dict[Any, Any] = {}  # by variable: the variable that was cast or reshaped to it
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        scope = f"{label}/{eqn.source_info.name_stack}"
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            out, first = eqn.outvars[0].aval, eqn.invars[0].aval
            flops = 2 * out.size * math.prod(first.shape[axis] for axis in contracted)
            arrays = [out, *(stored.get(var, var).aval for var in eqn.invars)]
            size = sum(array.size * array.dtype.itemsize for array in arrays)
            yield Product(scope, times, in_loop, flops / shares.chips, size / shares.cut)
        elif name == "ragged_dot_general" or (name == "gather" and EXPERTS in scope):
            yield _of_experts(eqn, scope, times, in_loop, shares)
        elif name == "pallas_call":
            cost, used = params["cost_estimate"], shares.used
            yield Product(scope, times, in_loop, used * cost.flops, used * cost.bytes_accessed)
        elif name in SEEN_THROUGH:
            stored[eqn.outvars[0]] = stored.get(eqn.invars[0], eqn.invars[0])
        else:
            if params.get("branches_platforms"):  # the first branch is that of the traced device
                params = {"branches": params["branches"][:1]}
            runs = times * params.get("length", 1)
            inside = shares._replace(chips=1, cut=1) if name == "shard_map" else shares
            for inner in programs_in(params):
                yield from products(inner, inside, scope, runs, in_loop or name == "while")


def _of_experts(eqn: Any, label: str, times: int, in_loop: bool, shares: Shares) -> Product:
    """A gather of experts, which is read once; or a product of rows that are sorted by expert.

    Sorted rows read as many experts as they can.
    """
    given, experts, out = eqn.invars[0].aval, eqn.invars[1].aval, eqn.outvars[0].aval
    size = lambda array: array.size * array.dtype.itemsize
    if eqn.primitive.name == "gather":
        flops, moved = 0.0, float(size(out))
    else:
        flops = 2.0 * out.size * given.shape[-1]
        moved = size(given) + size(out) + size(experts) * min(1, given.shape[0] / experts.shape[0])
    return Product(label, times, in_loop, flops / shares.chips, moved / shares.cut)


def needed(complaint: str) -> int | None:
    """Least bytes that a program needs, parsed from libtpu's out-of-memory message."""
    found = re.search(r"(?:Used |\()([\d.]+)([KMGT])\)? (?:of|exceeds)", complaint)
    return int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))) if found else None


def abstract_weights(setup: StaticConfig, weights: str = "bfloat16") -> Weights:
    """The shapes of both models' weights as loaded for decoding, in a dtype or of eight bits."""
    key, eight = jax.eval_shape(lambda: jax.random.key(0)), weights in quantize.FORMATS
    dtype = jnp.bfloat16 if eight else jnp.dtype(weights)
    cast = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype)
    inits = (functools.partial(llama.init, setup.target), setup.drafter and setup.drafter.init)
    shapes = Weights(*(init and jax.tree.map(cast, jax.eval_shape(init, key)) for init in inits))
    quantized = lambda held: quantize.quantize_params(held, weights)
    return jax.eval_shape(quantized, shapes) if eight else shapes


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
    chunks = chunks_for("tpu", batch)  # a GPU's are the same
    read = functools.partial(step.prefill, setup, capacity=capacity, chunks=chunks)
    prompt = (_integers(batch, capacity), _integers(batch))
    return _compile(where, setup, read, weights, *prompt, _limits(batch), GREEDY)


def _compile(
    where: Any, setup: StaticConfig, function: Callable[..., Any], *arguments: Any, **how: Any
) -> HloModule:
    """Compiles a function of weights and other arrays as `decode.programs` does."""
    if isinstance(where, Mesh):
        weights, *arrays = arguments
        function, arguments = split(function), (weights, *on_mesh(tuple(arrays), where))
    return compile_for(where, function, *arguments, drafts=setup.shape.num_drafted > 0, **how)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _limits(batch: int) -> StopConditions:
    return StopConditions(_integers(batch), _integers(batch, 8), _integers())


def num_bytes(tree: Any) -> int:
    """Bytes per device of all arrays of a tree, abstract or concrete."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        cut = getattr(leaf, "sharding", None)
        shape = leaf.shape if cut is None else cut.shard_shape(leaf.shape)
        total += math.prod(shape) * leaf.dtype.itemsize
    return total
