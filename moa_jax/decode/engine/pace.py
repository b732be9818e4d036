"""How an engine decodes on: in which way, and how many rounds before it looks up again.

Costs come from a table where it knows the batch, until the engine's own calls have told them of
every way. While nobody is there, calls for nobody tell them. Where neither the table nor they know
all, a way that has no figure yet gets two calls now and then, and so does one with an old figure
where such figures decide.
Such figures belong to a program, so to slots, rows and kind of settings, and none is written to the
table, which holds what was measured on a machine at rest. Until a size has its figures those of the
nearest batch stand in, and before there are any the first way of such a batch is taken.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Set
from typing import Any

from moa_jax.config import DraftShape
from moa_jax.decode.auto import Chooser
from moa_jax.decode.costs import Costs, priced_as
from moa_jax.decode.engine.rows import MOST_ROUNDS

# Of drafting where several sit: means hide that those whose drafts are refused wait for the rest.
LEAST_GAIN = 1.08
LONGEST_S = 0.05  # of a call, so that news come often
CALLS_BETWEEN_TRIALS = 4
CALLS_OF_A_TRIAL = 2  # since the first has no time of its own where the drafter catches up before
ROUNDS_OF_A_TRIAL = 2
LEAST_MEASURED = 2  # calls, before a figure counts
FEW_MEASURED = 4  # calls of which a figure is the least: one may have come beside something else
# Calls after which a figure is tried again, for the machine may have been busy: first and most
FIRST_OLD, OLD = 32, 256
NEW_SHARE, LARGE_SHARE = 0.1, 0.5  # of the last call in a figure
MOST_TIMES = 2.0  # a figure that a call counts as at most: one slow call must not change a choice


class MeanSeconds:
    """Seconds, of which the first are left out, for a device prepares then.

    Whatever else a machine does only adds to them, so that short ones tell more than long ones.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.last = -1, 0.0, 0

    def add(self, seconds: float, now: int = 0) -> None:
        """Takes a measurement at a time that is counted in calls."""
        self.count += 1
        tells_much = seconds < self.mean or now - self.last >= OLD
        share = LARGE_SHARE if tells_much else NEW_SHARE
        if self.count == 1:
            self.mean = seconds
        elif 1 < self.count <= FEW_MEASURED:
            self.mean = min(self.mean, seconds)
        elif self.count > FEW_MEASURED:
            self.mean += share * (min(seconds, MOST_TIMES * self.mean) - self.mean)
        self.last = now

    def is_old(self, now: int) -> bool:
        """Whether it should be measured again: the sooner, the fewer calls it rests on."""
        return now - self.last > min(FIRST_OLD * max(self.count, 1), OLD)


