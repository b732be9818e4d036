"""An engine's compiled programs, by the size of what they work on.

    slots    1  2  4  8 .. all     of the state that decodes: powers of two
    rows     256  512 .. all       of caches: powers of two

A call is also compiled for a way to draft and for a kind of settings: one that serves more kinds
can stand in. The thread that decodes uses what is there, and never compiles. `Background` makes
what is missing, and until then something larger serves.

Where several sit side by side, drafts that are rejected cost most, so plain decoding is the way
that is made first. Other ways than it and the pair's own are made only where the table of costs
knows so many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef

from moa_jax.config import DraftShape
from moa_jax.decode import logprobs, step
from moa_jax.decode.engine import rows as device
from moa_jax.decode.engine.rows import EVERY, LIKELY, Kind, Live, RowSettings
from moa_jax.decode.programs import (
    CompiledSizes,
    Programs,
    bucket_for,
    cache_rows_for,
    power_of_two_buckets,
)
from moa_jax.decode.session import Session
from moa_jax.model import sharding

Name = tuple[Any, ...]  # of a program: what it does, and for which sizes

LEAST_ROWS = 256
LEAST_CHUNK = 16
ROUNDS_OF_A_REHEARSAL = 4
LIGHTER = 4  # so many times as fast as a target its drafter reads, about


class Size(NamedTuple):
    """Of a state."""

    slots: int
    rows: int

    @property
    def cost(self) -> int:
        """What a round costs, roughly: each slot has its work, and reads its rows."""
        return self.slots * (2 * LEAST_ROWS + self.rows)


class Recipe(NamedTuple):
    """How a program is compiled; with `donate` it takes over the memory of its first array."""

    function: Callable[..., Any]
    like: tuple[Any, ...] = ()  # arrays, or their shapes
    way: DraftShape | None = None  # None: the session's own
    likely: bool = False  # with log-probabilities
    donate: bool = True
    static: dict[str, Any] = {}


class Shelf:
    """Programs that are compiled; one thread may run them while another one makes more."""

    def __init__(
        self,
        session: Session,
        num_slots: int,
        num_rows: int,
        blank: Callable[[int, Kind], RowSettings],
        is_priced: Callable[[int], bool] = lambda slots: False,
    ) -> None:
        """`blank` gives what a call of so many slots is given for nobody, on the host; `is_priced`
        says whether it is known what the ways of so many cost."""
        self.slots = power_of_two_buckets(1, num_slots)
        self.rows = power_of_two_buckets(LEAST_ROWS, cache_rows_for(num_rows))
        self.chunks = power_of_two_buckets(LEAST_CHUNK, session.chunks(1)[0])
        self.ways, self.own, self.first = session.ways, session.shape, session.first
        self.catches_up = session.catches_up
        self._session, self._blank, self._is_priced = session, blank, is_priced
        dtype = session.target.params["embed"].dtype
        top = min(logprobs.MOST, session.target.config.vocab_size)
        self._programs = {
            (way, likely): Programs(setup, (session.weights,), dtype, drafts=way.num_drafted > 0)
            for way in session.ways
            for likely, count in ((False, None), (True, top))
            for setup in [session.setup._replace(shape=way, top_logprobs=count)]
        }
        self._ready: dict[Name, Callable[..., Any]] = {}
        self._ready_rows: tuple[int, ...] = ()
        self._sizes = CompiledSizes[Size]()

    @property
    def largest(self) -> Size:
        return Size(self.slots[-1], self.rows[-1])

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def num_bytes(self) -> int:
        """Of a state of the largest size."""
        leaves = jax.tree.leaves(self._form(self.largest))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    # ---- what is there ----

    def run(self, name: Name, *arrays: Any) -> Any:
        """Runs a program that is there; the names are those of `make`."""
        return self._ready[name](self._session.weights, *arrays)

    def has(self, name: Name) -> bool:
        """Whether a program is there."""
        return name in self._ready

    def put(self, arrays: Any) -> Any:
        """Arrays of the host that several calls are given, where these expect them."""
        mesh = self._session.mesh
        return jax.device_put(arrays, mesh and sharding.of_state(arrays, mesh))

    def fits(self, size: Size, slots: int, rows: int) -> bool:
        return size.slots >= slots and size.rows >= rows

    def wanted(self, slots: int, rows: int) -> Size:
        """The smallest size for so much, whether its programs are there or not."""
        return Size(bucket_for(self.slots, slots), bucket_for(self.rows, rows))

    def best(self, slots: int, rows: int, kind: Kind, ways: Sequence[DraftShape]) -> Size | None:
        """The size that is there, holds so much, serves the kind in a way, and costs least."""

        def holds(size: Size) -> bool:
            serves = any(self.kind_of_call(size, way, kind) is not None for way in ways)
            return serves and self.fits(size, slots, rows)

        return self._sizes.cheapest(holds, lambda size: size.cost)

    def ways_for(self, slots: int) -> list[DraftShape]:
        """The ways that such a batch may take, the one that it takes for want of figures first."""
        if slots == 1:
            return sorted(self.ways, key=lambda way: way != self.first)
        ways = self.ways
        if not self._is_priced(slots):
            ways = [way for way in ways if way == self.own or not way.num_drafted]
        return sorted(ways, key=lambda way: way.num_drafted)

    def kind_of_call(self, size: Size, way: DraftShape, kind: Kind) -> Kind | None:
        """The least kind that serves this one and is compiled, None if none is."""
        there = (k for k in kind.servers() if ("call", size, way, k) in self._ready)
        return next(there, None)

    def kind_of_first(self, rows: int, kind: Kind) -> Kind:
        """The least kind of a first token that serves this one and is compiled."""
        return next(k for k in kind.servers() if ("first", rows, k) in self._ready)

    def row_size(self, rows: int) -> int:
        """The rows of the shortest single text for which programs are there."""
        return bucket_for(self._ready_rows, rows)

    def rows_to_score(self, rows: int) -> int:
        """The same where the prompt's log-probabilities are wanted."""
        return bucket_for([size for size in self._ready_rows if self.has(("score", size))], rows)

    def chunk(self, rows: int, count: int) -> int:
        """The chunk to read `count` tokens in, the largest one if it takes several."""
        there = [size for size in self.chunks if ("read", rows, size) in self._ready]
        return next((size for size in there if size >= count), there[-1])

    def catch_up(self, size: Size, live: Live, ended: np.ndarray) -> tuple[Live, int]:
        """Has the drafter read about as long as the target reads a chunk, of one text alone up to
        twice as long, and says how many tokens of each at most; of none that has `ended`."""
        turns = max(1, LIGHTER * self.chunks[-1] // (size.slots * step.CATCH_UP))
        most = turns * step.CATCH_UP * len(self._turns_of(size))  # of each size as many
        return self.run(("catch_up", size), live, ended, np.int32(turns)), most

    def _turns_of(self, size: Size) -> tuple[int, ...]:
        """Tokens of each text that a turn of the drafter reads, in the order of turns."""
        has_larger = size.slots == 1 and self.chunks[-1] > step.CATCH_UP
        return (self.chunks[-1], step.CATCH_UP) if has_larger else (step.CATCH_UP,)

    def calls(self) -> list[tuple[Size, DraftShape, Kind]]:
        """The calls that are there."""
        return [name[1:] for name in list(self._ready) if name[0] == "call"]

    def rehearse(self, size: Size, way: DraftShape, kind: Kind) -> tuple[int, float]:
        """Runs a call that is there for nobody: how many rounds it had, and seconds.

        Its rows are of zeros and more than half full, as far as the longest text of a state mostly
        goes, or it would sit in a smaller one: so a CPU reads all of them (`attention.LONG`).
        """
        live, given = self.run(("empty", size)), self._blank(size.slots, kind)
        all_of = lambda number: np.full(size.slots, number, np.int32)
        nobody = np.zeros(size.slots, bool)
        now = live.now._replace(length_B=all_of(size.rows * 5 // 8), done_B=nobody)
        live = live._replace(now=step.all_known(now))
        given = given._replace(total_B=all_of(size.rows))
        arrays = (live, given, nobody, np.int32(ROUNDS_OF_A_REHEARSAL))
        jax.block_until_ready(live)  # new memory takes longer than the rounds
        begin = time.perf_counter()
        _, report = self.run(("call", size, way, kind), *arrays)
        rounds = int((jax.device_get(report.counts_B2R)[:, 0] > 0).sum(axis=1).max())
        return rounds, time.perf_counter() - begin

    # ---- what is made ----

    def make_size(self, size: Size, kind: Kind = EVERY) -> None:
        """All that a state of this size needs, with calls of its first way for one kind."""
        self.make_rows(size.rows)
        self.make_state(size)
        self.make_call(size, self.ways_for(size.slots)[0], kind)
        self._sizes.add(size)

    def make_state(self, size: Size) -> None:
        """What a state of this size needs beside calls."""
        for name in ("empty", "insert", "take"):
            self.make((name, size))
        self._make_catch_up(size)

    def make_rows(self, rows: int) -> None:
        """What reading a prompt into so many rows needs, in the largest chunk."""
        if rows in self._ready_rows:
            return
        self.make(("empty", Size(1, rows)))
        self.make(("restart", rows))
        self.make_read(rows, self.chunks[-1])
        self.make_first(rows, LIKELY)
        self._make_catch_up(Size(1, rows))
        there = sorted({*self._ready_rows, rows})
        for pair in ((a, b) for a in there for b in there if rows in (a, b)):
            self.make(("resized", *pair))
        self._ready_rows = tuple(there)

    def _make_catch_up(self, size: Size) -> None:
        if self.catches_up:
            self.make(("catch_up", size))

    def make_read(self, rows: int, chunk: int) -> None:
        """Reading a prompt in smaller chunks."""
        self.make(("read", rows, chunk))

    def make_score(self, rows: int) -> None:
        """Reading a prompt in the largest chunk, with its log-probabilities."""
        self.make(("score", rows))

    def make_first(self, rows: int, kind: Kind) -> None:
        """The first token behind a prompt in so many rows, for fewer kinds than all."""
        self.make(("first", rows, kind))

    def make_call(self, size: Size, way: DraftShape, kind: Kind) -> None:
        """A call in another way, or for fewer kinds."""
        self.make(("call", size, way, kind))

    def make(self, name: Name) -> None:
        """Compiles the program of this name, and puts it where `run` finds it."""
        if self.has(name):
            return
        recipe = self._recipe(name)
        self._ready[name] = self._programs[recipe.way or self.own, recipe.likely].prepare(
            recipe.function, *recipe.like, donate=recipe.donate, **recipe.static
        )

    def arguments_of(self, name: Name) -> PyTreeDef:
        """The structure of the arrays that `run` takes for a program, which may not exist yet."""
        return jax.tree.structure(self._recipe(name).like)

    def _recipe(self, name: Name) -> Recipe:
        """How the program of a name is made."""
        one, number = jax.ShapeDtypeStruct((1,), jnp.int32), np.zeros((), np.int32)
        match name:
            case "empty", size:
                return Recipe(device.empty, donate=False, static=size._asdict())
            case "insert", size:
                row = self._form(Size(1, size.rows))
                return Recipe(device.insert, (self._form(size), row, number))
            case "take", size:
                return Recipe(device.take, (self._form(size), number), donate=False)
            case "catch_up", size:
                like = (self._form(size), np.zeros(size.slots, bool), number)
                return Recipe(device.catch_up, like, static={"sizes": self._turns_of(size)})
            case "resized", before, rows:
                row = self._form(Size(1, before))
                return Recipe(device.resized, (row,), donate=False, static={"rows": rows})
            case "restart", rows:
                row = self._form(Size(1, rows))
                return Recipe(device.restart, (row, row.tokens_BC, one))
            case "read", rows, chunk:
                return Recipe(
                    device.read, (self._form(Size(1, rows)), one), static={"chunk": chunk}
                )
            case "score", rows:
                static = {"chunk": self.chunks[-1]}
                return Recipe(
                    device.read, (self._form(Size(1, rows)), one), likely=True, static=static
                )
            case "first", rows, kind:
                width = self._session.target.config.block.hidden_size
                hidden = jax.ShapeDtypeStruct(
                    (1, width), self._session.weights.target["embed"].dtype
                )
                like = (self._form(Size(1, rows)), hidden, self._blank(1, kind))
                return Recipe(device.first, like, likely=kind.likely)
            case "call", size, way, kind:
                ended = np.zeros(size.slots, bool)
                like = (self._form(size), self._blank(size.slots, kind), ended, number)
                return Recipe(device.call, like, way=way, likely=kind.likely)
        raise KeyError(name)

    def _form(self, size: Size) -> Live:
        empty = lambda weights: device.empty(self._session.setup, weights, **size._asdict())
        return jax.eval_shape(empty, self._session.weights)
