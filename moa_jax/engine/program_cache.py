"""The compiled programs of an engine, by name.

    empty   copy   catch_up
    prefill (tokens)   score (tokens)      one prompt; score returns its log-probabilities
    decode (batch, shape, rows, masked)    rows: GREEDY, SAMPLED or LOGPROBS
    verify (batch, shape)                  the target's pass, before a masked decode program

A batch is padded to a bucket: 1, 2, 4, ..., all slots, like SGLang's captured graphs. All programs
update the same state of slots x tokens and read the cache length from it, so names have no length.
Until a decode program is compiled, a stand-in serves its batch: a larger bucket, or a more general
kind of rows. Masked programs, of batches in which a request has a grammar, are compiled after the
first such request. The engine's thread runs compiled programs and never compiles.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from moa_jax.config import DraftShape, Sampling
from moa_jax.decode import logprobs, step
from moa_jax.decode.programs import Programs, power_of_two_buckets
from moa_jax.decode.row_settings import joined, row_settings
from moa_jax.decode.session import Session
from moa_jax.decode.slots import Drafts, SlotState
from moa_jax.engine import device_ops
from moa_jax.engine.device_ops import DecodeInput, PrefillInput
from moa_jax.engine.prefix_cache import LEAST_CHUNK
from moa_jax.grammar.masks import Masks, Row, masks_of
from moa_jax.model.cache import is_cache
from moa_jax.runtime import memory
from moa_jax.speculation.controller import ROUNDS

# Kinds of rows: argmax, any sampling, log-probabilities. Each kind includes those before.
GREEDY, SAMPLED, LOGPROBS = range(3)
# Draft shapes besides plain decoding for several rows, which all pay for the rejects of one: the
# most that keep the programs of default flags below 40.
MOST_SHAPES = 2


class ProgramName(NamedTuple):
    """The function of a program, and its sizes."""

    # A function of `device_ops`.
    kind: Literal["empty", "copy", "catch_up", "prefill", "score", "decode", "verify"]
    size: int = 1  # rows of a batch, or tokens of a chunk
    shape: DraftShape | None = None  # of a decode or verify program
    rows: int = GREEDY  # of a decode program
    masked: bool = False  # of a decode program: with masks of tokens, one round per call

    def verify(self) -> ProgramName:
        """The program that runs before this masked one."""
        return ProgramName("verify", self.size, self.shape)


class ProgramCache:
    """Compiled programs; one thread may run programs while another thread compiles."""

    def __init__(
        self, session: Session, max_batch: int, num_rows: int, prefix_bytes: int | None
    ) -> None:
        """At most `max_batch` slots of `num_rows` tokens are decoded at once.

        `prefix_bytes` is the size of additional slots, by default that of half of `max_batch`.
        """
        self.session, self.num_rows = session, num_rows
        self.splits_slots = session.mesh is not None and session.mesh.shape["data"] > 1
        self.slot_bytes = memory.num_bytes_of(self._form(1))
        num_kept = max_batch // 2 if prefix_bytes is None else prefix_bytes // self.slot_bytes
        self.num_slots = max_batch + num_kept
        self.buckets = power_of_two_buckets(1, max_batch)
        if self.splits_slots:  # moving rows between devices would cost more than padding
            self.num_slots, self.buckets = max_batch, (max_batch,)
        largest = min(session.chunks(1)[0], num_rows)
        self.chunks = power_of_two_buckets(min(LEAST_CHUNK, largest), largest)
        self.plainest = min(session.ways, key=lambda shape: shape.num_drafted)
        self.blank_row = row_settings(Sampling(), 0, num_rows, (), session.target.config.vocab_size)
        self.state_form = self._form(self.num_slots)
        self.ready: dict[ProgramName, Callable[..., Any]] = {}

    @property
    def scratch_bytes(self) -> int:
        """About the bytes that the largest decode call needs beside the state.

        Logits, the scores that settings make of them, and noise are alive together; a pass ahead
        keeps the rows of its nodes; arrays that are no caches are gathered into the batch.
        """
        nodes = max(batch * each.num_rows for batch in self.buckets for each in self.shapes(batch))
        parts = jax.tree.leaves(self.state_form, is_leaf=is_cache)
        gathered = memory.num_bytes_of([part for part in parts if not is_cache(part)])
        logits = 4 * self.session.target.config.vocab_size * nodes
        passes = nodes * self.slot_bytes // self.num_rows
        return 3 * logits + passes + gathered * self.buckets[-1] // self.num_slots

    # ---- which program ----

    def shapes(self, batch: int) -> list[DraftShape]:
        """The candidate shapes of a bucket: all for one row; plain and short chains for several."""
        shapes = sorted(self.session.ways, key=lambda shape: shape.num_drafted)
        return shapes if batch == self.buckets[0] else shapes[: 1 + MOST_SHAPES]

    def decode_name(
        self, count: int, shape: DraftShape, rows: int, masked: bool = False
    ) -> ProgramName | None:
        """The smallest compiled program for `count` rows of a kind, perhaps a stand-in; or None."""
        batches = [batch for batch in self.buckets if batch >= count]
        kinds = itertools.product(batches, range(rows, LOGPROBS + 1))
        names = (ProgramName("decode", batch, shape, kind, masked) for batch, kind in kinds)
        return next((name for name in names if name in self.ready), None)

    def chunk(self, count: int) -> int:
        """The smallest compiled chunk of at least `count` tokens, which are at most the largest."""
        sizes = (size for size in self.chunks if size >= count)
        return next(size for size in sizes if ProgramName("prefill", size) in self.ready)

    def first(self) -> list[ProgramName]:
        """Programs compiled before the start: those of one request, and stand-ins for any batch."""
        one, every, chunk = self.buckets[0], self.buckets[-1], self.chunks[-1]
        names = [ProgramName("empty"), ProgramName("copy"), ProgramName("prefill", chunk)]
        names += [ProgramName("catch_up", chunk)] * self.session.catches_up
        decode = [
            (every, self.plainest, SAMPLED),
            (one, self.session.first, GREEDY),
            (one, self.session.first, SAMPLED),
            (one, self.plainest, GREEDY),  # drafts are judged by its cost
            (every, self.plainest, LOGPROBS),
        ]
        names += [ProgramName("decode", *each) for each in decode]
        return [*names, ProgramName("score", chunk)]

    def first_masked(self) -> ProgramName:
        """The stand-in for any batch in which a request has a grammar."""
        return ProgramName("decode", self.buckets[-1], self.plainest, LOGPROBS, True)

    def later(self) -> list[ProgramName]:
        """Programs compiled when idle, in this order: greedy rows first, small batches first."""
        names = [ProgramName("prefill", size) for size in self.chunks]
        for rows, batch in itertools.product((GREEDY, SAMPLED), self.buckets):
            names += [ProgramName("decode", batch, shape, rows) for shape in self.shapes(batch)]
        return [*names, ProgramName("decode", self.buckets[0], self.plainest, LOGPROBS)]

    # ---- compile and run ----

    def compile(self, name: ProgramName) -> None:
        """Compiles a program, unless it is compiled already."""
        if name in self.ready:
            return
        if name.masked:
            self.compile(name.verify())
        session, top_logprobs = self.session, None
        if name.kind in ("prefill", "score") or name.rows == LOGPROBS:
            top_logprobs = min(logprobs.MOST, session.target.config.vocab_size)
        shape = name.shape or session.shape
        setup = session.setup._replace(shape=shape, top_logprobs=top_logprobs)
        dtype = session.target.params["embed"].dtype
        programs = Programs(setup, (session.weights,), dtype, drafts=shape.num_drafted > 0)
        static = {
            "empty": {"slots": self.num_slots, "rows": self.num_rows},
            "catch_up": {"sizes": (max(name.size, step.CATCH_UP), step.CATCH_UP)},
        }.get(name.kind, {})
        function = getattr(device_ops, name.kind)
        state = None if name.kind == "empty" else self.state_form
        if name.masked:
            arrays = (state, *self.example(name.verify()))
            state, _ = programs.form(device_ops.verify, *arrays)
        self.ready[name] = programs.compile(function, state, *self.example(name), **static)

    def run(self, name: ProgramName, state: SlotState | None, *arrays: Any) -> Any:
        """Runs a compiled program on the state; returns the new state and the report."""
        state = state if name.masked else state and state._replace(passed=None)
        return self.ready[name](self.session.weights, state, *arrays)

    def example(self, name: ProgramName, slots: Sequence[int] = (0,)) -> tuple[Any, ...]:
        """Arrays of a dummy run on free slots, beside the state.

        Fewer slots than rows serve several rows, since nothing depends on the tokens of free slots.
        """
        number, zero_1 = np.int32(0), np.zeros(1, np.int32)
        size = name.size if name.shape else 1
        slot_B = np.sort(np.resize(np.array(slots, np.int32), size))
        match name.kind:
            case "empty":
                return ()
            case "copy":
                return number, number, number
            case "catch_up":
                return (slot_B,)
            case "prefill" | "score":
                tokens_1T1 = np.zeros((1, name.size + 1), np.int32)
                return (PrefillInput(slot_B, tokens_1T1, zero_1, zero_1 + 1, self.blank_row),)
        masks = self.masks(name, [Row()] * size)
        if name.kind == "verify":
            return (Drafts(slot_B, masks.tree),)
        settings = joined([self.blank_row] * size, name.rows != GREEDY, masks.bitmask_BNW)
        return (DecodeInput(slot_B, np.ones(size, bool), settings, np.int32(ROUNDS // 2)),)

    def masks(self, name: ProgramName, rows: Sequence[Row]) -> Masks:
        """The masks of a call of these rows; none for a program without masks."""
        if not (name.masked or name.kind == "verify"):
            return Masks()
        return masks_of(rows, name.shape, self.session.target.config.vocab_size)

    def _form(self, num_slots: int) -> SlotState:
        """The shapes of a state's arrays."""
        static = {"slots": num_slots, "rows": self.num_rows}
        empty = functools.partial(device_ops.empty, self.session.setup, **static)
        return jax.eval_shape(empty, self.session.weights)[0]
