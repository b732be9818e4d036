"""Where a client's drafter sits: what it drafts and writes, and which rows its caches hold.

    rows   the target's (known)  | blank, of the prompt | root | the drafter's own (up to fed)

Only here is anything run by `half`, and only here are its rows counted. Nothing of a server is
known: what it said comes as parts of rows, and `enough` says when to look up from the desk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from infer.split.client.pace import Pace
from infer.split.client.replies import Part
from infer.split.client.text import Text
from infer.split.client.ways import Counts, Ways
from moa_jax.config import Sampling
from moa_jax.split.half import CHUNK, EXACT, MOST_STEPS, DraftHalf

PIECE = 8  # tokens that are written alone before anyone sees them


class Plan(NamedTuple):
    """A draft: nodes and their parents."""

    tokens: list[int]
    parents: list[int]
    ahead: bool = False  # made while the last reply was under way

    @property
    def levels(self) -> int:
        """How deep it is."""
        depth = [0]
        for parent in self.parents:
            depth.append(depth[parent] + 1)
        return max(depth)


def chain_of(tokens: Sequence[int], ahead: bool = False) -> Plan:
    """Tokens one after the other, the first behind the root."""
    return Plan(list(tokens), list(range(len(tokens))), ahead)


class Desk:
    """The drafter at work on one text after the other."""

    def __init__(self, half: DraftHalf, worker: ThreadPoolExecutor, ways: Ways) -> None:
        """`worker` has one thread, to which `half` belongs."""
        self._half, self._worker, self._ways = half, worker, ways
        self._pace = Pace(ways.levels) if ways.levels else None

    async def warm(self, prompts: Iterable[int]) -> None:
        """Compiles what answers to prompts of these lengths need."""
        replies = range(1, 2 + max(self._ways.levels, default=0))
        counts = [*replies, *(min(length, CHUNK) for length in prompts)]
        await self._on_half(self._half.warm, counts, self._ways.shapes)

    async def begin(self, text: Text, sampling: Sampling, counts: Counts) -> None:
        """Another text, of which no row stands."""
        self._text, self._counts = text, counts
        self._known = 0  # rows that the target has filled
        self._blank = 0  # rows of the prompt that say nothing of the target
        self._fed = 0  # rows of the whole text that stand, the drafter's own included
        self._ahead: list[int] = []  # drafted behind the text
        await self._on_half(self._half.reset, sampling)

    async def absorb(self, parts: Iterable[Part]) -> None:
        """Takes in the target's rows."""
        for part in parts:
            await self._on_half(self._half.absorb, *part)
            self._known = max(self._known, part.start + len(part.tokens))
            if len(part.tokens) > EXACT:  # it came padded, which hides what stood behind it
                self._blank = self._fed = 0

    # ---- drafts ---------------------------------------------------------------------------

    async def draft(self, room: int) -> Plan:
        """The next draft, of so many nodes at most."""
        if self._pace is None or room < 1:
            self._ahead = []
            return Plan([], [])
        steps, ahead = self._pace.choose(len(self._ahead))
        if ahead:
            return chain_of(self._ahead[: min(steps, room)], ahead)
        self._ahead = []
        if self._ways.shape is None:
            self._ahead = await self._chain([], min(steps, room))
            return chain_of(self._ahead)
        # The tree's own rows give way to those of a chain drafted ahead.
        shape = dataclasses.replace(self._ways.shape, depth=1 + steps)
        begin = time.perf_counter()
        tokens, parents = await self._drafting(self._half.tree, list(self._text.settled), shape)
        self._pace.saw_draft(time.perf_counter() - begin, steps)
        return Plan(tokens[:room], parents[:room])

    async def draft_ahead(self, plan: Plan, enough: Callable[[], bool]) -> None:
        """Goes on along the likeliest path while the reply is under way: the bonus token and
        the next draft, should all of it be right. Token by token, for the reply interrupts none;
        not at all where it is expected before the first token that would be of use."""
        if self._pace is None or not self._ways.draft_ahead or self._half.functions.go_on is None:
            return
        if not self._pace.has_time(plan.levels + 2 - len(self._ahead)):
            return
        wanted = plan.levels + 1 + self._pace.lengths[-1]
        room = self._text.room - 1
        while not enough() and len(self._ahead) < min(wanted, room, MOST_STEPS):
            self._ahead += await self._chain(self._ahead, 1)
            await asyncio.sleep(0)

    def saw_reply(self, plan: Plan, committed: Sequence[int], seconds: float) -> None:
        """What came of a draft, and after what time; what was drafted ahead stays if it fits."""
        if self._pace is not None:
            self._pace.saw_reply(seconds, plan.levels, len(committed) - 1, plan.ahead)
        # The rows of what follows stand as long as none of those before them came padded.
        right = self._ahead[: len(committed)] == committed and len(committed) <= EXACT
        self._ahead = self._ahead[len(committed) :] if right else []

    # ---- writing alone --------------------------------------------------------------------

    @property
    def can_write(self) -> bool:
        """Whether the text can go on without the target."""
        return self._half.functions.go_on is not None and not self._ways.stream

    def begin_tail(self) -> None:
        """What was drafted ahead begins a tail, if none has begun."""
        if not self._text.tail:
            self._text.write(self._ahead)
            if self._ahead:
                self._fed = len(self._text.whole) - 1
        self._ahead = []

    async def write(self, enough: Callable[[], bool]) -> bool:
        """One more piece of the tail; false if it was enough before that."""
        if not await self._feed(enough):
            return False
        self._text.write(await self._chain([], PIECE))
        self._fed = len(self._text.whole) - 1
        return True

    def tail_rewritten(self) -> None:
        """The rows of the tail are of another text."""
        self._fed = 0

    async def _feed(self, enough: Callable[[], bool]) -> bool:
        """The drafter's own rows for tokens of which none stand; false if it was enough first."""
        blank = self._text.prompt[:-1]
        if self._filled < len(blank):  # the target has not said a thing
            await self._on_half(self._half.absorb_nothing, blank, self._known)
            self._blank, self._fed = len(blank), 0
        whole, filled = self._text.whole, self._filled
        for end in range(max(filled, self._fed) + 1, len(whole)):
            await self._drafting(self._half.chain, whole[:end], filled, 1)
            self._fed = end
            if enough():
                return False
        return True

    # ---- the drafter ----------------------------------------------------------------------

    @property
    def _filled(self) -> int:
        """Rows that are not the drafter's own."""
        return max(self._known, self._blank)

    async def _chain(self, after: Sequence[int], steps: int) -> list[int]:
        begin = time.perf_counter()
        text = [*self._text.whole, *after]
        tokens = await self._drafting(self._half.chain, text, self._filled, steps)
        if self._pace is not None:
            self._pace.saw_draft(time.perf_counter() - begin, len(tokens))
        return tokens

    async def _drafting(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Work of the drafter whose time counts, stretched to that of a slower device."""
        begin = time.perf_counter()
        found = await self._on_half(function, *arguments)
        seconds = time.perf_counter() - begin
        if self._ways.slowdown > 1:
            await asyncio.sleep(seconds * (self._ways.slowdown - 1))
        self._counts.drafting_s += time.perf_counter() - begin
        return found

    def _on_half(self, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)
