"""The decode program compiled for a GPU that is not there, and what it moves in memory.

A round of decoding reads every weight once and waits for little else. A weight or a cache that
is copied within the loop is written and read a second time. So nothing large may be copied, cut,
joined, transposed or padded there. `moa_jax.aot.hlo` reads that off the optimised program.

Compiling needs jax's CUDA plugin (`make env PLAN=1`), JAX_PLATFORMS=cpu and no CUDA library.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from moa_jax.decode import step
from moa_jax.decode.sample import Law
from moa_jax.decode.step import Limits, Setup, Weights
from moa_jax.model import llama

GREEDY = Law()


class HloModule(NamedTuple):
    """What XLA made of a function."""

    hlo: str  # the optimised module
    temp_bytes: int  # memory beside arguments and results
    seconds: float  # that compiling took


def compile_for(
    device: Any, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> HloModule:
    """Compiles for a device that need not be there, from the arguments' shapes alone."""
    sharding = SingleDeviceSharding(device)
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    lowered = jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(place, arguments))
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    return HloModule(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, seconds)


def abstract_weights(setup: Setup, dtype: jnp.dtype = jnp.bfloat16) -> Weights:
    """The shapes of both models' weights as they are loaded for decoding."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    cast = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype)  # noqa: E731
    inits = (functools.partial(llama.init, setup.target), setup.drafter and setup.drafter.init)
    return Weights(*(init and jax.tree.map(cast, jax.eval_shape(init, key)) for init in inits))


def compile_decode(
    device: Any,
    setup: Setup,
    weights: Weights,
    cache_rows: int,
    batch: int = 1,
    law: Law = GREEDY,
) -> HloModule:
    """The loop of rounds for caches of `cache_rows` rows, its state donated as in a session."""
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    limits = Limits(integers(batch), integers(batch, 8), integers())
    read = functools.partial(step.prefill, setup, capacity=cache_rows - setup.shape.num_rows)
    prompt = (integers(batch, 1), integers(batch))
    state = jax.eval_shape(read, weights, *prompt, limits, law)
    decode = functools.partial(step.decode, setup)
    return compile_for(device, decode, weights, state, limits, law, donate=(1,))


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, abstract or not."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
