"""Compiled programs, one per function, static arguments and argument shapes.

Compilation is never part of a timed call, and a thread may compile while another runs programs.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moa_jax.model import cache, sharding
from moa_jax.runtime.precision import matmul_precision

SMALLEST_BUCKET = 32
ROWS_OF_A_TILE = cache.TILE

# For products of few rows XLA splits the summed axis (split-K), and adds the partial sums in a
# second kernel. Without the split, the sum, the residual and the next norm are one kernel, unless
# cuBLAS, which splits by its own rules, is faster. On an H200 at batch 1 this saves 3 % of a tree's
# round, but plain decoding takes a tenth longer: a product of one row leaves most of the card idle
# (reports/gpu.md).
DRAFTING_OPTIONS: dict[str, Any] = {"xla_gpu_experimental_force_split_k": 1}

Program = Callable[..., Any]  # of (*weights, *arrays)
_tracing = threading.Lock()  # jax sometimes fails when two threads trace at once
AnySize = TypeVar("AnySize")


class Programs:
    """Compiled functions f(setup, *weights, *arrays, **static).

    `setup` and `static` are compiled in. The weights stay the same; the arrays change from call to
    call. With `donate` the first array is a state, and the new state reuses its memory. With
    weights on a mesh, arrays and results have the shardings of `sharding.specs_of`.
    """

    def __init__(self, setup: Any, weights: tuple[Any, ...], dtype: Any, *, drafts: bool) -> None:
        """`setup` is a `state.StaticConfig`; the weights' `dtype` sets the precision of products.

        `drafts` is True if passes verify several tokens per sequence.
        """
        self._setup, self.weights, self._dtype, self._drafts = setup, weights, dtype, drafts
        self._mesh = sharding.mesh_of(weights)
        self._compiled: dict[Any, Program] = {}

    def __len__(self) -> int:
        """Returns the number of programs compiled so far."""
        return len(self._compiled)

    def run(self, function: Program, *arrays: Any, donate: bool = True, **static: Any) -> Any:
        """Calls the function, and compiles the function first if needed."""
        program = self.compile(function, *arrays, donate=donate, **static)
        return program(*self.weights, *arrays)

    def compile(
        self, function: Program, *arrays: Any, donate: bool = True, **static: Any
    ) -> Program:
        """Returns the compiled program for arrays or their `ShapeDtypeStruct`s."""
        key = _key(function, arrays, donate, static)
        if key not in self._compiled:
            part = functools.partial(function, self._setup, **static)
            donated = len(self.weights) if donate else ()
            if self._mesh is not None:
                part, arrays = split(part), on_mesh(arrays, self._mesh)
            with _tracing, matmul_precision(self._dtype), sharding.setting(self._mesh):
                traced = jax.jit(part, donate_argnums=donated)
                lowered = traced.lower(*self.weights, *arrays)
            program = compile_lowered(lowered, jax.default_backend(), drafts=self._drafts)
            if sharding.spans_processes(self._mesh):
                program = functools.partial(_placed, program, self._mesh, len(self.weights))
            self._compiled[key] = program
        return self._compiled[key]

    def form(self, function: Program, *arrays: Any) -> Any:
        """Returns the shapes of the function's results."""
        with _tracing:
            return jax.eval_shape(functools.partial(function, self._setup), *self.weights, *arrays)

    def prepare(
        self, function: Program, *arrays: Any, donate: bool = True, **static: Any
    ) -> Program:
        """Returns the compiled program; on a CPU without a mesh, runs a new program once on zeros.

        XLA's CPU library prepares a program's calls at the program's first run. That run takes as
        long as thirty rounds, so the run belongs to compilation and not to a request. Scalars are
        1, because a loop of 0 rounds would not prepare its calls.
        """
        is_new = not self.is_compiled(function, *arrays, donate=donate, **static)
        program = self.compile(function, *arrays, donate=donate, **static)
        if is_new and jax.default_backend() == "cpu" and self._mesh is None:
            blank = lambda leaf: (jnp.zeros if leaf.shape else jnp.ones)(leaf.shape, leaf.dtype)
            jax.block_until_ready(program(*self.weights, *jax.tree.map(blank, arrays)))
        return program

    def is_compiled(
        self, function: Program, *arrays: Any, donate: bool = True, **static: Any
    ) -> bool:
        """Returns whether `compile` would return at once."""
        return _key(function, arrays, donate, static) in self._compiled


