"""Which draft comes next: the way that commits most tokens a millisecond, as far as is known.

    heard                              so far     what follows
    6 rounds that drafted 3 tokens     1: 6 of 6  shares 1.0, 0.5 and 0.67, so a round of this chain
    accepted 3, 1, 3, 1, 1, 2 of them  2: 3 of 6  commits 1 + 1.0 + 0.5 + 0.33 = 2.83 tokens. If it
                                       3: 2 of 3  takes 1.6 ms, that is 1.77 a ms; plain has 1.0

What rounds promise by what was heard, of this text and of others before it, is `heard.py`'s.

**At first.** One missed round says little, and many answers are too short to wait for a probe. So
a chain's first token starts as if a few rounds had mostly accepted it. These fade as others do: a
guess of that weight would come back when what was heard has faded. And the first choices hold for
1, 1, 2 and 4 rounds, then for 8, so that few rounds are lost while each tells much; one of plain
decoding, which tells nothing, soon holds for 32.

**What is not known.** Nothing is heard of what is not drafted, plain decoding hears nothing at all.
So now and then a few rounds are a probe, and there is no other exploration:

    plain 32 | probe | plain 64 | probe | plain 128 | probe | chain of 3 ...
               no               no                    yes: the next one comes after 32 again

A way can be probed if it drafts what the best one does not, and would be faster if its shares were
the highest that are likely. Fresh counts bound them; when all has faded, any share up to 1 is
likely. So a way that could not win at shares of 1 is never tried. The probe is the shorter, the
more it is expected to lose. Where drafting was given up nothing is expected of it, and it costs
about two tokens if nothing is accepted. Waits double up to 256 rounds, and such a probe then takes
one token in a hundred, the drafter's reading of the text since the last one not counted. After
longer waits, changes of text would cost more than that. For several texts, whose prompts the
drafter may have to read as well, `Terms` make probes rarer and longer; and there drafting that goes
on needs less gain than one that begins. The wait is short again where drafting was given up, and
where `own` commits a quarter more or less, for then the text has changed. How fast it is would say
less: rounds of a longer text take longer. And a wait has as many rounds as the drafter has tokens
to read that it had when the wait began, in all rows that it reads together, or that would cost more
than the probe.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moa_jax.config import DraftShape
from moa_jax.decode.costs import priced_as
from moa_jax.decode.heard import (
    FIRST_HEARD,
    FIRST_SHARE,
    KEPT,
    KEPT_OF_RECORDS,
    Position,
    Promised,
    TrackRecord,
    length_of,
    of_a_chain,
    of_a_tree,
    promised,
    shares_of,
)

PLAIN = DraftShape(1)
ROUNDS_BETWEEN_CHOICES = 8  # fewer at first, as many as were heard
ROUNDS_OF_PLAIN = 32  # the same of what tells nothing
FIRST_WAIT, LAST_WAIT = 32, 256  # rounds from one probe to the next
MOST_DOUBLINGS = 8  # of a wait
CHANGED = math.log(1.25)  # of what a round of `own` commits: what a probe found holds no more
LEAST_PROBE, MOST_PROBE = 1, 32  # rounds
TOKENS_OF_A_PROBE = 2.0  # that it may be expected to lose


class ShapeChoice(NamedTuple):
    """What to draft next, and for how many rounds until `Chooser.next` is asked again."""

    shape: DraftShape
    rounds: int


class Terms(NamedTuple):
    """What drafting must promise, beside plain decoding, and how often it is probed."""

    gain: float = 1.0  # times as fast, to begin with it
    gain_to_go_on: float | None = None  # the same where several draft already; None is `gain`
    gain_of_probe: float = 1.0  # the same to probe it, at the highest shares that are likely
    first_wait: int = FIRST_WAIT  # rounds from one probe to the next
    most_wait: int = LAST_WAIT
    least_probe: int = LEAST_PROBE  # rounds
    unread: int = 0  # tokens that the drafter reads before a probe, those of plain rounds too
    rows: int = 1  # of each of which it reads so many, needed or not


USUAL = Terms()


class Chooser:
    """Chooses among ways to draft by their costs and by what was accepted; one for all answers.

    It has no clock and no chance in it: the same calls give the same choices.
    """

    def __init__(
        self, ways: Sequence[DraftShape], own: DraftShape, first: DraftShape | None = None
    ) -> None:
        """`ways` has plain decoding, `DraftShape(1)`, among them.

        `first` is for want of costs, by default `own`.
        """
        self.ways, self._own, self._first = tuple(ways), own, first or own
        self._priced = {way: priced for way in ways if (priced := priced_as(way))}
        later = max(way.levels for way in (*ways, own)) - 2
        # One missed round ends drafts that a text alone makes, for most texts do not repeat.
        first = Position(FIRST_SHARE, FIRST_HEARD if self._first.num_drafted else 1.0)
        self._chains = [first, *(Position() for _ in range(later))]
        self._trees: dict[DraftShape, list[Position]] = {}
        self._records: dict[DraftShape, TrackRecord] = {}
        self._promised_now: dict[DraftShape, Promised] | None = (
            None  # until more is heard, or a text begins
        )
        self._best, self._text = own, 1.0  # tokens of a round of `own`, when the wait was set
        self._doublings, self._since = 0, 0  # of the wait for a probe, and rounds of it so far
        self._several_draft = False  # what was best for several last did draft
        self._probe: DraftShape | None = None
        self._left, self._rows = 0, 1  # rounds of the probe, and texts for which it was begun
        self._heard = 0  # rounds, of whatever way
        self._length = length_of(0)  # of the text that was alone last
        self._is_alone = False  # it still is
        self._unjudged = 0  # its first rounds that draft, less those that were heard

    def heard(self, shape: DraftShape, accepted: npt.ArrayLike, rounds: int) -> None:
        """Hears how many drafted tokens each round accepted, the rows of a batch all in one list.

        `shape` is one of the ways, or `own`; `rounds` counts those of the batch. A round that a
        stop or a limit cut is to be left out.
        """
        self._heard += rounds
        counts = np.asarray(accepted)
        for record in self._records.values():
            record.fade(KEPT_OF_RECORDS**rounds)
        kept = KEPT**rounds
        for position in self._positions():
            position.rounds *= kept
        came = counts.size
        for place, position in enumerate(self._heard_of(shape)[: shape.levels - 1]):
            hits = int(np.count_nonzero(counts > place))
            position.add(came, hits, self._is_alone)
            came = hits
        self._promised_now = None
        if shape.num_drafted and shape.is_chain:
            expected = self._promised()[shape].expected - 1
            record = self._records.setdefault(shape, TrackRecord())
            record.add(float(counts.sum()), expected * counts.size)
        self._unjudged -= rounds if shape.num_drafted else 0
        if shape == self._probe:
            self._left -= rounds
        else:
            self._since += rounds

    def begins(self, tokens: int) -> None:
        """Another text begins, alone, with so many tokens: what is usual of such is expected."""
        self._write_down()
        self._length, self._is_alone = length_of(tokens), True
        for position in self._positions():
            position.begins(self._length)
        self._promised_now = None
        self._unjudged = ROUNDS_BETWEEN_CHOICES
        if self._probe is not None:  # its text has ended
            self._probe, self._left, self._since = None, 0, 0

    def joins(self, tokens: int, others: int) -> None:
        """Another text begins, with so many tokens, beside so many others.

        What is usual of such is its part of what is expected. Until one was alone nothing tells
        what is usual.
        """
        self._write_down()
        for position in self._positions():
            position.joins(length_of(tokens), others)
        self._promised_now = None

    def _write_down(self) -> None:
        """What a text told that was alone until now belongs to what is usual."""
        if self._is_alone:
            for position in self._positions():
                position.was_alone(self._length)
        self._is_alone = False

    def _positions(self) -> Iterator[Position]:
        return itertools.chain(self._chains, *self._trees.values())

    def next(
        self,
        costs: Mapping[DraftShape, float],
        ready: Collection[DraftShape],
        terms: Terms = USUAL,
        under_way: ShapeChoice | None = None,
    ) -> ShapeChoice:
        """The next choice, given the milliseconds of a round of some ways and what is compiled.

        What drafts must keep to the `terms`. What is `under_way` was begun and not heard: a probe
        is not sent twice. A way without a cost is left out. Where no way has one it is `first`,
        else plain decoding, else the first one that is ready. Raises ValueError if none is ready.
        """
        known = self._known(costs, ready)
        if not known:
            return ShapeChoice(self._without_costs(ready), ROUNDS_BETWEEN_CHOICES)
        tokens, terms = self._tokens(known), self._terms_now(terms)
        best = _fastest(known, tokens, terms)
        if self._left > 0 and terms.rows > self._rows:  # for more texts the drafter reads more
            self._probe, self._left, self._since = None, 0, 0
        if self._probe in known and self._left > 0:
            sent = under_way.rounds if under_way and under_way.shape == self._probe else 0
            if self._left > sent:
                return ShapeChoice(self._probe, self._left - sent)
            return ShapeChoice(best, ROUNDS_BETWEEN_CHOICES)  # until it is heard
        self._judge(best, known, terms)
        wait = min(terms.first_wait << self._doublings, terms.most_wait)
        left = max(wait, terms.rows * (terms.unread - self._since)) - self._since
        if left <= 0 and (probe := _probe(best, known, tokens, terms)):
            (self._probe, self._left), self._rows = probe, terms.rows
            return ShapeChoice(*probe)
        most = ROUNDS_BETWEEN_CHOICES if best.num_drafted else ROUNDS_OF_PLAIN
        rounds = min(max(self._heard, 1), most)
        return ShapeChoice(best, min(left, rounds) if left > 0 else rounds)

    def fastest(
        self,
        costs: Mapping[DraftShape, float],
        ready: Collection[DraftShape],
        terms: Terms = USUAL,
    ) -> DraftShape:
        """The way that `next` would choose if nothing were probed; the arguments are its own."""
        if known := self._known(costs, ready):
            return _fastest(known, self._tokens(known), self._terms_now(terms))
        return self._without_costs(ready)

    def contenders(
        self,
        costs: Mapping[DraftShape, float],
        ready: Collection[DraftShape],
        terms: Terms = USUAL,
        doubt: float = 1.0,
    ) -> set[DraftShape]:
        """Ways that would be the fastest if they took as little as one part in `doubt`.

        The other arguments are those of `next`.
        """
        known = self._known(costs, ready)
        tokens, terms = self._tokens(known), self._terms_now(terms)
        rates = {way: _rate(way, tokens[way].expected / ms, terms) for way, ms in known.items()}
        to_beat = max(rates.values(), default=0.0)
        return {way for way, rate in rates.items() if doubt * rate >= to_beat}

    def _terms_now(self, terms: Terms) -> Terms:
        """The terms with the gain that holds now: to go on, or to begin."""
        goes_on = self._several_draft and terms.gain_to_go_on is not None
        return terms._replace(gain=terms.gain_to_go_on) if goes_on else terms

    def _known(
        self, costs: Mapping[DraftShape, float], ready: Collection[DraftShape]
    ) -> dict[DraftShape, float]:
        """Milliseconds of the ways that can be taken."""
        priced = {way: priced for way, priced in self._priced.items() if way in ready}
        return {way: costs[shape] for way, shape in priced.items() if shape in costs}

    def _heard_of(self, way: DraftShape) -> list[Position]:
        if way.is_chain:
            return self._chains
        if way not in self._trees:
            self._trees[way] = [Position() for _ in self._chains]
        return self._trees[way]

    def _without_costs(self, ready: Collection[DraftShape]) -> DraftShape:
        for way in (self._first, PLAIN, *self.ways):
            if way in ready:
                return way
        raise ValueError("no way to draft is ready; compile one of them first")

    def _tokens(self, ways: Iterable[DraftShape]) -> dict[DraftShape, Promised]:
        """What a round of each way commits, as far as is known."""
        new, found = TrackRecord(), self._promised()
        return {way: self._records.get(way, new).corrected(found[way]) for way in ways}

    def _promised(self) -> Mapping[DraftShape, Promised]:
        """The same of all ways, by shares alone; reckoned once between two news."""
        if self._promised_now is None:
            trees = [(heard, of_a_chain) for heard in self._trees.values()]
            of_chains = promised(self._chains, shares_of(self._chains, trees, FIRST_SHARE))
            found = {}
            for way in (*self.ways, self._own):
                expected, most = of_chains
                if not way.is_chain:
                    heard, guesses = self._heard_of(way), [(self._chains, of_a_tree)]
                    shares = shares_of(heard, guesses, of_a_tree(FIRST_SHARE))
                    expected, most = promised(heard, shares)
                last = way.levels - 1
                found[way] = Promised(expected[last], most[last])
            self._promised_now = found
        return self._promised_now

    def _judge(self, best: DraftShape, known: Collection[DraftShape], terms: Terms) -> None:
        """Says how long the next wait is, where a probe has ended or the text has changed."""
        text = self._promised()[self._own].expected
        if self._unjudged >= 0:  # a text is compared with itself, not with the one before
            self._text = text
        drafted = self._best.num_drafted > 0 and self._unjudged <= 0
        could = any(way.num_drafted for way in known)
        gave_up = drafted and could and not best.num_drafted
        # Beside plain decoding nothing is heard, and only what was heard fades.
        changed = best.num_drafted > 0 and abs(math.log(text / self._text)) > CHANGED
        was_probed = self._probe in known  # else it could not be sent
        if was_probed or gave_up or changed:
            paid = gave_up or changed or _tells_more(best, self._best)
            self._doublings = 0 if paid else min(self._doublings + 1, MOST_DOUBLINGS)
            self._text = text
        self._probe = None
        if was_probed or gave_up:
            self._since = 0
        if could:
            self._best = best
        if could and terms.rows > 1:
            self._several_draft = best.num_drafted > 0


def _fastest(
    costs: Mapping[DraftShape, float], tokens: Mapping[DraftShape, Promised], terms: Terms
) -> DraftShape:
    return max(costs, key=lambda way: _rate(way, tokens[way].expected / costs[way], terms))


def _rate(way: DraftShape, tokens_a_ms: float, terms: Terms) -> float:
    """Tokens a millisecond, as ways are compared: drafting must keep to the terms."""
    return tokens_a_ms if way.num_drafted else terms.gain * tokens_a_ms


def _probe(
    best: DraftShape,
    costs: Mapping[DraftShape, float],
    tokens: Mapping[DraftShape, Promised],
    terms: Terms,
) -> ShapeChoice | None:
    """The probe that may gain most before it has lost what it may; None if none can gain."""
    rate = tokens[best].expected / costs[best]
    to_beat = rate if best.num_drafted else rate * terms.gain_of_probe
    found, largest = None, 0.0
    for way, ms in costs.items():
        commits = tokens[way].expected if best.num_drafted else 1.0  # what gave up is not trusted
        lost = max(rate * ms - commits, TOKENS_OF_A_PROBE / MOST_PROBE)
        rounds = max(terms.least_probe, TOKENS_OF_A_PROBE / lost)
        gain = rounds * (tokens[way].most / ms - to_beat)
        if gain > largest and _tells_more(way, best):
            found, largest = ShapeChoice(way, round(rounds)), gain
    return found


def _tells_more(way: DraftShape, than: DraftShape) -> bool:
    """Whether a way drafts something that the other does not."""
    if way.is_chain and than.is_chain:
        return way.levels > than.levels
    return way != than and way.num_drafted > 0
