"""Prompts that an engine reads, a chunk at a time, each in a row of its own.

    a kept text that begins alike   | copied |
    the prompt's row                | copied | chunk | chunk | . . |  first token -> a seat
                                                     kept for prompts like it

What a chunk finds is asked for and not waited for: log-probabilities of a prompt, and the first
token, lie in two lines until the engine hears them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from moa_jax.decode.engine import rows as device
from moa_jax.decode.engine.making import Maker
from moa_jax.decode.engine.prefixes import Kept, Prefixes
from moa_jax.decode.engine.requests import Task
from moa_jax.decode.engine.rows import Live, PromptLogProbs
from moa_jax.decode.engine.shelf import Shelf, Size
from moa_jax.decode.logprobs import LogProbs
from moa_jax.errors import first_line


@dataclasses.dataclass(eq=False)
class Reading:
    """A prompt that has been read in part."""

    task: Task
    live: Live
    rows: int
    left: int  # tokens
    caught_up: bool = False  # the drafter has read of it


class ScoredChunk(NamedTuple):
    """Log-probabilities of a chunk of a prompt that were asked for."""

    task: Task
    found: PromptLogProbs


class FirstToken(NamedTuple):
    """A first token that was asked for."""

    task: Task
    root_1: jax.Array
    done_1: jax.Array
    logprobs: LogProbs | None


class Readings:
    """Prompts under way, what was asked of them, and the texts that are kept for others."""

    def __init__(
        self,
        shelf: Shelf,
        maker: Maker,
        counts: Counter[str],
        *,
        draft_rows: int,
        prefix_bytes: int,
    ) -> None:
        self.scored, self.firsts = deque[ScoredChunk](), deque[FirstToken]()
        self.prefixes = Prefixes(prefix_bytes)
        self._shelf, self._maker, self._counts = shelf, maker, counts
        self._draft_rows = draft_rows
        self._under_way: dict[int, Reading] = {}  # by their tasks' ids

    def __len__(self) -> int:
        return len(self._under_way)

    def __contains__(self, task: Task) -> bool:
        return task.id in self._under_way

    @property
    def tasks(self) -> list[Task]:
        """Whose prompts have been read in part."""
        return [reading.task for reading in self._under_way.values()]

    @property
    def num_read(self) -> int:
        """Tokens that were read of them; any thread may ask."""
        readings = list(self._under_way.values())
        return sum(len(each.task.request.prompt_ids) - each.left for each in readings)

    def left(self, task: Task) -> int:
        """Tokens of its prompt that were not read."""
        reading = self._under_way.get(task.id)
        return reading.left if reading else len(task.request.prompt_ids)

    def leave(self, task: Task) -> None:
        """Reads no more of a prompt."""
        self._under_way.pop(task.id, None)

    def lose_firsts(self) -> None:
        """Forgets first tokens of those who have seats; their rows are lost with the state."""
        self.firsts = deque(each for each in self.firsts if not each.task.request.takes_seat)

    def read_on(self, task: Task, catch_ups: Callable[[], float]) -> tuple[int, Reading | None]:
        """Sends one chunk; its size, and what was read if it was the last.

        Behind the first token, which so comes sooner, the drafter reads as often as `catch_ups`
        says; here it reads no rows of others. What is left it reads when it has to.
        """
        request, prompt, text = task.request, task.request.prompt_ids, task.text
        if task not in self:
            self._under_way[task.id] = Reading(task, None, 0, len(prompt))
            self._begin(self._under_way[task.id])
        reading = self._under_way[task.id]
        chunk = self._shelf.chunk(reading.rows, reading.left)
        name = ("read", reading.rows, chunk)
        if request.prompt_logprobs:
            chunk, name = self._shelf.chunks[-1], ("score", reading.rows)
        length_1 = np.array([len(prompt)], np.int32)
        reading.live, hidden_1D, scored = self._shelf.run(name, reading.live, length_1)
        if scored is not None:
            self.scored.append(ScoredChunk(task, scored))
        read = min(chunk, reading.left)
        reading.left -= read
        text.unread += read * self._shelf.catches_up
        if request.max_new_tokens and not reading.left:
            kind = self._shelf.kind_of_first(reading.rows, text.kind)
            given = device.together([text.given], kind)
            found = self._shelf.run(("first", reading.rows, kind), reading.live, hidden_1D, given)
            reading.live, *first = found
            self.firsts.append(FirstToken(task, *first))
        if reading.left:
            return chunk, None
        times = catch_ups() if request.takes_seat else 0
        while times > 0 and text.unread:
            size, nobody = Size(1, reading.rows), np.zeros(1, bool)
            reading.live, most = self._shelf.catch_up(size, reading.live, nobody)
            text.unread = max(0, text.unread - most)
            reading.caught_up, times = True, times - 1
        self._counts["prompt_tokens"] += len(prompt)
        self.keep(prompt, lambda: (reading.live, reading.rows))
        self.leave(task)
        return chunk, reading

    def _begin(self, reading: Reading) -> None:
        """A row for the prompt, with what a kept text that begins alike has of it."""
        task, kept, common = reading.task, None, 0
        prompt = task.request.prompt_ids
        rows = len(prompt) + 1 + self._draft_rows  # for a first round, too
        if task.request.prompt_logprobs:  # what each of its tokens says is needed
            fits, rows = self._shelf.row_size(rows), self._shelf.rows_to_score(rows)
            if fits < rows:  # those who come later find it
                self._maker.make(iter([functools.partial(self._shelf.make_score, fits)]))
        else:
            rows = self._shelf.row_size(rows)
            kept, common = self.prefixes.longest(prompt[:-1])  # what its last token says is needed
            if self.prefixes.most_bytes:
                self._counts["prefix_lookups"] += 1
                self._counts["prefix_lookup_tokens"] += len(prompt)
        if kept is not None:
            live = self._shelf.run(("resized", kept.rows, rows), kept.live)
            self._counts["prefix_hits"] += 1
            self._counts["prefix_tokens"] += common
        else:
            live = self._shelf.run(("empty", Size(1, rows)))
        tokens_1C = np.zeros((1, rows + 1), np.int32)
        tokens_1C[0, : len(prompt)] = prompt
        length_1 = np.array([common], np.int32)
        reading.live = self._shelf.run(("restart", rows), live, tokens_1C, length_1)
        reading.rows, reading.left = rows, len(prompt) - common
        task.text.unread = common * self._shelf.catches_up  # of the kept text, perhaps

    def keep(self, tokens: Sequence[int], caches: Callable[[], tuple[Live, int]]) -> None:
        """Keeps a text, in as few rows as it needs, if it is wanted; `caches` are its own.

        Where the device cannot, as for want of memory, nothing is kept, and nobody's answer is
        lost but in a group of processes, which ends then.
        """
        if not self.prefixes.wants(tokens):
            return
        try:
            live, rows = caches()
            fewer = self._shelf.row_size(len(tokens) + 1)
            if fewer < rows:
                live, rows = self._shelf.run(("resized", rows, fewer), live), fewer
            self.prefixes.keep(Kept(np.array(tokens, np.int32), live, rows))
        except jax.errors.JaxRuntimeError as error:
            logging.getLogger(__name__).warning("a text was not kept: %s", first_line(error))
            self.prefixes.clear()
