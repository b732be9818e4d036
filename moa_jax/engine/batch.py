"""The device side of an engine: its one state, and the calls that work on it.

    host      prefill, decode ->  | state 1 | ->  | state 2 | ->  ...   each call updates the state
                                     |               |
    host            reports     <----'---------------'      read while the next call runs

Calls return at once; reading a report waits for its call.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode.row_settings import joined
from moa_jax.decode.slots import Drafts, SlotState
from moa_jax.engine.device_ops import DecodeInput, DecodeReport, PrefillInput, PrefillReport
from moa_jax.engine.program_cache import GREEDY, ProgramCache, ProgramName
from moa_jax.engine.requests import RequestOutput, RequestState
from moa_jax.engine.scheduler import PrefillChunk
from moa_jax.grammar.masks import Draft, Row


class Choice(NamedTuple):
    """The program and the rounds of a decode call."""

    name: ProgramName
    rounds: int
    costs: Mapping[DraftShape, float]  # milliseconds by which the shape was chosen, if known
    missing: list[ProgramName]  # programs that this batch would use if they were compiled


@dataclasses.dataclass
class DecodeCall:
    """A decode call in flight."""

    choice: Choice
    states: list[RequestState]
    slots: list[int]  # of the rows, padding included
    report: DecodeReport
    sent_at: float
    is_clean: bool  # nothing else ran meanwhile: its time is a cost


class RowOutput(NamedTuple):
    """Output of a request in a decode call."""

    state: RequestState
    output: RequestOutput
    is_done: bool


class DecodeBatch:
    """The state of all slots on the device, and the calls that update it."""

    def __init__(self, programs: ProgramCache) -> None:
        self.programs, self._have_run = programs, set[ProgramName]()
        self._state: SlotState | None = None
        self._ahead: DecodeCall | None = None  # the masked call whose drafts have a pass

    def reset(self) -> None:
        """Allocates an empty state, after freeing the old one: memory is planned for one state."""
        self.drop()
        self._run(ProgramName("empty"))

    def drop(self) -> None:
        """Frees the state."""
        self._state = None

    def is_lost(self) -> bool:
        """Whether no state is allocated, or a failed call has consumed it."""
        leaves = jax.tree.leaves(self._state)
        return not leaves or any(leaf.is_deleted() for leaf in leaves)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of slot `source` to slot `target`."""
        self._run(ProgramName("copy"), *map(np.int32, (source, target, length)))

    def prefill(self, chunk: PrefillChunk) -> PrefillReport:
        """Sends a chunk of a prompt, and the copy of a prefix before it."""
        state, prompt = chunk.state, chunk.state.request.prompt_ids
        if chunk.copy_from is not None:
            self.copy(chunk.copy_from, state.slot, chunk.start)
        state.num_prompt += (chunk.end - chunk.start) * self.programs.session.catches_up
        programs, scores = self.programs, state.request.prompt_logprobs
        size = programs.chunks[-1] if scores else programs.chunk(chunk.end - chunk.start)
        begin = chunk.begin(size, programs.num_rows)
        tokens_1T = np.zeros((1, size + 1), np.int32)
        tokens = prompt[begin : min(begin + size, chunk.end) + 1]
        tokens_1T[0, : len(tokens)] = tokens
        slot_1, begin_1, count_1 = np.array([[state.slot], [begin], [chunk.end - begin]], np.int32)
        name = ProgramName("score" if scores else "prefill", size)
        return self._run(name, PrefillInput(slot_1, tokens_1T, begin_1, count_1, state.settings))

    def decode(self, states: list[RequestState], choice: Choice, slots: list[int]) -> DecodeCall:
        """Sends a decode call, and before it the drafter's pass over tokens that it lags behind.

        `slots` has all slots; the first ones that none of the requests has serve padding rows.
        """
        name, drafts = choice.name, choice.name.shape.num_drafted > 0
        # The first run of a program loads it, a masked call waits for masks, and a pass may run.
        is_clean = name in self._have_run and not name.masked and self._ahead is None
        late = [state for state in states if drafts and state.num_prompt + state.num_plain]
        for state in late:
            catch_up = ProgramName("catch_up", self.programs.chunks[-1])
            self._run(catch_up, np.array([state.slot], np.int32))
            state.num_prompt = state.num_plain = 0
        for state in states:
            state.num_plain += choice.rounds * (self.programs.session.catches_up and not drafts)
        served = {state.slot: state for state in states}
        slots = sorted(sorted(slots, key=lambda slot: slot not in served)[: name.size])
        # A request that the last call did not have was in prefill since, which drops the pass.
        if is_ahead := self._ahead is not None and self._ahead.choice.name == name:
            slots = self._ahead.slots
        slot_B, live_B = np.array(slots, np.int32), np.isin(slots, [*served])
        owners = [served.get(slot) for slot in slots]
        rows = [each.settings if each else self.programs.blank_row for each in owners]
        masks = self.programs.masks(name, [each.row if each else Row() for each in owners])
        sent_at = time.perf_counter()
        if name.masked and not is_ahead:
            self._run(name.verify(), Drafts(slot_B, masks.tree))
        joint = joined(rows, name.rows != GREEDY, masks.bitmask_BNW)
        report = self._run(name, DecodeInput(slot_B, live_B, joint, np.int32(choice.rounds)))
        return DecodeCall(choice, states, slots, report, sent_at, is_clean and not late)

    def verify(self, call: DecodeCall) -> None:
        """Sends the target's pass over the drafts of a masked call, before the call is read.

        Not on a mesh that splits slots: a report is whole on every device, and drafts are split.
        """
        name, slot_B = call.choice.name, np.array(call.slots, np.int32)
        if name.masked and not self.programs.splits_slots:
            self._run(name.verify(), Drafts(slot_B, call.report.drafted))
            self._ahead = call

    def read(self, call: DecodeCall) -> list[RowOutput]:
        """Waits for a decode call; returns its output per request."""
        report = jax.device_get(call.report)
        return [_output_of(state, call, report) for state in call.states]

    def dummy_run(self, name: ProgramName, length: int, slots: Sequence[int]) -> float:
        """Runs a program on free slots after `length` tokens, and empties the slots.

        A decode program runs twice, and the second call is timed: the first one pays for its launch
        and for caches of the CPU that other programs filled, and steps send a call while another
        runs. Returns the seconds of a round, or of the whole program.
        """
        for slot in slots:
            # Before it catches up, the drafter's cache has no tokens.
            self.copy(slot, slot, 0 if name.kind == "catch_up" else length)
            self.copy(slot, slot, length)
        jax.block_until_ready(self._state)
        arrays, begin = self.programs.example(name, slots), time.perf_counter()
        reports = [self._run(name, *arrays) for _ in range(1 + (name.kind == "decode"))]
        if name.kind == "decode":
            jax.block_until_ready(reports[0])
            begin = time.perf_counter()
        jax.block_until_ready((self._state, reports))
        seconds, one_round = time.perf_counter() - begin, np.ones((1, 2, 1))
        counts_B2R = jax.device_get(getattr(reports[-1], "counts_B2R", one_round))
        for slot in slots:  # padding rows of later calls read all tokens of their slots
            self.copy(slot, slot, 0)
        return seconds / int((counts_B2R[:, 0] > 0).sum(axis=1).max())

    def _run(self, name: ProgramName, *arrays: Any) -> Any:
        """Runs a program on the state; returns its report."""
        self._ahead = None
        self._state, report = self.programs.run(name, self._state, *arrays)
        self._have_run.add(name)
        return report


def _output_of(state: RequestState, call: DecodeCall, report: DecodeReport) -> RowOutput:
    row, shape = call.slots.index(state.slot), call.choice.name.shape
    rounds = [each for each in zip(*report.counts_B2R[row].tolist(), strict=True) if each[0]]
    count = sum(committed for committed, _ in rounds)
    found = state.logprobs_of(report.logprobs, row, count)
    state.row.draft = report.drafted and Draft(shape, *(each[row] for each in report.drafted[:2]))
    output = RequestOutput(report.tokens_BW[row, :count].tolist(), found, rounds=rounds)
    return RowOutput(state, output, bool(report.done_B[row]))
