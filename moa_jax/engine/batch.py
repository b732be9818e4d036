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
from typing import NamedTuple

import jax
import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode import logprobs
from moa_jax.decode.logprobs import LogProbs, TokenLogprob
from moa_jax.engine import device_ops
from moa_jax.engine.device_ops import MOST_ROUNDS, DecodeReport, PrefillReport, SlotState
from moa_jax.engine.program_cache import SAMPLED, ProgramCache, ProgramName
from moa_jax.engine.requests import RequestState
from moa_jax.engine.scheduler import PrefillChunk


@dataclasses.dataclass
class DecodeCall:
    """A decode call in flight."""

    name: ProgramName
    states: list[RequestState]
    rows: list[int]  # row of each request in the batch
    length: int  # `longest` of the requests
    report: DecodeReport
    sent_at: float
    costs: Mapping[DraftShape, float]  # milliseconds by which the shape was chosen
    is_clean: bool = False  # no prefill and no compilation ran meanwhile: its time is a cost

    @property
    def batch(self) -> int:
        """Rows, padding included."""
        return self.name[1]

    @property
    def shape(self) -> DraftShape:
        """The draft shape."""
        return self.name[2]


class RowOutput(NamedTuple):
    """Output of a request in a decode call."""

    state: RequestState
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    is_done: bool
    rounds: list[tuple[int, int]]  # tokens committed and drafted in each round


