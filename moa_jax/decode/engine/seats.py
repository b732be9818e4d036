"""The texts that an engine decodes side by side: who sits where, and the calls that serve them.

A call is heard of one call late, so that the device never waits for the host:

    host     send 1 | send 2 | hear 1 | send 3 | hear 2 | send 4 | hear 3
    device            1 1 1 1 1 1 1 1   2 2 2 2 2 2 2 2   3 3 3 3 3 3 3 3

Whoever ended in call 1 still has a seat in call 2, which leaves its row as it is. All methods
belong to the thread of the engine.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode import logprobs
from moa_jax.decode.engine.rows import (
    GREEDY,
    Kind,
    Live,
    Report,
    RowSettings,
    together,
)
from moa_jax.decode.engine.shelf import Shelf, Size
from moa_jax.decode.logprobs import LogProbs, TokenLogprob
from moa_jax.decode.programs import bucket_for

# A state has rows for so many more rounds, and a call has no more than fit. With many, texts would
# be in large states long before they are long, and each round reads every row.
ROUNDS_AHEAD = 3
LEAST_ROUNDS = 4  # to which a call is cut at least: the host has to send the next one meanwhile
ROUNDS_OF_A_MOVE = 6  # of the smaller state: about what there and back costs
PATIENCE = 2  # times as often as needed that the drafter reads while calls that draft wait for it


Program = tuple[Size, DraftShape, Kind]  # of a call


@dataclasses.dataclass(eq=False)
class Text:
    """One text under way, as the host knows it."""

    id: int  # of its request
    tokens: list[int]  # prompt and answer, as far as they were heard of
    total: int  # tokens that it may hold
    given: RowSettings  # its one row of settings
    kind: Kind
    top_logprobs: int | None = None  # likeliest tokens that it wants to know beside each
    ended: bool = False
    surely: int = 0  # verified tokens
    ahead: int = 0  # tokens that calls which were sent may add
    unread: int = 0  # verified tokens at most that the drafter has not read


@dataclasses.dataclass
class Flight:
    """A call that was sent."""

    program: Program
    rounds: int  # at most
    texts: list[Text | None]  # by row
    report: Report  # on the device
    sent: float  # seconds
    alone: bool  # nothing else was sent to the state since the call before it
    caught_up: bool  # the drafter read what it had not, since then
    late: set[int]  # of texts that the drafter may not have read
    read_before: bool = False  # a chunk was sent since then
    follows: bool = False  # the call before it was not heard when it was sent
    at_rest: bool = True  # nothing was compiled beside it
    is_trial: bool = False  # the drafter need not have read anything: it is no probe

    @property
    def way(self) -> DraftShape:
        return self.program[1]


@dataclasses.dataclass
class Heard:
    """What a call did for one text."""

    text: Text
    tokens: list[int]
    logprobs: list[TokenLogprob]
    done: bool
    rounds: list[tuple[int, int]]  # tokens committed, nodes drafted


class Seats:
    """A state of some size, which grows and shrinks with those who sit in it.

    While they move from one state to another, both are in memory.
    """

    def __init__(
        self,
        shelf: Shelf,
        nobody: RowSettings,
        draft_rows: int,
        would_draft: Callable[[int], bool],
    ) -> None:
        """`nobody` is what a call is given for a row in which nobody sits; `would_draft` says
        whether a state of so many slots is likely to be drafted for."""
        self._shelf, self._nobody, self._draft_rows = shelf, nobody, draft_rows
        self._would_draft = would_draft
        self.reset()

    def reset(self) -> None:
        """Nobody sits anywhere, and the state is gone."""
        self._state: Live | None = None
        self._size: Size | None = None
        self._texts: list[Text | None] = []
        self._ended: set[int] = set()  # rows that the device may think of as under way
        self._given: dict[Kind, RowSettings] = {}  # on the device
        self._wasted = 0  # what a smaller state would have saved, in costs of rounds
        self._best: Size | None = None  # for those who sit and come, of what is there
        self._disturbed = True  # something else than a call was sent
        self._caught_up = False  # and the drafter read for long, perhaps
        self._patience: int | None = None  # how often the drafter reads before drafts begin

    @property
    def texts(self) -> list[Text]:
        """Those who sit, in the order of their rows."""
        return [text for text in self._texts if text is not None]

    @property
    def size(self) -> Size | None:
        return self._size

    @property
    def most_unread(self) -> int:
        """How many tokens of one who sits the drafter has not read, at most."""
        return max((text.unread for text in self.texts), default=0)

    @property
    def is_disturbed(self) -> bool:
        """Whether the next call comes behind something else than a call."""
        return self._disturbed

    @property
    def kind(self) -> Kind:
        """The least kind of a call that serves all who sit."""
        return _most([text.kind for text in self.texts])

    # ---- come and go ----

    def enter(
        self, row: Live, rows: int, text: Text, coming: int = 0, caught_up: bool = False
    ) -> None:
        """Seats a text that was read in a row of its own; there is always a state large enough.

        `coming` more will soon want a seat. Where it has `caught_up` the drafter has just read it.
        """
        self._fit([*self.texts, text], coming)
        self._put(row, rows, text)
        self._caught_up |= caught_up

    def leave(self, text: Text) -> None:
        """Frees a seat; the next call leaves its row as it is."""
        text.ended = True
        if text in self._texts:
            index = self._index(text)
            self._texts[index] = None
            self._ended.add(index)
            self._given = {}

    def copy(self, text: Text) -> tuple[Live, int]:
        """The caches of one who sits, and how many rows they have."""
        self._disturbed = True
        index = np.int32(self._index(text))
        return self._shelf.run(("take", self._size), self._state, index), self._size.rows

    def _index(self, text: Text) -> int:
        return next(index for index, other in enumerate(self._texts) if other is text)

    def _put(self, row: Live, rows: int, text: Text) -> None:
        size = self._size
        if rows != size.rows:
            row = self._shelf.run(("resized", rows, size.rows), row)
        index = self._texts.index(None)
        self._state = self._shelf.run(("insert", size), self._state, row, np.int32(index))
        self._texts[index] = text
        self._ended.discard(index)
        self._given = {}
        self._disturbed = True

    # ---- grow and shrink ----

    def _needs(self, texts: Sequence[Text], coming: int) -> tuple[int, int, list[DraftShape]]:
        """Slots with `coming` more, and rows for the next rounds of these ways.

        They are those that so many may take. But several who are hardly drafted for need no rows
        for drafts: in a larger state each round takes longer.
        """
        sizes = [slots for slots in self._shelf.slots if slots >= len(texts)]
        ways = list(dict.fromkeys(w for slots in sizes for w in self._shelf.ways_for(slots)))
        seats = min(len(texts) + coming, self._shelf.slots[-1])
        if seats > 1 and not self._would_draft(bucket_for(self._shelf.slots, seats)):
            ways = [way for way in ways if not way.num_drafted] or ways
        ahead = ROUNDS_AHEAD * max(way.levels for way in ways)
        longest = max(min(text.total, _begin(text) + ahead) for text in texts)
        return seats, longest + max(self._rows_of(way) for way in ways), ways

    def would_draft_with(self, coming: int) -> bool:
        """Whether those who sit and so many more are likely to be drafted for."""
        count = min(len(self.texts) + coming, self._shelf.slots[-1])
        has_room = self._size is not None and self._size.slots >= count
        return self._would_draft(
            self._size.slots if has_room else bucket_for(self._shelf.slots, count)
        )

    def _rows_of(self, way: DraftShape) -> int:
        """Rows behind a text that a round writes; who drafts may have the drafter read before."""
        return self._draft_rows if way.num_drafted else way.num_rows

    def _rounds_left(self, way: DraftShape) -> float:
        """How many rounds of a way the state has rows for; 0 if some text may outgrow it in one."""
        rows = self._size.rows - self._rows_of(way)
        growing = [rows - _begin(text) for text in self.texts if text.total > rows]
        return min(growing) // way.levels if growing else math.inf

    def _fit(self, texts: Sequence[Text], coming: int) -> None:
        """Moves to another size where this one is too small, or a smaller one will soon pay."""
        (slots, rows, ways), kind = self._needs(texts, coming), _most([t.kind for t in texts])
        best, size = self._shelf.best(slots, rows, kind, ways), self._size
        if size and self._shelf.fits(size, len(texts), rows) and self._ready_for(kind):
            self._best = best
            if best.cost >= size.cost:
                self._wasted = 0
            if self.texts and self._wasted <= ROUNDS_OF_A_MOVE * best.cost:
                return
        if best != size:
            self._move(best)

    def _move(self, size: Size) -> None:
        old, before, sitting = self._state, self._size, list(enumerate(self._texts))
        caught_up, patience = self._caught_up, self._patience
        moving = [(i, text) for i, text in sitting if text is not None]
        if not moving:
            old = self._state = None  # its memory is free before more is taken
        self.reset()
        self._size, self._texts = size, [None] * size.slots
        self._caught_up, self._patience = caught_up, patience
        self._state = self._shelf.run(("empty", size))
        for index, text in moving:
            row = self._shelf.run(("take", before), old, np.int32(index))
            self._put(row, before.rows, text)
        self._best = size

    def wishes(self, coming: int) -> list[Size]:
        """The size that would serve best, and the one that is wanted when texts have grown.

        `coming` more would sit if they could.
        """
        slots, rows, _ = self._needs(self.texts, coming)
        end = max(text.total for text in self.texts) + self._draft_rows
        return [self._shelf.wanted(slots, rows), self._shelf.wanted(slots, min(2 * rows, end))]

    # ---- calls ----

    def ready(self, coming: int = 0) -> dict[DraftShape, Program]:
        """The ways that a call can take now, each with its program; `coming` more will sit soon."""
        self._fit(self.texts, coming)
        return self._ready_for(self.kind)

    def _ready_for(self, kind: Kind) -> dict[DraftShape, Program]:
        """The ways for which this state has programs and rows."""
        found = {}
        for way in self._shelf.ways:
            served = self._shelf.kind_of_call(self._size, way, kind)
            if served is not None and self._rounds_left(way) > 0:
                found[way] = (self._size, way, served)
        return found

    def rounds_to_an_end(self, way: DraftShape) -> float:
        """Rounds until the first of several may end, who else would sit idle in a long call.

        Where one may have ended in what is under way, the host soon looks up from the next call.
        """
        left = [text.total - _begin(text) for text in self.texts]
        return max(LEAST_ROUNDS, -(-min(left) // way.levels)) if len(left) > 1 else math.inf

    def prepared(self, program: Program, plain: Program | None) -> Program:
        """Has the drafter read before a call that drafts, and says which call can follow.

        It reads about as long as the target reads a chunk. Where that is not enough the next call
        is `plain` decoding's, if there is one. But whoever comes meanwhile has a prompt to be read:
        after `PATIENCE` times what was needed at first, drafts begin for those who were read.
        """
        size, way, _ = program
        while way.num_drafted and self.most_unread:
            unread = self.most_unread
            self._state, most = self._shelf.catch_up(size, self._state, self._ended_rows())
            self._disturbed = self._caught_up = True
            for text in self.texts:
                text.unread = max(0, text.unread - most)
            if plain is None:
                continue
            if self._patience is None:
                self._patience = PATIENCE * math.ceil(unread / most)
            self._patience -= 1
            if self.most_unread:
                return plain if self._patience > 0 else program
        self._patience = None
        return program

    def send(self, program: Program, rounds: int) -> Flight:
        """Sends a call of one of the programs that are `ready`."""
        size, way, kind = program
        rounds = int(min(rounds, self._rounds_left(way)))
        self._wasted += rounds * max(0, size.cost - self._best.cost)
        if kind not in self._given:
            rows = [self._nobody if text is None else text.given for text in self._texts]
            self._given[kind] = self._shelf.put(together(rows, kind))
        arrays = (self._state, self._given[kind], self._ended_rows(), np.int32(rounds))
        self._ended = set()
        begin, alone = time.perf_counter(), not self._disturbed
        self._state, report = self._shelf.run(("call", *program), *arrays)
        late = {text.id for text in self.texts if text.unread}
        for text in self.texts:
            text.ahead += rounds * way.levels
            if self._shelf.catches_up and (text.unread or not way.num_drafted):
                text.unread += rounds * way.levels
        caught_up, self._disturbed, self._caught_up = self._caught_up, False, False
        return Flight(program, rounds, list(self._texts), report, begin, alone, caught_up, late)

    def _ended_rows(self) -> np.ndarray:
        """Which rows nobody sits in any more."""
        ended = np.zeros(self._size.slots, bool)
        ended[list(self._ended)] = True
        return ended

    def hear(self, flight: Flight) -> tuple[list[Heard], int]:
        """Waits for a call: what it did for each, and how many rounds it had."""
        report = jax.device_get(flight.report)
        turned = int((report.counts_B2R[:, 0] > 0).sum(axis=1).max())
        heard = []
        for row, text in enumerate(flight.texts):
            if text is None:
                continue
            text.ahead -= flight.rounds * flight.way.levels
            if not text.ended:
                heard.append(_of_row(text, report, row))
        return heard, turned


def _begin(text: Text) -> int:
    """Rows that a text has at most before the next call."""
    return text.surely + text.ahead + 1


def _of_row(text: Text, report: Report, row: int) -> Heard:
    count = int(report.count_B[row])
    tokens = report.tokens_BW[row, :count].tolist()
    text.tokens += tokens
    text.surely += count
    committed_R, drafted_R = report.counts_B2R[row].tolist()
    rounds = [(n, k) for n, k in zip(committed_R, drafted_R, strict=True) if n]
    likely = likely_of(text, report.logprobs, row, count)
    return Heard(text, tokens, likely, bool(report.done_B[row]), rounds)


def likely_of(text: Text, found: LogProbs | None, row: int, count: int) -> list[TokenLogprob]:
    """What a text wants to know of its first `count` tokens of a window, on the host."""
    if text.top_logprobs is None:
        return []
    return logprobs.as_list(found, row, slice(count), text.top_logprobs)


def _most(kinds: Sequence[Any]) -> Kind:
    """The least kind that serves all of these."""
    return Kind(*(max(each) for each in zip(*kinds, strict=True))) if kinds else Kind(GREEDY)
