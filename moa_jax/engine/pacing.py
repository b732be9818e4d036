"""Chooses the program of an engine's next decode call: draft shape, bucket, number of rounds.

costs of compiled programs     plain in 4 rows 5.1 ms, chain of 3 in 8 rows 9.0 ms
DraftController.next           chain of 3, 8 rounds
missing                        chain of 3 in 4 rows: faster, and not compiled yet
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
        programs, count = self._programs, len(states)
        batch, length = programs.bucket(count), longest(states)
        shape, rounds, costs = programs.own_shape(batch), MOST_ROUNDS, {}
        wanted = [shape]
        if kind == LOGPROBS:  # few ask for these: plain rounds, of one row or of all slots
            shape, wanted = programs.plainest, [programs.plainest] if count == 1 else []
        elif self._controller is not None:
            names = {
                each: programs.decode_name(count, each, kind) for each in programs.shapes(batch)
            }
            known = {each: self._ms(name[1], each, length) for each, name in names.items() if name}
            costs = {each: ms for each, ms in known.items() if ms}
            if programs.plainest in costs:
                shape, rounds = self._controller.next(costs, self._lag_ms(states))
                wanted = [shape, self._fastest(batch, length), programs.plainest]
            else:  # drafts are judged by it
                costs = {}
        name = programs.decode_name(count, shape, kind)
        own = [("decode", batch, each, kind) for each in dict.fromkeys(wanted)]
        if name[1] > batch:
            self._log_stand_in(("decode", batch, shape, kind), name, length)
        rounds = min(rounds, ROUNDS_BESIDE_PREFILL if hurries else MOST_ROUNDS)
        return Choice(name, rounds, costs, [each for each in own if not programs.has(each)])

    def record(
        self, call: DecodeCall, outputs: Sequence[RowOutput], num_rounds: int, seconds: float
    ) -> None:
        """Records the accepted drafts of a call, and the time of a round if the call was clean."""
        if not call.costs or not num_rounds:
            return
        accepted = []
        for output in outputs:  # a stop or the limit may truncate the last round of a row
            whole = output.rounds[: len(output.rounds) - output.is_done]
            accepted += [committed - 1 for committed, _ in whole]
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
        """Of tokens of plain rounds: those of prompts are no loss that drafting could avoid."""
        return self.catch_up_ms * sum(state.num_plain for state in states)

    def _ms(self, batch: int, shape: DraftShape, length: int) -> float | None:
        """The cost of a bucket; until it is measured that of a larger one, which is no less."""
        larger = (each for each in self._programs.buckets if each >= batch)
        known = (self.costs.ms(each, shape, length) for each in larger)
        return next(filter(None, known), None)

    def _fastest(self, batch: int, length: int) -> DraftShape:
        """The shape with the most expected tokens per millisecond, compiled or not."""
        tokens = self._controller.acceptance.tokens
        known = {}
        for shape in self._programs.shapes(batch):
            if ms := self.costs.ms(batch, shape, length):
                known[shape] = tokens(shape) / ms
        return max(known, key=known.__getitem__, default=self._programs.own_shape(batch))

    def _log_stand_in(self, wanted: ProgramName, stand_in: ProgramName, length: int) -> None:
        """Logs a larger bucket, unless it is known to be fast, once per missing program."""
        own, other = (self.costs.ms(name[1], name[2], length) for name in (wanted, stand_in))
        if wanted in self._slow or (own and other and other <= SLOW_STAND_IN * own):
            return
        self._slow.add(wanted)
        by = f"about {other / own:.1f} times" if own and other else "perhaps"
        line = "a batch of %d decodes in the program of %d until its own is compiled, %s slower"
        logging.getLogger(__name__).warning(line, wanted[1], stand_in[1], by)


def longest(states: Sequence[RequestState]) -> int:
    """Tokens of the longest sequence, without those of calls in flight."""
    return max(state.prompt_length + len(state.answer) for state in states)
