"""Decides the next step of an engine: chunks of prompts, and the requests of a decode call.

    waiting    D E ...        first come, first served, as slots become free
    running    A B C          A and B decode, C is in prefill

    step       prefill                decode
    1          C 0..63                A B
    2          C 64..99, D 0..27      A B C
    3          D 28..91               A B C D

A step has a budget of prompt tokens, so that a long prompt delays each decode call by one chunk.
The budget grows if at least twice as many prompts can be prefilled as requests decode. Prompts are
prefilled in order of arrival, each to its end before the next one starts, so no request starves.
Reference: chunked prefill, Sarathi (2308.16369).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from moa_jax.engine.prefix_cache import SlotTable
from moa_jax.engine.requests import Phase, RequestState

# Per step: the pause between two decode calls is then below 0.1 s on an H100 (20 ms per chunk of an
# 8B model), which a reader hardly notices.
MOST_CHUNKS = 4


class PrefillChunk(NamedTuple):
    """Tokens `start` .. `end - 1` of a prompt."""

    state: RequestState
    start: int
    end: int
    is_first: bool
    copy_from: int | None = None  # another slot that has the prompt's first `start` tokens

    @property
    def is_last(self) -> bool:
        """Whether this chunk ends the prompt."""
        return self.end == self.state.prompt_length

    def begin(self, size: int, num_rows: int) -> int:
        """The first token of a program of `size` tokens.

        At the end of the cache the program starts earlier and computes some tokens again.
        """
        return min(self.start, num_rows - size)


class Scheduler:
    """The queue, the slots and the running requests; uses neither a device nor a clock."""

    def __init__(self, slots: SlotTable, num_slots: int, chunk: int) -> None:
        """At most `num_slots` requests run at once; a chunk has at most `chunk` tokens."""
        self.slots, self.num_slots, self.chunk = slots, num_slots, chunk
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []

    def add(self, state: RequestState) -> None:
        """Appends a request to the queue."""
        self.waiting.append(state)

    def finish(self, state: RequestState) -> None:
        """Removes a request in any phase; its slot keeps the tokens that it holds."""
        if state.phase is Phase.WAITING and state in self.waiting:
            self.waiting.remove(state)
        elif state in self.running:
            self.running.remove(state)
            self.slots.hold(state.slot, state.known_tokens())
            self.slots.release(state.slot)
        state.phase = Phase.FINISHED

    def has_prefill(self) -> bool:
        """Whether a prompt can be prefilled now."""
        return self._next_prompt() is not None

    def decoding(self) -> list[RequestState]:
        """The requests in phase DECODE."""
        return [state for state in self.running if state.phase is Phase.DECODE]

    def next_prefill(self) -> Iterator[PrefillChunk]:
        """The chunks of the next step, which the caller must execute in this order.

        A request whose last chunk is among them is in phase DECODE afterwards.
        """
        budget = self._budget()
        while budget > 0 and (state := self._next_prompt()):
            first = state.phase is Phase.WAITING
            source = self._admit(state) if first else None
            start = state.num_computed
            end = min(start + min(self.chunk, budget), state.prompt_length)
            chunk = PrefillChunk(state, start, end, first, source)
            state.num_computed = end
            if chunk.is_last:
                self.slots.hold(state.slot, state.request.prompt_ids)
                decodes = state.request.max_new_tokens > 1  # prefill returns the first token
                state.phase = Phase.DECODE if decodes else Phase.PREFILL
            yield chunk
            # A short chunk takes longer than its share of a long one.
            budget -= max(end - start, self.chunk // MOST_CHUNKS)

    def _budget(self) -> int:
        """Prompt tokens that a step may prefill."""
        room = min(len(self.waiting), self.num_slots - len(self.running))
        prompts = room + sum(state.num_computed < state.prompt_length for state in self.running)
        share = prompts // max(1, len(self.decoding()))
        return self.chunk * min(max(1, share), MOST_CHUNKS)

    def _next_prompt(self) -> RequestState | None:
        """The oldest request whose prompt is incomplete, if it has or can get a slot."""
        begun = (state for state in self.running if state.num_computed < state.prompt_length)
        may_begin = self.waiting and len(self.running) < self.num_slots
        return next(begun, self.waiting[0] if may_begin else None)

    def _admit(self, state: RequestState) -> int | None:
        """Assigns a slot to the oldest waiting request; returns the slot to copy a prefix from.

        A waiting request needs no matcher of its grammar.
        """
        self.waiting.popleft()
        request = state.request
        self.slots.written = {each.slot: each.length for each in self.running}
        found = self.slots.assign(request.prompt_ids, may_reuse=not request.prompt_logprobs)
        state.row = request.grammar.row() if request.grammar else state.row
        state.slot, state.phase = found.slot, Phase.PREFILL
        state.num_computed = state.num_cached = found.num_cached
        self.running.append(state)
        return found.source if found.source != found.slot else None