class DecodeBatch:
    """The state of all slots on the device, and the calls that update it."""

    def __init__(self, programs: ProgramCache) -> None:
        self.programs = programs
        self._state: SlotState | None = None
        self._settings: tuple[object, object] = (None, None)  # key and settings of the last call

    def reset(self) -> None:
        """Allocates an empty state, after freeing the old one: memory is planned for one state."""
        self._state = None
        self._state = self.programs.run(("empty",))

    def drop(self) -> None:
        """Frees the state."""
        self._state = None

    def is_lost(self) -> bool:
        """Whether no state is allocated, or a failed call has consumed it."""
        leaves = jax.tree.leaves(self._state)
        return not leaves or any(leaf.is_deleted() for leaf in leaves)

    # ---- prompts ----

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of slot `source` to slot `target`."""
        numbers = map(np.int32, (source, target, length))
        self._state = self.programs.run(("copy",), self._state, *numbers)

    def prefill(self, chunk: PrefillChunk) -> PrefillReport:
        """Sends a chunk of a prompt."""
        state, prompt = chunk.state, chunk.state.request.prompt_ids
        programs, scores = self.programs, state.request.prompt_logprobs
        size = programs.chunks[-1] if scores else programs.chunk(chunk.end - chunk.start)
        begin = chunk.begin(size, programs.num_rows)
        tokens_2T = np.zeros((2, 1, size), np.int32)
        for row_T, first in zip(tokens_2T[:, 0], (begin, begin + 1), strict=True):
            tokens = prompt[first : min(first + size, chunk.end + first - begin)]
            row_T[: len(tokens)] = tokens
        numbers = (np.array([each], np.int32) for each in (begin, chunk.end - begin))
        name = ("score" if scores else "prefill", size)
        slot_1, settings = np.array([state.slot], np.int32), state.settings
        self._state, report = programs.run(
            name, self._state, slot_1, device_ops.ChunkInput(*tokens_2T, *numbers), settings
        )
        return report

    def catch_up(self, state: RequestState) -> None:
        """Sends the drafter's pass over the tokens of a sequence that it has not processed."""
        slot_1 = np.array([state.slot], np.int32)
        self._state = self.programs.run(("catch_up",), self._state, slot_1)
        state.lags, state.num_plain = False, 0

    # ---- answers ----

    def decode(
        self,
        name: ProgramName,
        states: Sequence[RequestState],
        rounds: int,
        spare: Sequence[int],
        costs: Mapping[DraftShape, float],
    ) -> DecodeCall:
        """Sends a decode call; padding rows use the `spare` slots, which it leaves unchanged."""
        _, batch, _, kind = name
        slots = [state.slot for state in states] + list(spare)[: batch - len(states)]
        if self.programs.splits_slots:  # row i is slot i
            slots = sorted(slots)
        rows = [slots.index(state.slot) for state in states]
        live_B = np.zeros(batch, bool)
        live_B[rows] = True
        settings = self._settings_of(batch, kind, dict(zip(rows, states, strict=True)))
        arrays = (np.array(slots, np.int32), live_B, settings, np.int32(rounds))
        sent_at = time.perf_counter()
        self._state, report = self.programs.run(name, self._state, *arrays)
        length = max(state.prompt_length + len(state.answer) for state in states)
        return DecodeCall(name, list(states), rows, length, report, sent_at, costs)

    def read(self, call: DecodeCall) -> tuple[list[RowOutput], int]:
        """Waits for a decode call; returns its output per request, and the number of rounds."""
        report = jax.device_get(call.report)
        num_rounds = int((report.counts_B2R[:, 0] > 0).sum(axis=1).max())
        pairs = zip(call.states, call.rows, strict=True)
        return [_output_of(state, row, report) for state, row in pairs], num_rounds

    def warm_up(self, name: ProgramName, slots: Sequence[int]) -> None:
        """Runs a program once: the first run also loads it, which takes a CPU many rounds.

        `slots` must be free, and lose the tokens that they hold.
        """
        if name[0] == "decode":
            self.time_round(name, 1, slots)
        elif name[0] in ("prefill", "score"):
            tokens_1T, one = np.zeros((1, name[1]), np.int32), np.ones(1, np.int32)
            chunk = device_ops.ChunkInput(tokens_1T, tokens_1T, 0 * one, one)
            settings = self.programs.blank(1, SAMPLED)
            slot_1 = np.array(slots[:1], np.int32)
            self._state, _ = self.programs.run(name, self._state, slot_1, chunk, settings)

    def time_catch_up(self, slot: int) -> float:
        """Seconds in which a lagging drafter processes a token; the slot loses its tokens."""
        size = self.programs.chunks[-1]
        for _ in range(2):  # the first run also loads the program
            self.copy(slot, slot, 0)
            self.warm_up(("prefill", size), [slot])
            self.copy(slot, slot, size)
            jax.block_until_ready(self._state)
            begin = time.perf_counter()
            slot_1 = np.array([slot], np.int32)
            self._state = self.programs.run(("catch_up",), self._state, slot_1)
            jax.block_until_ready(self._state)
        return (time.perf_counter() - begin) / size

    def time_round(self, name: ProgramName, length: int, slots: Sequence[int]) -> float:
        """Seconds of a round of a compiled decode program at a cache length.

        `slots` must be free, and lose the tokens that they hold.
        """
        _, batch, _, kind = name
        for slot in slots[:batch]:
            self.copy(slot, slot, length)
        jax.block_until_ready(self._state)
        blank = self.programs.blank(batch, kind)
        blank = blank._replace(total_B=np.full(batch, self.programs.num_rows, np.int32))
        rounds = min(MOST_ROUNDS // 2, self.programs.num_rows - length - 1)
        arrays = (np.sort(np.array(slots[:batch], np.int32)), np.ones(batch, bool), blank)
        begin = time.perf_counter()
        self._state, report = self.programs.run(name, self._state, *arrays, np.int32(rounds))
        counts_B2R = jax.device_get(report.counts_B2R)
        seconds = time.perf_counter() - begin
        return seconds / max(1, int((counts_B2R[:, 0] > 0).sum(axis=1).max()))

    def _settings_of(
        self, batch: int, kind: int, states: dict[int, RequestState]
    ) -> device_ops.RowSettings:
        """The settings of a batch on the device; the same batch reuses those of its last call."""
        key = (batch, kind, tuple((row, state.id) for row, state in states.items()))
        if key != self._settings[0]:
            blank = self.programs.blank(1, SAMPLED)
            rows = [states[row].settings if row in states else blank for row in range(batch)]
            settings = device_ops.joined(rows, sampled=kind >= SAMPLED)
            self._settings = key, self.programs.put(settings)
        return self._settings[1]


def _output_of(state: RequestState, row: int, report: DecodeReport) -> RowOutput:
    count = int(report.count_B[row])
    committed_R, drafted_R = report.counts_B2R[row].tolist()
    return RowOutput(
        state,
        report.tokens_BW[row, :count].tolist(),
        token_logprobs(state, report.logprobs, row, count),
        bool(report.done_B[row]),
        [(n, k) for n, k in zip(committed_R, drafted_R, strict=True) if n],
    )


def token_logprobs(
    state: RequestState, found: LogProbs | None, row: int, count: int
) -> list[TokenLogprob]:
    """Log-probabilities of the first `count` new tokens, if the request has `top_logprobs`."""
    if not state.needs_logprobs:
        return []
    return logprobs.as_list(found, row, slice(count), state.request.top_logprobs)
