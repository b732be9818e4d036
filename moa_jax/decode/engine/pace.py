"""How an engine decodes on: in which way, and how many rounds before it looks up again.

Costs come from a table where it knows the batch, until the engine's own calls have told them of
every way. While nobody is there, calls for nobody tell them. Where neither the table nor they know
all, a way that has no figure yet gets a call now and then, and so does one with an old figure
where such figures decide. What it drafts does not matter then: its drafter need not have read.
Such figures belong to a program, so to slots, rows and kind of settings, and none is written to the
table, which holds what was measured on a machine at rest. Until a size has its figures those of the
nearest batch stand in, and before there are any the first way of such a batch is taken.

What counts is how many plain rounds one that drafts takes. Single figures were found to be twice
what they should be; and where the calls of one way alone tell how fast the machine is, its figure
agrees with itself. But states of as many slots have about the same ratio, however many rows they
have. So the median of theirs is taken for each:

    rows     plain   chain   ratio   is taken as
    256      2.9     11.1    3.8     1.8            ms of 4 slots and a chain of 3, as a server
    512      4.2     7.6     1.8     1.8            once believed them; its calls took about twice
    1024     5.4     8.2     1.5     1.8            what plain ones did with each number of rows

A machine is now faster, now slower, for all programs alike. So figures are of the machine as it was
when they began, and how many times as long calls of whatever program take now is known apart: else
a way in use would lose to one that was timed on a better day.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from moa_jax.config import DraftShape
from moa_jax.decode.auto import FIRST_WAIT, LAST_WAIT, PLAIN, USUAL, Chooser, ShapeChoice, Terms
from moa_jax.decode.costs import Costs, priced_as
from moa_jax.decode.engine.rows import MOST_ROUNDS

# Means hide that those whose drafts are refused wait for the rest. No round's time has what the
# drafter reads of each text that comes. And before drafting begins it reads what all have, prompts
# and answers: so it takes a larger gain to begin than to go on. A probe has it read as much, of all
# of them: so the more they are, the rarer are probes; and long enough that chance seldom starts one
# in vain. A change is found late.
TOGETHER = Terms(gain=1.35, gain_to_go_on=1.25, gain_of_probe=1.4, least_probe=8)
FIRST_WAIT_OF_EACH = 8 * FIRST_WAIT  # rounds between probes of several, for each slot
LAST_WAIT_OF_EACH = 4 * LAST_WAIT
LONGEST_S = 0.05  # of a call, so that news come often
CALLS_BETWEEN_TRIALS = 4
# Of a trial's call, which has two rounds at least: in a short one it counts much when it was heard
SECONDS_OF_A_TRIAL, LEAST_OF_A_TRIAL = 0.02, 2
LEAST_MEASURED, SURE = 2, 4  # calls before a figure counts, and before it is not tried soon again
# Calls after which a figure is tried again, for the machine may have been busy: first and most
FIRST_OLD, OLD = 32, 256
MOST_LATEST, LOW = 17, 0.25  # calls that make a figure, and the share of them that took no longer
STILL_COUNT = 2  # of an old figure's calls
DOUBT = 1.5  # times as long as it takes, that a figure may say after a busy time
CANNOT_WIN = 8  # times as old that a figure becomes which would change no choice even so
LATEST_TIMES = 9  # calls that tell how fast the machine is now
RETURNING = 0.99  # a power: below 1, what was learned of the machine fades


class TypicalSeconds:
    """Seconds of the last calls: what a quarter of them took at most.

    The first call is left out, for a device prepares then. Whatever else a machine does makes calls
    longer. But where the host wakes up late to hear of a call, which it does on a CPU that is busy
    with the next one, that one looks shorter: the shortest of all may be no time that a call takes.
    """

    def __init__(self) -> None:
        self.count, self.typical, self.middle, self.last = -1, 0.0, 0.0, 0
        self._latest: deque[float] = deque(maxlen=MOST_LATEST)

    def add(self, seconds: float, now: int = 0) -> None:
        """Takes a measurement at a time that is counted in calls."""
        self.count += 1
        while self.is_old(now) and len(self._latest) > STILL_COUNT:
            self._latest.popleft()
        if self.count:
            self._latest.append(seconds)
            self.typical = sorted(self._latest)[int(LOW * (len(self._latest) - 1))]
            self.middle = statistics.median(self._latest)
        self.last = now

    def is_old(self, now: int, times: int = 1) -> bool:
        """Whether it should be measured again: the sooner, the fewer calls it rests on."""
        return self.count < SURE or now - self.last > times * min(FIRST_OLD * self.count, OLD)


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
        self._ms_of_batch: dict[int, dict[DraftShape, float]] = {}  # beside the last plain figure
        # Of rounds of plain decoding, by batch and the program of those in such a state
        self._beside_plain: dict[int, dict[Any, dict[DraftShape, float]]] = {}
        self._round_s: dict[Any, TypicalSeconds] = {}  # by program, on the machine as it was
        self._times = deque([1.0], maxlen=LATEST_TIMES)  # how many times that each last call took
        self._chunk_s = TypicalSeconds()
        self._choices: Counter[Any] = Counter()  # by program: how often it could be chosen
        self._num_calls, self._last_looked = 0, 0  # for old figures
        self._tried: DraftShape | None = None  # the way of a trial
        self.is_trying = False  # whether the last choice is a trial

    def choose(
        self,
        batch: int,
        programs: Mapping[DraftShape, Any],
        hurry: bool,
        can_try: bool = True,
        under_way: ShapeChoice | None = None,
        unread: int = 0,
    ) -> tuple[Any, int]:
        """The program of the next call, and its rounds; a few in a `hurry`: somebody is read.

        Nothing is tried unless it `can_try`: of a call beside a compiler, or behind something else
        than a call, nothing is learned. What is `under_way` was sent, and is heard after this
        choice. Of each of the `batch` the drafter reads as many as `unread` tokens before a probe.
        """
        self._num_calls, self.is_trying = self._num_calls + 1, False
        self._choices.update(programs.values())
        terms = _terms(batch, unread)
        way, rounds = self._way(batch, programs, can_try and not hurry, under_way, terms)
        program = programs[way]
        measured = self._round_s.get(program)
        if measured is not None and measured.count > 0:
            most = self._chunk_s.typical if hurry else LONGEST_S
            rounds = min(rounds, max(1, int(most / self._expected(measured))))
        elif hurry:
            rounds = 1
        return program, min(rounds, MOST_ROUNDS)

    def unsure(self, programs: Mapping[Any, DraftShape]) -> Any | None:
        """The first program without a sure figure, which a choice of its way would want."""
        if self._chooser is None:
            return None
        wanted = (each for each, way in programs.items() if priced_as(way) is not None)
        sure = {each for each, figure in self._round_s.items() if figure.count >= SURE}
        return next((each for each in wanted if each not in sure), None)

    def took(self, program: Any, rounds: int, seconds: float) -> None:
        """Hears how long a call took that had the device for itself."""
        if not rounds:
            return
        figure = self._round_s.setdefault(program, TypicalSeconds())
        if figure.count > 0:
            self._times.append(seconds / rounds / figure.middle)
        figure.add(seconds / rounds / self._slowness, self._choices[program])

    @property
    def _slowness(self) -> float:
        """How many times as long all programs take as they did.

        It returns to 1 within some thousand calls, for nothing else would hold it: figures are made
        of what calls took, divided by it. After a great change a way that is seldom called looks a
        little faster meanwhile, as figures in use follow the machine and its own waits for a trial.
        """
        return statistics.median(self._times) ** RETURNING

    def took_with_chunk(self, program: Any, rounds: int, seconds: float) -> None:
        """Hears how long a call and a chunk took together."""
        measured = self._round_s.get(program)
        if measured is None or measured.count < 1:
            return
        if (left := seconds - rounds * self._expected(measured)) > 0:
            self._chunk_s.add(left)

    def begins(self, tokens: int) -> None:
        """A text of so many tokens begins where nobody else is decoded."""
        if self._chooser is not None:
            self._chooser.begins(tokens)

    def would_draft(self, batch: int) -> bool:
        """Whether so many would be drafted for if all ways could be taken, as far as is known."""
        costs = self._costs_of(batch)
        if self._chooser is None or not costs:
            return self._first(batch).num_drafted > 0
        way = self._chooser.fastest(costs, self._chooser.ways, _terms(batch))
        return way.num_drafted > 0

    def joins(self, tokens: int, others: int) -> None:
        """A text of so many tokens begins beside so many others."""
        if self._chooser is not None:
            self._chooser.joins(tokens, others)

    def _costs_of(self, batch: int) -> Mapping[DraftShape, float]:
        """Milliseconds of rounds of some ways, by calls in states of whatever rows."""
        own, table = self._ms_of_batch.get(batch, {}), self._table(batch)
        return own if own.keys() >= table.keys() else table

    def _table(self, batch: int) -> Mapping[DraftShape, float]:
        return self._costs.for_batch(batch) if self._costs else {}

    def heard(self, way: DraftShape, accepted: list[int], rounds: int) -> None:
        """Hears how many drafted tokens each row's rounds accepted, but for those that were cut."""
        if self._chooser is not None:
            self._chooser.heard(way, accepted, rounds)

    def _way(
        self,
        batch: int,
        programs: Mapping[DraftShape, Any],
        alone: bool,
        under_way: ShapeChoice | None,
        terms: Terms,
    ) -> tuple[DraftShape, int]:
        first = self._first(batch)
        if self._chooser is None:
            return first, MOST_ROUNDS
        priced = {way: shape for way in programs if (shape := priced_as(way)) is not None}
        own = {shape: ms for way, shape in priced.items() if (ms := self._ms(programs[way]))}
        own = self._agreed(batch, programs.get(PLAIN), own)
        table = self._table(batch)
        untried = [way for way in priced if self._ms(programs[way]) is None]
        # A call beside a chunk has no time of its own. The table's figures do not age, ours do.
        is_time = alone and self._num_calls - self._last_looked > CALLS_BETWEEN_TRIALS
        if is_time and not (untried and table.keys() >= set(priced.values())):
            if due := untried or self._old(programs, own, terms):
                way = self._on_trial(due)
                return way, self._rounds_of_a_trial(programs[way])
            self._last_looked = self._num_calls
        if not untried:
            table = own
        elif not table.keys() & set(priced.values()):
            table = self._nearest(batch, set(priced.values())) or own
            if priced.get(first) not in table and first in programs:
                return first, MOST_ROUNDS
        return self._chooser.next(table, programs, terms, under_way)

    def _agreed(
        self, batch: int, plain: Any, own: Mapping[DraftShape, float]
    ) -> Mapping[DraftShape, float]:
        """A state's milliseconds, of drafting by the median of the batch's ratios to plain rounds.

        How many rows they have changes such a ratio little; but single figures were found to be
        twice what they should be.
        """
        if base := own.get(PLAIN):
            beside = self._beside_plain.setdefault(batch, {})
            beside.setdefault(plain, {}).update({shape: ms / base for shape, ms in own.items()})
            ratios = lambda shape: [each[shape] for each in beside.values() if shape in each]
            shapes = dict.fromkeys(itertools.chain(*beside.values()))
            agreed = {shape: base * statistics.median(ratios(shape)) for shape in shapes}
            self._ms_of_batch[batch] = agreed
            own = {shape: agreed[shape] for shape in own}
        return own

    def _old(
        self, programs: Mapping[DraftShape, Any], costs: Mapping[DraftShape, float], terms: Terms
    ) -> list[DraftShape]:
        """Ways whose figures should be taken again, where that can change what is chosen."""
        figures = {way: self._round_s[programs[way]] for way in programs if priced_as(way)}
        ages = {way: self._choices[programs[way]] for way in figures}
        old = [way for way, figure in figures.items() if figure.is_old(ages[way])]
        if not old:
            return []
        could = self._chooser.contenders(costs, programs, terms, DOUBT)
        return [way for way in old if way in could or figures[way].is_old(ages[way], CANNOT_WIN)]

    def _on_trial(self, due: Sequence[DraftShape]) -> DraftShape:
        """The way of this call, which is a trial."""
        others = [way for way in due if way != self._tried]  # its calls may have told nothing
        self._tried, self._last_looked = (others or due)[0], self._num_calls
        self.is_trying = True
        return self._tried

    def _rounds_of_a_trial(self, program: Any) -> int:
        """As many as take some time, where it is known what they take."""
        if (ms := self._ms(program)) is None:
            return LEAST_OF_A_TRIAL
        return max(LEAST_OF_A_TRIAL, int(1e3 * SECONDS_OF_A_TRIAL / (ms * self._slowness)))

    def _expected(self, figure: TypicalSeconds) -> float:
        """Seconds, on the machine as it is now."""
        return figure.typical * self._slowness

    def _nearest(self, batch: int, shapes: Set[DraftShape]) -> Mapping[DraftShape, float]:
        """The figures of the nearest batch that has them of all these shapes."""
        found = [each for each, ms in self._ms_of_batch.items() if ms.keys() >= shapes]
        nearest = min(found, key=lambda each: abs(math.log(each / batch)), default=None)
        return {} if nearest is None else self._ms_of_batch[nearest]

    def _ms(self, program: Any) -> float | None:
        measured = self._round_s.get(program)
        known = measured is not None and measured.count >= LEAST_MEASURED
        return 1e3 * measured.typical if known else None


def _terms(batch: int, unread: int = 0) -> Terms:
    if batch == 1:
        return USUAL._replace(unread=unread)
    waits = {"first_wait": batch * FIRST_WAIT_OF_EACH, "most_wait": batch * LAST_WAIT_OF_EACH}
    return TOGETHER._replace(unread=unread, rows=batch, **waits)
