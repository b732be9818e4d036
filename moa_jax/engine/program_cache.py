"""The compiled programs of an engine, by name.

    ("empty",)   ("copy",)   ("catch_up",)
    ("prefill", tokens)   ("score", tokens)      one prompt; "score" returns its log-probabilities
    ("decode", batch, shape, rows)               rows: GREEDY, SAMPLED or LOGPROBS

A batch is padded to a bucket: 1, 2, 4, ..., all slots, like SGLang's captured graphs. All programs
update the same state of slots x tokens and read the cache length from it, so names have no length.
Until a decode program is compiled, a stand-in serves its batch: a larger bucket, or a more general
kind of rows. The engine's thread runs compiled programs and never compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from moa_jax.config import DraftShape, Sampling
from moa_jax.decode import logprobs, step
from moa_jax.decode.programs import Programs, bucket_for, power_of_two_buckets
from moa_jax.decode.session import Session
from moa_jax.engine import device_ops
from moa_jax.engine.device_ops import ChunkInput, RowSettings, SlotState
from moa_jax.model import sharding
from moa_jax.model.cache import KV
from moa_jax.runtime import memory

ProgramName = tuple[Any, ...]

# Kinds of rows: argmax, any sampling, log-probabilities. Each kind includes those before.
GREEDY, SAMPLED, LOGPROBS = range(3)
LEAST_CHUNK = 16  # tokens; a program of fewer tokens takes as long
MOST_SHAPES = 2  # draft shapes besides plain decoding for several rows, which pay for each reject


class ProgramSpec(NamedTuple):
    """Arguments of a compilation; with `donate` a program reuses the memory of its first array."""

    function: Callable[..., Any]
    like: tuple[Any, ...] = ()  # arrays like the arguments, or their shapes
    shape: DraftShape | None = None  # None: the session's own
    logprobs: bool = False  # whether rounds return log-probabilities
    donate: bool = True
    static: dict[str, Any] = {}


class ProgramCache:
    """Compiled programs; one thread may run programs while another thread compiles."""

    def __init__(self, session: Session, num_slots: int, num_rows: int, max_batch: int) -> None:
        """`num_slots` rows of `num_rows` tokens, of which at most `max_batch` are decoded."""
        self.session, self.num_slots, self.num_rows = session, num_slots, num_rows
        self.mesh = session.mesh
        self.splits_slots = self.mesh is not None and self.mesh.shape["data"] > 1
        self.buckets = power_of_two_buckets(1, max_batch)
        if self.splits_slots:  # moving rows between devices would cost more than padding
            self.buckets = (num_slots,)
        self.chunks = power_of_two_buckets(
            min(LEAST_CHUNK, num_rows), min(session.chunks(1)[0], num_rows)
        )
        self._blank = device_ops.row_settings(
            Sampling(), 0, 0, (), session.target.config.vocab_size
        )
        dtype = session.target.params["embed"].dtype
        top = min(logprobs.MOST, session.target.config.vocab_size)
        self._programs = {
            (shape, with_logprobs): Programs(
                setup, (session.weights,), dtype, drafts=shape.num_drafted > 0
            )
            for shape in session.ways
            for with_logprobs, count in ((False, None), (True, top))
            for setup in [session.setup._replace(shape=shape, top_logprobs=count)]
        }
        self._ready: dict[ProgramName, Callable[..., Any]] = {}

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state."""
        return memory.num_bytes_of(self._form())

    @property
    def scratch_bytes(self) -> int:
        """About the bytes that the largest decode call needs beside the state.

        Logits, the scores that settings make of them, and noise are alive together; arrays that
        are no key-value caches are gathered into the batch.
        """
        nodes = max(
            batch * max(shape.num_rows for shape in self.shapes(batch)) for batch in self.buckets
        )
        parts = jax.tree.leaves(self._form(), is_leaf=lambda part: isinstance(part, KV))
        gathered = sum(memory.num_bytes_of(part) for part in parts if not isinstance(part, KV))
        logits = 4 * self.session.target.config.vocab_size * nodes
        return 3 * logits + gathered * self.buckets[-1] // self.num_slots

    # ---- which program ----

    def bucket(self, count: int) -> int:
        """The bucket for a batch of `count` rows."""
        return bucket_for(self.buckets, count)

    def shapes(self, batch: int) -> list[DraftShape]:
        """The candidate shapes of a bucket: all for one row; plain and short chains for several."""
        shapes = sorted(self.session.ways, key=lambda shape: shape.num_drafted)
        return shapes if batch == self.buckets[0] else shapes[: 1 + MOST_SHAPES]

    def decode_name(self, count: int, shape: DraftShape, rows: int) -> ProgramName | None:
        """The smallest compiled program for `count` rows of a kind, perhaps a stand-in; or None."""
        for batch in self.buckets:
            for kind in range(rows, LOGPROBS + 1):
                name = ("decode", batch, shape, kind)
                if batch >= count and name in self._ready:
                    return name
        return None

    def chunk(self, count: int) -> int:
        """The smallest compiled chunk of at least `count` tokens, or the largest chunk."""
        compiled = [size for size in self.chunks if ("prefill", size) in self._ready]
        return next((size for size in compiled if size >= count), compiled[-1])

    def first(self) -> Iterator[ProgramName]:
        """Programs compiled before the start: those of one request, and stand-ins for any batch."""
        yield from [("empty",), ("copy",), ("prefill", self.chunks[-1])]
        if self.session.catches_up:
            yield ("catch_up",)
        one, every = self.buckets[0], self.buckets[-1]
        yield from dict.fromkeys(
            [
                ("decode", every, self.own_shape(every), SAMPLED),
                ("decode", one, self.own_shape(one), GREEDY),
                ("decode", one, self.own_shape(one), SAMPLED),
                ("decode", one, self.plainest, GREEDY),  # its cost is what drafts are judged by
            ]
        )
        yield ("score", self.chunks[-1])
        yield ("decode", every, self.plainest, LOGPROBS)

    def later(self) -> Iterator[ProgramName]:
        """Programs compiled when idle, in this order: one request, all slots, the other buckets."""
        first, *rest = self.buckets
        batches = [first, *rest[-1:], *rest[:-1]]
        yield from (("prefill", size) for size in self.chunks)
        for rows in (GREEDY, SAMPLED):
            for batch in batches:
                yield from (("decode", batch, shape, rows) for shape in self.shapes(batch))
        yield ("decode", first, self.plainest, LOGPROBS)

    def own_shape(self, batch: int) -> DraftShape:
        """The shape of a bucket without costs."""
        several = batch > self.buckets[0] and self.session.controller is not None
        return self.plainest if several else self.session.first

    @property
    def plainest(self) -> DraftShape:
        """The shape with the fewest drafts: plain decoding in mode auto."""
        return min(self.session.ways, key=lambda shape: shape.num_drafted)

    # ---- compile and run ----

    def names(self) -> list[ProgramName]:
        """Compiled programs."""
        return list(self._ready)

    def has(self, name: ProgramName) -> bool:
        """Whether a program is compiled."""
        return name in self._ready

    def run(self, name: ProgramName, *arrays: Any) -> Any:
        """Runs a compiled program."""
        return self._ready[name](self.session.weights, *arrays)

    def put(self, arrays: Any) -> Any:
        """Moves host arrays that several calls use to the devices."""
        return jax.device_put(arrays, self.mesh and sharding.of_state(arrays, self.mesh))

    def compile(self, name: ProgramName) -> None:
        """Compiles a program."""
        if self.has(name):
            return
        spec = self._spec(name)
        programs = self._programs[spec.shape or self.session.shape, spec.logprobs]
        self._ready[name] = programs.compile(
            spec.function, *spec.like, donate=spec.donate, **spec.static
        )

    def arguments_of(self, name: ProgramName) -> PyTreeDef:
        """The tree structure of the arguments of a program, compiled or not."""
        return jax.tree.structure(self._spec(name).like)

    def blank(self, batch: int, rows: int) -> RowSettings:
        """Settings of padding rows."""
        return device_ops.joined([self._blank] * batch, rows != GREEDY)

    def _spec(self, name: ProgramName) -> ProgramSpec:
        one, number = jax.ShapeDtypeStruct((1,), jnp.int32), np.zeros((), np.int32)
        match name:
            case ("empty",):
                static = {"slots": self.num_slots, "rows": self.num_rows}
                return ProgramSpec(device_ops.empty, donate=False, static=static)
            case ("copy",):
                return ProgramSpec(device_ops.copy, (self._form(), number, number, number))
            case ("catch_up",):
                sizes = tuple(dict.fromkeys((max(self.chunks[-1], step.CATCH_UP), step.CATCH_UP)))
                like = (self._form(), one)
                return ProgramSpec(device_ops.catch_up, like, static={"sizes": sizes})
            case ("prefill" | "score" as what, tokens):
                wide = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
                like = (self._form(), one, ChunkInput(wide, wide, one, one), self.blank(1, SAMPLED))
                static = {"scored": what == "score"}
                return ProgramSpec(device_ops.prefill, like, logprobs=True, static=static)
            case ("decode", batch, shape, rows):
                slot_B, live_B = np.zeros(batch, np.int32), np.zeros(batch, bool)
                like = (self._form(), slot_B, live_B, self.blank(batch, rows), number)
                return ProgramSpec(device_ops.decode, like, shape, logprobs=rows == LOGPROBS)
        raise KeyError(name)

    def _form(self) -> SlotState:
        def empty(weights: Any) -> SlotState:
            setup = self.session.setup
            return device_ops.empty(setup, weights, slots=self.num_slots, rows=self.num_rows)

        return jax.eval_shape(empty, self.session.weights)


def kind_of(sampled: Sequence[bool], with_logprobs: Sequence[bool]) -> int:
    """The kind of rows of a batch, from the needs of its rows."""
    return LOGPROBS if any(with_logprobs) else SAMPLED if any(sampled) else GREEDY