def _key(function: Program, arrays: Any, donate: bool, static: dict[str, Any]) -> Any:
    leaves, structure = jax.tree.flatten(arrays)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return (function, donate, structure, shapes, *static.items())


def on_mesh(arrays: Any, mesh: Mesh) -> Any:
    """Returns the shapes of a program's arrays, with their shardings on a decoding mesh."""
    form = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
    return jax.tree.map(form, arrays, sharding.of_state(arrays, mesh))


def _placed(program: Program, mesh: Mesh, num_weights: int, *arrays: Any) -> Any:
    """Runs a program of several processes; each process places the arrays on its own devices."""
    state = sharding.put_state(arrays[num_weights:], mesh)
    return program(*arrays[:num_weights], *state)


def split(function: Program) -> Program:
    """Wraps a function so that its results have the shardings that the next program expects.

    Results after the state are for the host, so every process gets a full copy.
    """

    @functools.wraps(function)  # keeps the argument names that `infer.plan` reads
    def part(*arrays: Any) -> Any:
        found = function(*arrays)
        if type(found) is not tuple:  # a state is a NamedTuple
            return sharding.constrain_state(found)
        state, *rest = found
        return (sharding.constrain_state(state), *sharding.constrain_whole(tuple(rest)))

    return part


def compile_lowered(lowered: Any, platform: str, *, drafts: bool) -> Any:
    """Compiles a lowered program with `compiler_options`, or without if XLA lacks an option.

    The options are experimental: a later XLA may drop them, and results do not depend on them.
    """
    options = compiler_options(platform, drafts)
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if not options or "No such compile option" not in str(error):
            raise
        logging.getLogger(__name__).warning("compiled without %s: %s", options, error)
        return lowered.compile()


def compiler_options(platform: str, drafts: bool) -> dict[str, Any]:
    """Returns the XLA options of decoding programs for a platform, with or without drafts."""
    return DRAFTING_OPTIONS if drafts and platform in ("gpu", "cuda") else {}


class CompiledSizes(Generic[AnySize]):
    """Sizes whose programs are compiled; a thread may add a size while another reads."""

    def __init__(self) -> None:
        self._sizes: tuple[AnySize, ...] = ()

    def add(self, size: AnySize) -> None:
        if size not in self._sizes:
            self._sizes = (*self._sizes, size)

    def cheapest(
        self, holds: Callable[[AnySize], bool], cost: Callable[[AnySize], Any]
    ) -> AnySize | None:
        """Returns the size of least cost among those for which `holds` is true, or None."""
        return min(filter(holds, self._sizes), key=cost, default=None)


def power_of_two_buckets(first: int, last: int) -> tuple[int, ...]:
    """Returns `first` and its doublings below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def bucket_for(sizes: Sequence[int], count: int) -> int:
    """Returns the first of these ascending sizes that is at least `count`."""
    return next(size for size in sizes if size >= count)


def bucket(count: int) -> int:
    """Returns the smallest power of two >= `count`, at least 32: few shapes mean few compiles."""
    return max(SMALLEST_BUCKET, 1 << (count - 1).bit_length())


def cache_rows_for(count: int) -> int:
    """Returns the rows of a cache that holds `count` rows: the next multiple of 128."""
    return -(-count // ROWS_OF_A_TILE) * ROWS_OF_A_TILE


def chunks_for(platform: str, batch: int) -> tuple[int, ...]:
    """Returns the prefill chunk sizes, in tokens per prompt; the largest comes first.

    A CPU is bound by compute, so smaller chunks that are full process the end of a prompt. A pass
    over few tokens on an accelerator is bound by reading weights: an H200 breaks even at 206 tokens
    (989 TFLOP/s over 4.8 TB/s), and 512 tokens are well above that. Rows of a batch share the
    weights, so each row needs fewer tokens per chunk.
    """
    return (64, 32, 16) if platform == "cpu" else (max(64, 512 // batch),)


def chunks_of(length: int, sizes: Sequence[int]) -> list[int]:
    """Returns the sizes of the chunks in which `step.prefill` processes `length` tokens."""
    found = []
    for place, size in enumerate(sizes):
        turns = max(-(-(length - sum(sizes[place + 1 :])) // size), 0)
        found += [size] * turns
        length -= turns * size
    return found


def scalar_batch(value: int) -> np.ndarray:
    """Returns a value for a batch of one row: (1,) int32."""
    return np.array([value], np.int32)
