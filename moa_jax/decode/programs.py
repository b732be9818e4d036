"""Compiled programs: one for each function, static choice and shapes of arguments.

Nothing is compiled while it is timed, and any thread may compile while another one runs.
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

from moa_jax.model import sharding
from moa_jax.runtime.precision import matmul_precision

SMALLEST_BUCKET = 32
ROWS_OF_A_TILE = 128  # XLA pads caches of other sizes in every layer and round

# For products of few rows XLA cuts the summed axis into pieces, and adds their sums in a second
# kernel. In one piece, the sum, the residual and the next norm are one kernel, unless cuBLAS, which
# cuts as it likes, is faster. On an H200 a round of a tree has 3 % less to do so, at batch 1, but a
# product of one row leaves most of the card idle: plain decoding a tenth more (reports/gpu.md).
DRAFTING_OPTIONS: dict[str, Any] = {"xla_gpu_experimental_force_split_k": 1}

Program = Callable[..., Any]  # of (*weights, *arrays)
_tracing = threading.Lock()  # jax fails now and then where two threads trace
AnySize = TypeVar("AnySize")


class Programs:
    """Compiled functions f(setup, *weights, *arrays, **static).

    `setup` and `static` are compiled in. The weights stay the same; the arrays change from call to
    call. With `donate` the first array is a state, and the new state takes over its memory. With
    weights on a mesh, arrays and results have the shardings of `sharding.specs_of`.
    """

    def __init__(self, setup: Any, weights: tuple[Any, ...], dtype: Any, *, drafts: bool) -> None:
        """`setup` is a `state.Setup`; `dtype`, of the weights, decides how products are rounded.

        `drafts` says whether passes verify several tokens of a text.
        """
        self._setup, self.weights, self._dtype, self._drafts = setup, weights, dtype, drafts
        self._mesh = sharding.mesh_of(weights)
        self._compiled: dict[Any, Program] = {}

    def __len__(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def run(self, function: Program, *arrays: Any, donate: bool = True, **static: Any) -> Any:
        """Calls the function, and compiles it first if it has not been compiled."""
        program = self.compile(function, *arrays, donate=donate, **static)
        return program(*self.weights, *arrays)

    def compile(
        self, function: Program, *arrays: Any, donate: bool = True, **static: Any
    ) -> Program:
        """The compiled program for these arrays; `ShapeDtypeStruct`s may stand in for them."""
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

    def prepare(
        self, function: Program, *arrays: Any, donate: bool = True, **static: Any
    ) -> Program:
        """The compiled program, which on a CPU has run once on zeros.

        XLA's library for CPUs prepares a program's calls at its first run. That takes as long as
        thirty rounds, which belong to compiling and to no one's answer. Numbers are 1, because a
        loop of no rounds would prepare nothing.
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
        """Whether `compile` would return at once."""
        return _key(function, arrays, donate, static) in self._compiled


def _key(function: Program, arrays: Any, donate: bool, static: dict[str, Any]) -> Any:
    leaves, structure = jax.tree.flatten(arrays)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return (function, donate, structure, shapes, *static.items())


def on_mesh(arrays: Any, mesh: Mesh) -> Any:
    """The shapes of a program's arrays, with where they lie on a mesh for decoding."""
    form = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
    return jax.tree.map(form, arrays, sharding.of_state(arrays, mesh))


def _placed(program: Program, mesh: Mesh, num_weights: int, *arrays: Any) -> Any:
    """Runs a program of several processes: each gives its own devices what they need."""
    state = sharding.put_state(arrays[num_weights:], mesh)
    return program(*arrays[:num_weights], *state)


def split(function: Program) -> Program:
    """The function with results that lie where the next program expects them.

    Results beside a state are for the host, so every process gets them whole.
    """

    @functools.wraps(function)  # its arguments keep the names that `infer.plan` reads
    def part(*arrays: Any) -> Any:
        found = function(*arrays)
        if type(found) is not tuple:  # a state is a named one
            return sharding.constrain_state(found)
        state, *rest = found
        return (sharding.constrain_state(state), *sharding.constrain_whole(tuple(rest)))

    return part


def compile_lowered(lowered: Any, platform: str, *, drafts: bool) -> Any:
    """Compiles a lowered program with `compiler_options`, or without those that XLA does not have.

    The options are experimental: a later XLA may drop them, and the program is right without them.
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
    """XLA options of decoding programs for a platform, with drafts or without."""
    return DRAFTING_OPTIONS if drafts and platform in ("gpu", "cuda") else {}


class Ready(Generic[AnySize]):
    """Sizes whose programs are there; one thread may add to them while another one asks."""

    def __init__(self) -> None:
        self._sizes: tuple[AnySize, ...] = ()

    def add(self, size: AnySize) -> None:
        if size not in self._sizes:
            self._sizes = (*self._sizes, size)

    def cheapest(
        self, holds: Callable[[AnySize], bool], cost: Callable[[AnySize], Any]
    ) -> AnySize | None:
        """The size that costs least of those that hold some work; None if none does."""
        return min(filter(holds, self._sizes), key=cost, default=None)


def powers(first: int, last: int) -> tuple[int, ...]:
    """`first`, doubled again and again, up to `last`, which is the end in any case."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def at_least(sizes: Sequence[int], count: int) -> int:
    """The first of these sizes, the smallest first, that holds `count`."""
    return next(size for size in sizes if size >= count)


def bucket(count: int) -> int:
    """The smallest power of two that holds `count`, and at least 32: few shapes, few compiles."""
    return max(SMALLEST_BUCKET, 1 << (count - 1).bit_length())


def cache_rows_for(count: int) -> int:
    """Rows of a cache that holds `count`: the next multiple of 128."""
    return -(-count // ROWS_OF_A_TILE) * ROWS_OF_A_TILE


def chunks_for(platform: str, batch: int) -> tuple[int, ...]:
    """How many tokens of each prompt such devices read at once, in such a batch; smaller ones last.

    On a CPU products bind, so the end of a prompt is read in chunks that it fills. Elsewhere a pass
    over few tokens waits for weights: an H200 breaks even at 206 tokens (989 TFLOP/s over 4.8
    TB/s), so 512 are well above that. The rows of a batch share weights, so each needs fewer tokens
    at once.
    """
    return (64, 32, 16) if platform == "cpu" else (max(64, 512 // batch),)


def chunks_of(length: int, sizes: Sequence[int]) -> list[int]:
    """The chunks in which `step.prefill` reads so many tokens."""
    found = []
    for place, size in enumerate(sizes):
        turns = max(-(-(length - sum(sizes[place + 1 :])) // size), 0)
        found += [size] * turns
        length -= turns * size
    return found


def one(value: int) -> np.ndarray:
    """A number for the only row of a batch: (1,) int32."""
    return np.array([value], np.int32)