class Pace:
    """Ways and lengths of calls, and the seconds that they took."""

    def __init__(
        self,
        chooser: Chooser | None,
        costs: Costs | None,
        first: Callable[[int], DraftShape],
    ) -> None:
        """`first` says which way a batch takes for want of figures."""
        self._chooser, self._costs, self._first = chooser, costs, first
        self._ms_of_batch: dict[int, dict[DraftShape, float]] = {}  # of any program, the last
        self._round_s: dict[Any, MeanSeconds] = {}  # by program
        self._chunk_s = MeanSeconds()
        self._calls: Counter[int] = Counter()  # by batch: a figure ages while its batch is there
        self._num_calls, self._last_trial = 0, 0
        self._tried: DraftShape | None = None  # the way of a trial

    def choose(
        self, batch: int, programs: Mapping[DraftShape, Any], hurry: bool, at_rest: bool = True
    ) -> tuple[Any, int]:
        """The program of the next call, and its rounds; a few in a `hurry`: somebody is read.

        Nothing is tried where the machine is not `at_rest`, for nothing would be learned.
        """
        self._num_calls += 1
        self._calls[batch] += 1
        way, rounds = self._way(batch, programs, at_rest and not hurry)
        program = programs[way]
        measured = self._round_s.get(program)
        if measured is not None and measured.count > 0:
            most = self._chunk_s.mean if hurry else LONGEST_S
            rounds = min(rounds, max(1, int(most / measured.mean)))
        elif hurry:
            rounds = 1
        return program, min(rounds, MOST_ROUNDS)

    def unknown(self, programs: Mapping[Any, DraftShape]) -> Any | None:
        """The first program without a figure that a choice of its way would want."""
        if self._chooser is None:
            return None
        wanted = (each for each, way in programs.items() if priced_as(way) is not None)
        return next((each for each in wanted if self._ms(each) is None), None)

    def took(self, batch: int, program: Any, rounds: int, seconds: float) -> None:
        """Hears how long a call took that had the device for itself."""
        if rounds:
            now = self._calls[batch]
            self._round_s.setdefault(program, MeanSeconds()).add(seconds / rounds, now)

    def took_with_chunk(self, program: Any, rounds: int, seconds: float) -> None:
        """Hears how long a call and a chunk took together."""
        measured = self._round_s.get(program)
        if measured is None or measured.count < 1:
            return
        if (left := seconds - rounds * measured.mean) > 0:
            self._chunk_s.add(left)

    def heard(self, way: DraftShape, accepted: list[int], rounds: int) -> None:
        """Hears how many drafted tokens each row's rounds accepted, but for those that were cut."""
        if self._chooser is not None:
            self._chooser.heard(way, accepted, rounds)

    def _way(
        self, batch: int, programs: Mapping[DraftShape, Any], alone: bool
    ) -> tuple[DraftShape, int]:
        first = self._first(batch)
        if self._chooser is None:
            return first, MOST_ROUNDS
        priced = {way: shape for way in programs if (shape := priced_as(way)) is not None}
        own = {shape: ms for way, shape in priced.items() if (ms := self._ms(programs[way]))}
        self._ms_of_batch.setdefault(batch, {}).update(own)
        table = self._costs.for_batch(batch) if self._costs else {}
        untried = [way for way in priced if self._ms(programs[way]) is None]
        # A call beside a chunk has no time of its own. The table's figures do not age, ours do.
        if alone and not (untried and table.keys() >= set(priced.values())):
            now = self._calls[batch]
            due = untried or [way for way in priced if self._round_s[programs[way]].is_old(now)]
            if (way := self._on_trial(due, programs)) is not None:
                return way, ROUNDS_OF_A_TRIAL
        if not untried:
            table = own
        elif not table.keys() & set(priced.values()):
            table = self._nearest(batch, set(priced.values())) or own
            if priced.get(first) not in table and first in programs:
                return first, MOST_ROUNDS
        return self._chooser.next(table, programs, LEAST_GAIN if batch > 1 else 1.0)

    def _on_trial(
        self, due: list[DraftShape], programs: Mapping[DraftShape, Any]
    ) -> DraftShape | None:
        """The way of a trial that goes on or begins; None if this call is none."""
        since = self._num_calls - self._last_trial
        if since < CALLS_OF_A_TRIAL and self._tried in programs:
            return self._tried
        if not due or since <= CALLS_BETWEEN_TRIALS:
            return None
        self._tried, self._last_trial = due[0], self._num_calls
        return self._tried

    def _nearest(self, batch: int, shapes: Set[DraftShape]) -> Mapping[DraftShape, float]:
        """The figures of the nearest batch that has them of all these shapes."""
        found = [each for each, ms in self._ms_of_batch.items() if ms.keys() >= shapes]
        nearest = min(found, key=lambda each: abs(math.log(each / batch)), default=None)
        return {} if nearest is None else self._ms_of_batch[nearest]

    def _ms(self, program: Any) -> float | None:
        measured = self._round_s.get(program)
        known = measured is not None and measured.count >= LEAST_MEASURED
        return 1e3 * measured.mean if known else None
