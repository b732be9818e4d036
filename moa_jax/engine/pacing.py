"""Chooses the program of an engine's next decode call: draft shape, bucket, number of rounds.

costs of compiled programs     plain in 4 rows 5.1 ms, chain of 3 in 8 rows 9.0 ms
DraftController.next           chain of 3, 8 rounds
missing                        chain of 3 in 4 rows: faster, and not compiled yet
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moa_jax.config import DraftShape
from moa_jax.engine.batch import DecodeCall, RowOutput
from moa_jax.engine.device_ops import MOST_ROUNDS
from moa_jax.engine.program_cache import GREEDY, LOGPROBS, ProgramCache, ProgramName
from moa_jax.engine.requests import RequestState
from moa_jax.speculation.controller import DraftController
from moa_jax.speculation.cost_table import CostTable

# Rounds of a call while a prompt is in prefill: about half the time of a chunk. A chunk is bound by
# compute, and takes at least as long as a few rounds on every device.
ROUNDS_BESIDE_PREFILL = 2
SLOW_STAND_IN = 1.3  # a stand-in is logged from this multiple of the missing program's time


class Choice(NamedTuple):
    """The program and the rounds of a decode call."""

    name: ProgramName
    rounds: int
    costs: Mapping[DraftShape, float]  # milliseconds by which the shape was chosen, if known
    missing: list[ProgramName]  # programs that this batch would use if they were compiled

    @property
    def shape(self) -> DraftShape:
        """The draft shape."""
        return self.name[2]

    def until(self, tokens: int) -> Choice:
        """The call with at most `tokens` rounds, since a round commits at least one token."""
        return self._replace(rounds=max(1, min(self.rounds, tokens)))


class Pacing:
    """The draft controller of an engine, the cost table, and the compiled programs."""

    def __init__(
        self, controller: DraftController | None, costs: CostTable | None, programs: ProgramCache
    ) -> None:
        self._controller, self.costs, self._programs = controller, costs, programs
        self.catch_up_ms = 0.0  # per token
        self._slow: set[ProgramName] = set()  # programs whose slow stand-in is logged already

    def choose(self, states: Sequence[RequestState], kind: int, hurries: bool) -> Choice:
        """The next call for these requests; with `hurries` a short one, beside prefill."""
        batch = self._programs.bucket(len(states))
        length = longest(states)
        shape, rounds, costs = self._programs.own_shape(batch), MOST_ROUNDS, {}
        fastest = shape
        if self._controller is not None and kind != LOGPROBS:
            served = {}
            for each in self._programs.shapes(batch):
                if name := self._programs.decode_name(len(states), each, kind):
                    served[each] = self.costs.ms(name[1], each, length)
            costs = {each: ms for each, ms in served.items() if ms}
            if costs:
                shape, rounds = self._controller.next(costs, self._lag_ms(states))
                fastest = self._fastest(batch, length)
        if kind == LOGPROBS:
            shape = fastest = self._programs.plainest
        name = self._programs.decode_name(len(states), shape, kind)
        wanted = dict.fromkeys(("decode", batch, each, kind) for each in (shape, fastest))
        missing = [each for each in wanted if not self._programs.has(each)]
        if name != ("decode", batch, shape, kind):
            self._log_slow(("decode", batch, shape, kind), name, length)
        rounds = min(rounds, ROUNDS_BESIDE_PREFILL if hurries else MOST_ROUNDS)
        return Choice(name, rounds, costs, missing)

    def record(
        self, call: DecodeCall, outputs: Sequence[RowOutput], num_rounds: int, seconds: float
    ) -> None:
        """Records the accepted drafts of a call, and the time of a round if the call was clean."""
        if self._controller is None or not num_rounds:
            return
        accepted = []
        for output in outputs:  # a stop or the limit may truncate the last round of a row
            whole = output.rounds[: len(output.rounds) - output.is_done]
            accepted += [committed - 1 for committed, _ in whole]
        if call.costs:
            self._controller.observe(
                call.costs, call.shape, accepted, num_rounds, batch=len(call.states)
            )
        if call.is_clean:
            ms = 1e3 * seconds / num_rounds
            self.costs.update(call.batch, call.shape, call.length, ms)

    # ---- costs ----

    def cells(self) -> Iterator[tuple[ProgramName, int]]:
        """Yields compiled programs and cache lengths without a cost."""
        if self._controller is None:
            return
        for batch in self._programs.buckets:
            for shape in self._programs.shapes(batch):
                name = self._program_of(batch, shape)
                for length in self.lengths():
                    if name and not self.costs.has(batch, shape, length):
                        yield name, length

    def lengths(self) -> tuple[int, int]:
        """Cache lengths at which costs are measured."""
        rows = self._programs.num_rows
        return rows // 8, rows * 3 // 4

    def _program_of(self, batch: int, shape: DraftShape) -> ProgramName | None:
        names = (("decode", batch, shape, kind) for kind in range(GREEDY, LOGPROBS))
        return next(filter(self._programs.has, names), None)

    def _lag_ms(self, states: Sequence[RequestState]) -> float:
        return self.catch_up_ms * sum(state.num_unread for state in states)

    def _fastest(self, batch: int, length: int) -> DraftShape:
        """The shape with the most expected tokens per millisecond, compiled or not."""
        tokens = self._controller.acceptance.tokens
        known = {}
        for shape in self._programs.shapes(batch):
            if ms := self.costs.ms(batch, shape, length):
                known[shape] = tokens(shape) / ms
        return max(known, key=known.__getitem__, default=self._programs.own_shape(batch))

    def _log_slow(self, wanted: ProgramName, stand_in: ProgramName, length: int) -> None:
        """Logs a slow stand-in, once per missing program."""
        if self._controller is None or wanted in self._slow:
            return
        shape = wanted[2]
        known = {batch: self.costs.ms(batch, shape, length) for batch in self._programs.buckets}
        known = {batch: ms for batch, ms in known.items() if ms}
        if stand_in[1] not in known:
            return
        expected = np.interp(wanted[1], list(known), list(known.values()))
        if (ratio := known[stand_in[1]] / expected) > SLOW_STAND_IN:
            self._slow.add(wanted)
            logging.getLogger(__name__).warning(
                "%d requests decode in the program of %d, about %.1f times slower than their own, "
                "which is not compiled yet",
                *(wanted[1], stand_in[1], ratio),
            )


def longest(states: Sequence[RequestState]) -> int:
    """Tokens of the longest sequence, without those of calls in flight."""
    return max(state.prompt_length + len(state.answer) for state in states)
