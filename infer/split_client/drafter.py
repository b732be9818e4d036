"""The client's drafter: drafts, decodes alone, and tracks the origin of its cache rows.

    rows   the target's (known)  | blank, of the prompt | root | the drafter's own (up to fed)

No other module calls the ClientDrafter or tracks its rows. This module is independent of the
server: replies arrive as rows, and a callback `enough` ends drafting.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from infer.split_client.pace import DraftPace
from infer.split_client.replies import TokenRows, joined
from infer.split_client.state import AnswerText, ClientOptions, Counts
from moa_jax.config import Sampling
from moa_jax.split.client_drafter import CHUNK, EXACT, MOST_STEPS, ClientDrafter

PIECE = 8  # tokens per piece when the drafter decodes alone


class DraftPlan(NamedTuple):
    """The draft of a round: nodes without the root, and their parents; the root is 0."""

    tokens: list[int]
    parents: list[int]
    ahead: bool = False  # drafted while the last reply was pending

    @property
    def levels(self) -> int:
        """Depth of the deepest node."""
        depth = [0]
        for parent in self.parents:
            depth.append(depth[parent] + 1)
        return max(depth)


def chain_of(tokens: Sequence[int], ahead: bool = False) -> DraftPlan:
    """The draft of a chain: the first token follows the root."""
    return DraftPlan(list(tokens), list(range(len(tokens))), ahead)


class SequenceDrafter:
    """Drafts for one sequence at a time."""

    def __init__(
        self, drafter: ClientDrafter, worker: ThreadPoolExecutor, options: ClientOptions
    ) -> None:
        """Calls `drafter` only on the single thread of `worker`."""
        self._drafter, self._worker, self._options = drafter, worker, options
        self._pace = DraftPace(options.levels) if options.levels else None

    async def warm(self, prompts: Iterable[int]) -> None:
        """Compiles the programs for prompts of these lengths."""
        replies = range(1, 2 + max(self._options.levels, default=0))
        parts = ((min(length, CHUNK), length % CHUNK) for length in prompts)
        counts = [*replies, *(count for pair in parts for count in pair)]
        await self._on_worker(self._drafter.warm, counts, self._options.shapes)

    async def begin(self, text: AnswerText, sampling: Sampling, counts: Counts) -> None:
        """Starts another sequence with empty caches."""
        self._text, self._counts = text, counts
        self._known = 0  # leading rows from the target
        self._blank = 0  # leading rows of the prompt, absorbed with zeros instead of target rows
        self._fed = 0  # leading rows that fit the whole sequence, including the drafter's own
        self._ahead: list[int] = []  # tokens drafted after the end of the sequence
        await self._on_worker(self._drafter.reset, sampling, len(text.prompt))

    async def absorb(self, parts: Iterable[TokenRows]) -> None:
        """Writes the target's rows to the caches."""
        for part in joined(parts, CHUNK):
            await self._on_worker(self._drafter.absorb, *part)
            self._known = max(self._known, part.start + len(part.tokens))
            if len(part.tokens) > EXACT:  # padding overwrote all later rows
                self._blank = self._fed = 0

    # ---- drafts ---------------------------------------------------------------------------

    async def draft(self, room: int) -> DraftPlan:
        """The next draft, of at most `room` nodes."""
        if self._pace is None or room < 1:
            self._ahead = []
            return DraftPlan([], [])
        steps, ahead = self._pace.choose(len(self._ahead))
        if ahead:
            return chain_of(self._ahead[: min(steps, room)], ahead)
        self._ahead = []
        if self._options.shape is None:
            self._ahead = await self._chain([], min(steps, room))
            return chain_of(self._ahead)
        # The rows of a chain drafted ahead overwrite the tree's rows.
        shape = dataclasses.replace(self._options.shape, depth=1 + steps)
        begin = time.perf_counter()
        text = list(self._text.committed)
        tokens, parents = await self._drafting(self._drafter.tree, text, shape)
        self._pace.saw_draft(time.perf_counter() - begin, steps)
        return DraftPlan(tokens[:room], parents[:room])

    async def draft_ahead(self, plan: DraftPlan, enough: Callable[[], bool]) -> None:
        """Continues the drafter's chain while the reply is pending.

        If the whole draft is accepted, the chain holds the bonus token and the next draft. Tokens
        are drafted one per call, because the reply cannot interrupt a call. Drafts nothing if the
        reply is expected before the first useful token.
        """
        if self._pace is None or not self._options.draft_ahead:
            return
        if self._drafter.functions.draft_one is None:
            return
        if not self._pace.has_time(plan.levels + 2 - len(self._ahead)):
            return
        wanted = plan.levels + 1 + self._pace.lengths[-1]
        room = self._text.room - 1
        while not enough() and len(self._ahead) < min(wanted, room, MOST_STEPS):
            self._ahead += await self._chain(self._ahead, 1)
            await asyncio.sleep(0)

    def saw_reply(self, plan: DraftPlan, committed: Sequence[int], seconds: float) -> None:
        """Records the outcome of a draft; keeps the tokens drafted ahead if they still fit."""
        if self._pace is not None:
            self._pace.saw_reply(seconds, plan.levels, len(committed) - 1, plan.ahead)
        # Rows of later tokens stay valid unless padded rows overwrote them.
        right = self._ahead[: len(committed)] == committed and len(committed) <= EXACT
        self._ahead = self._ahead[len(committed) :] if right else []

    # ---- decoding without a link ----------------------------------------------------------

    @property
    def can_write(self) -> bool:
        """Whether the drafter can decode without the target."""
        return self._drafter.functions.draft_one is not None and not self._options.stream

    def begin_tail(self) -> None:
        """Starts the tail with the tokens drafted ahead, unless a tail exists."""
        if not self._text.unverified:
            self._text.write(self._ahead)
            if self._ahead:
                self._fed = len(self._text.whole) - 1
        self._ahead = []

    async def write(self, enough: Callable[[], bool]) -> bool:
        """Writes one piece of the tail.

        Returns False, and writes nothing, if `enough` returns True while missing rows are filled.
        """
        blank = self._text.prompt[:-1]
        if self._filled < len(blank):  # the target has not processed the whole prompt
            await self._on_worker(self._drafter.absorb_nothing, blank, self._known)
            self._blank, self._fed = len(blank), 0
        whole, filled = self._text.whole, self._filled
        for end in range(max(filled, self._fed) + 1, len(whole)):
            await self._drafting(self._drafter.chain, whole[:end], filled, 1)
            self._fed = end
            if enough():
                return False
        self._text.write(await self._chain([], PIECE))
        self._fed = len(self._text.whole) - 1
        return True

    def tail_rewritten(self) -> None:
        """Invalidates the rows of a tail that the target replaced."""
        self._fed = 0

    # ---- calls of ClientDrafter --------------------------------------------------------

    @property
    def _filled(self) -> int:
        """Number of leading rows absorbed from the target or with zeros."""
        return max(self._known, self._blank)

    async def _chain(self, after: Sequence[int], steps: int) -> list[int]:
        """Drafts a chain after the whole sequence and the tokens `after`."""
        begin = time.perf_counter()
        text = [*self._text.whole, *after]
        tokens = await self._drafting(self._drafter.chain, text, self._filled, steps)
        if self._pace is not None:
            self._pace.saw_draft(time.perf_counter() - begin, len(tokens))
        return tokens

    async def _drafting(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `function` and counts its time as drafting; `slowdown` stretches the time."""
        begin = time.perf_counter()
        found = await self._on_worker(function, *arguments)
        seconds = time.perf_counter() - begin
        if self._options.slowdown > 1:
            await asyncio.sleep(seconds * (self._options.slowdown - 1))
        self._counts.drafting_s += time.perf_counter() - begin
        return found

    def _on_worker(self, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)
