"""Chooses the program of an engine's next decode call: draft shape, bucket, number of rounds.

costs of compiled programs     plain in 4 rows 5.1 ms, chain of 3 in 8 rows 9.0 ms
DraftController.next           chain of 3, 8 rounds
missing                        chain of 3 in 4 rows: faster, and not compiled yet

A new program without masks has dummy runs on free slots, one between two steps. The first one
loads the program, and the median of the others is its cost:

step | chain of 3, one token | step | chain of 3, full cache | step | chain of 3, one token | ...
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode.programs import bucket_for
from moa_jax.engine.batch import Choice, DecodeCall, RowOutput
from moa_jax.engine.program_cache import GREEDY, LOGPROBS, ProgramCache, ProgramName
from moa_jax.engine.requests import RequestState
from moa_jax.speculation.calibrate import TURNS
from moa_jax.speculation.controller import ROUNDS
from moa_jax.speculation.cost_table import CostTable

# Rounds of a call while a prompt is in prefill: about half the time of a chunk. A chunk is bound by
# compute: 512 tokens of an 8B model take an H100 some 20 ms, and a round takes 5 ms.
ROUNDS_BESIDE_PREFILL = 2


class Pacing:
    """The draft controller of an engine, the cost table, and the dummy runs of new programs."""

    def __init__(self, programs: ProgramCache, on_calibrated: Callable[[CostTable], None]) -> None:
        self._programs, session = programs, programs.session
        self._controller, self.costs = session.controller, session.costs
        self._on_calibrated = on_calibrated
        self._catch_up_ms = {0: 0.0}  # by number of tokens
        self.dummy_runs: deque[tuple[ProgramName, int]] = deque()  # programs and cache lengths
        self._seconds: dict[ProgramName, dict[int, list[float]]] = {}  # of dummy runs, by length
        self._stood_in: set[int] = set()  # batches whose stand-in is logged
        self._planned: list[DraftShape] = []  # of the next masked calls, one round each

    def choose(self, states: Sequence[RequestState], most_rounds: int = ROUNDS) -> Choice:
        """The next call for these requests."""
        programs, count = self._programs, len(states)
        length = max(state.length for state in states)
        kind, batch = max(state.kind for state in states), bucket_for(programs.buckets, count)
        shape, rounds, costs = programs.plainest, most_rounds, {}
        masked = any(state.row.matcher is not None for state in states)
        if self._controller is not None and kind != LOGPROBS:
            for each in programs.shapes(batch):
                name = programs.decode_name(count, each, kind, masked)
                if name and (ms := self.costs.ms(name.size, each, length)):
                    costs[each] = ms
            if shape in costs:
                times = self._catch_up_ms
                ms_of = lambda lags: float(np.interp(lags, [*times], [*times.values()]).sum())
                lag_ms = ms_of([state.num_plain for state in states])
                left = sum(state.request.max_new_tokens - len(state.answer) for state in states)
                prompts_ms = ms_of([state.num_prompt for state in states])
                if not (masked and self._planned and self._planned[0] in costs):
                    shape, rounds = self._controller.next(costs, lag_ms, prompts_ms, left / count)
                    # The first masked call of a shape has no drafts to verify, and proposes them.
                    self._planned = [shape] * (min(rounds, ROUNDS) + (shape != programs.plainest))
                shape = self._planned.pop()
                # As long as a plain call, so that drafts delay no request that arrives.
                most_rounds = max(1, int(most_rounds * costs[programs.plainest] / costs[shape]))
            else:  # drafts are judged by plain decoding
                costs = {}
        name = programs.decode_name(count, shape, kind, masked)
        if name.size > batch and kind != LOGPROBS and batch not in self._stood_in:
            self._stood_in.add(batch)
            line = "a batch of %d decodes in the program of %d until its own is compiled"
            logging.getLogger(__name__).warning(line, batch, name.size)
        timed = [each for each in programs.shapes(batch) if self.costs.ms(batch, each, length)]
        wanted = dict.fromkeys((shape, programs.plainest, *timed))
        own = [ProgramName("decode", batch, each, kind, masked) for each in wanted]
        # Few requests have log-probabilities: only for one row and for all slots, when idle.
        missing = [each for each in own if each not in programs.ready and kind != LOGPROBS]
        return Choice(name, 1 if masked else min(rounds, most_rounds), costs, missing)

    def record(self, call: DecodeCall, outputs: Sequence[RowOutput], seconds: float) -> None:
        """Records the accepted drafts of a call, and the time of a round if the call was clean."""
        num_rounds = max(len(row.output.rounds) for row in outputs)
        choice, (_, batch, shape, *_, masked) = call.choice, call.choice.name
        if not choice.costs or not num_rounds:
            return
        # A stop or the limit may truncate the last round of a row.
        whole = [row.output.rounds[: len(row.output.rounds) - row.is_done] for row in outputs]
        # A row without drafts in a masked call shows nothing.
        accepted = [new - 1 for rounds in whole for new, drafts in rounds if drafts or not masked]
        round_ms = 1e3 * seconds / num_rounds if call.is_clean else None
        rows = sum(bool(row.output.rounds) for row in outputs)
        self._controller.observe(choice.costs, shape, accepted, num_rounds, rows, round_ms)
        if round_ms:
            self.costs.update(batch, shape, max(each.length for each in call.states), round_ms)

    def add_dummy_runs(self, names: Iterable[ProgramName]) -> None:
        """Schedules dummy runs of new programs; those of all programs and lengths alternate."""
        timed: list[tuple[ProgramName, int]] = []
        for name in names:
            lengths = self._untimed(name)
            timed += [(name, length) for length in lengths]
            if not (lengths or name.masked or name.kind in ("empty", "copy", "verify")):
                self.dummy_runs.append((name, 1))
        self.dummy_runs += (1 + TURNS) * timed

    def record_dummy_run(self, name: ProgramName, length: int, seconds: float) -> None:
        """Records the time of a round or pass, and the costs after the program's last dummy run.

        Until then the program has no cost: the cost of one length would count for all lengths.
        """
        times = self._seconds.setdefault(name, {})
        times.setdefault(length, []).append(seconds)
        if len(times[length]) <= TURNS or any(each == name for each, _ in self.dummy_runs):
            return
        for at, measured in times.items():
            ms = 1e3 * statistics.median(measured[1:])
            if name.kind == "catch_up":
                self._catch_up_ms[at] = ms
            else:
                self.costs.put(name.size, name.shape, at, ms)
                self._on_calibrated(self.costs)

    def lengths(self) -> tuple[int, int]:
        """Cache lengths at which rounds are timed: the ends, since a cost grows linearly.

        On a CPU it grows in steps of 256 rows, which are alike for all shapes of a batch.
        """
        session = self._programs.session
        timed = ROUNDS * max(shape.levels for shape in session.ways)
        return 1, max(1, self._programs.num_rows - session.room.draft_rows - timed)

    def _untimed(self, name: ProgramName) -> list[int]:
        """Cache lengths at which a program is to be timed; all kinds of rows have one cost.

        Those of `catch_up` are lags, which do not grow beyond `StaticConfig.lag_limit`.
        """
        if self._controller is None or name.kind not in ("catch_up", "decode"):
            return []
        if name.kind == "catch_up":
            return [min(at, self._programs.session.setup.lag_limit or at) for at in self.lengths()]
        greedy = name._replace(rows=GREEDY)
        is_timed = name == greedy or greedy not in self._programs.ready
        if name.rows == LOGPROBS or name.masked or not is_timed:
            return []
        return [at for at in self.lengths() if not self.costs.has(name.size, name.shape, at)]
