"""Which draft comes next: the way that commits most tokens a millisecond, as far as is known.

    heard                              so far     what follows
    6 rounds that drafted 3 tokens     1: 6 of 6  shares 1.0, 0.5 and 0.67, so a round of this chain
    accepted 3, 1, 3, 1, 1, 2 of them  2: 3 of 6  commits 1 + 1.0 + 0.5 + 0.33 = 2.83 tokens. If it
                                       3: 2 of 3  takes 1.6 ms, that is 1.77 a ms; plain has 1.0

**What is known.** A position's share is counted among the rounds that drafted it and accepted all
before it; the products of shares tell in how many rounds a position is accepted. So rounds of every
depth are used, each for what it drafted. A tree's levels have shares of their own. What was heard
fades with the rounds, since text changes. A share of which little was heard is close to a guess:
that of the position before it, and what a chain's share says of a tree's, or a tree's of a chain's.

**What is usual.** Texts differ more than the stretches of one. So one that begins alone starts from
what was usual of texts that began about as long, as if a few of its rounds had said so; its own
soon decide. Drafters mostly accept less of texts that are longer than those they learned. So
lengths are kept apart, each power of two:

    usual      up to 128   0.84 0.85 ..        a text of 700 tokens begins with the last line,
               up to 256   0.79 0.80 ..        and what its rounds accepted is added to it
               up to 1024  0.22 0.41 ..        when it is alone no more

One that joins n others brings what is usual of it for its part, one in n + 1. So several soon draft
again after a text of which nothing was accepted has gone, though plain decoding hears nothing.

**What comes of it.** Rounds do not all begin alike. One of a short chain whose drafts are all
accepted often ends in the middle of tokens that are easy, so the next begins well; one of a long
chain ends at a token that was refused, and such tokens stand together. So shares that short chains
told promise too much of long ones. What rounds of a chain accepted is kept beside what was expected
of them, for longer than shares are, and corrects what its next rounds promise.

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
drafter may have to read as well, `Terms` make probes rarer and longer. The wait is short again
where drafting was given up, and where `own` commits a quarter more or less, for then the text has
changed. How fast it is would say less: rounds of a longer text take longer. And a wait has as many
rounds as the drafter has tokens to read that it had when the wait began, in all rows that it reads
together, or that would cost more than the probe.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moa_jax.config import DraftShape
from moa_jax.decode.costs import priced_as

PLAIN = DraftShape(1)
ROUNDS_BETWEEN_CHOICES = 8  # fewer at first, as many as were heard
ROUNDS_OF_PLAIN = 32  # the same of what tells nothing
FIRST_WAIT, LAST_WAIT = 32, 256  # rounds from one probe to the next
CHANGED = math.log(1.25)  # of what a round of `own` commits: what a probe found holds no more
LEAST_PROBE, MOST_PROBE = 1, 32  # rounds
TOKENS_OF_A_PROBE = 2.0  # that it may be expected to lose
KEPT = 1 - 1 / 128  # of what was heard, from one round to the next
KEPT_OF_RECORDS = 1 - 1 / 4096  # the same of what came of expectations, of many texts
AS_EXPECTED = 96.0  # drafted tokens that seem to have been accepted as expected
MOST_OF_RECORD = 4096.0  # drafted tokens that count
MOST_HEARD = 128.0  # rounds that count, so that many rows fade as soon as one does
SHORTEST = 128  # tokens; texts up to here are of one length
ROUNDS_OF_USUAL = 6.0  # that seem to have said it, when a text begins
KEPT_OF_USUAL = 0.9  # from one text to the next
MOST_OF_A_TEXT = 64.0  # rounds of one text that count
LEAST_HEARD = 2.0  # rounds that faded ones still weigh in a share
GUESSED = 3.0  # rounds that a guess weighs
FIRST_SHARE, FIRST_HEARD = 0.7, 3.5  # of a chain's first token; rounds that seem to have said so
FIRST_GUESSED = 0.1  # rounds that it weighs when those have faded
RESCUED = 1.5  # a tree misses a level as often as a chain misses its token, to this power
DEVIATIONS = 1.5  # from a share to the highest that is likely


class ShapeChoice(NamedTuple):
    """What to draft next, and for how many rounds until `Chooser.next` is asked again."""

    shape: DraftShape
    rounds: int


class Terms(NamedTuple):
    """What drafting must promise, beside plain decoding, and how often it is probed."""

    gain: float = 1.0  # times as fast
    gain_of_probe: float = 1.0  # the same of a probe, at the highest shares that are likely
    first_wait: int = FIRST_WAIT  # rounds from one probe to the next
    most_wait: int = LAST_WAIT
    least_probe: int = LEAST_PROBE  # rounds
    unread: int = 0  # tokens that the drafter reads before a probe, those of plain rounds too
    rows: int = 1  # of each of which it reads so many, needed or not


USUAL = Terms()


class _Tokens(NamedTuple):
    """What a round of a way commits."""

    expected: float
    most: float  # at the highest shares that are likely


class _Counts(NamedTuple):
    """Rounds that came to a position, and those of them that accepted it."""

    came: float = 0.0
    accepted: float = 0.0

    def plus(self, other: _Counts) -> _Counts:
        return _Counts(self.came + other.came, self.accepted + other.accepted)

    def times(self, factor: float) -> _Counts:
        return _Counts(factor * self.came, factor * self.accepted)


class _Position:
    """What was heard of a position of chains, or of a level of a tree."""

    __slots__ = ("rounds", "share", "_all", "_begun", "_here", "_usual")

    def __init__(self, share: float = 0.0, rounds: float = 0.0) -> None:
        self.rounds = rounds  # that came to the position; old ones count less
        self.share = share  # of them that accepted it
        self._all = 0  # rounds that came to it, old ones too
        self._begun = _Counts(rounds, rounds * share)  # what this text began with
        self._here = _Counts()  # what it told, where it was alone
        self._usual: dict[int, _Counts] = {}  # of texts before it, by length

    @property
    def weight(self) -> float:
        """Rounds, and at least a few: what was known last is not forgotten, but soon overruled."""
        return max(self.rounds, min(self._all, LEAST_HEARD))

    def add(self, came: int, accepted: int, alone: bool) -> None:
        """Hears of rounds of one text, or of several."""
        if came:
            self.share = _mean(self.share, self.weight, accepted / came, came)
            self.rounds = min(self.rounds + came, MOST_HEARD)
            self._all += came
            self._here = self._here.plus(_Counts(alone * came, alone * accepted))

    def begins(self, length: int) -> None:
        """A text of such a length begins alone."""
        if self._usual:
            self.rounds, self.share = self._usual_of(length)
        self.rounds = min(self.rounds, ROUNDS_OF_USUAL)
        self._begun = _Counts(self.rounds, self.rounds * self.share)

    def was_alone(self, length: int) -> None:
        """A text of such a length is alone no more: what it told belongs to what is usual.

        What is usual fades where nothing was heard, too: at last it may be probed again.
        """
        here = self._here.times(min(1.0, MOST_OF_A_TEXT / max(self._here.came, 1.0)))
        if here.came or length in self._usual:
            usual = self._usual.get(length, self._begun)
            self._usual[length] = usual.times(KEPT_OF_USUAL if usual.came > 1 else 1.0).plus(here)
        self._here = _Counts()

    def joins(self, length: int, others: int) -> None:
        """A text of such a length joins so many others, of whom it is one more from now on."""
        if self._usual:
            rounds, share = self._usual_of(length)
            self.share = _mean(self.share, others, share, 1)
            self.rounds = _mean(self.rounds, others, min(rounds, ROUNDS_OF_USUAL), 1)

    def _usual_of(self, length: int) -> tuple[float, float]:
        """Rounds of texts of the nearest length that is known, and the share of them."""
        usual = self._usual[min(self._usual, key=lambda other: abs(other - length))]
        return usual.came, usual.accepted / usual.came


class _Record:
    """Drafted tokens that rounds of a way were expected to accept, and did; old ones count less."""

    __slots__ = ("accepted", "expected")

    def __init__(self) -> None:
        self.accepted = self.expected = 0.0

    def add(self, accepted: float, expected: float) -> None:
        """Takes what some rounds drafted, of many rows at once too."""
        self.accepted, self.expected = self.accepted + accepted, self.expected + expected
        self.fade(min(1.0, MOST_OF_RECORD / max(self.expected, 1.0)))

    def fade(self, kept: float) -> None:
        self.accepted, self.expected = kept * self.accepted, kept * self.expected

    def corrected(self, tokens: _Tokens) -> _Tokens:
        """What a round commits, given what shares promise."""
        kept = (self.accepted + AS_EXPECTED) / (self.expected + AS_EXPECTED)
        return tokens._replace(expected=min(1 + (tokens.expected - 1) * kept, tokens.most))


class Chooser:
    """Chooses among ways to draft by their costs and by what was accepted; one for all answers.

    It has no clock and no chance in it: the same calls give the same choices.
    """

    def __init__(self, ways: Sequence[DraftShape], own: DraftShape) -> None:
        """`ways` has plain decoding, `DraftShape(1)`, among them; `own` is for want of costs."""
        self.ways, self._own = tuple(ways), own
        self._priced = {way: priced for way in ways if (priced := priced_as(way))}
        later = max(way.levels for way in (*ways, own)) - 2
        first = _Position(FIRST_SHARE, FIRST_HEARD)
        self._chains = [first, *(_Position() for _ in range(later))]
        self._trees: dict[DraftShape, list[_Position]] = {}
        self._records: dict[DraftShape, _Record] = {}
        self._best, self._text = own, 1.0  # tokens of a round of `own`, when the wait was set
        self._wait, self._since = FIRST_WAIT, 0  # rounds from probe to probe, and those so far
        self._probe: DraftShape | None = None
        self._left = 0  # rounds of the probe
        self._heard = 0  # rounds, of whatever way
        self._length = _length_of(0)  # of the text that was alone last
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
        if shape.num_drafted and shape.is_chain:
            expected = self._promised([shape])[shape].expected - 1
            record = self._records.setdefault(shape, _Record())
            record.add(float(counts.sum()), expected * counts.size)
        self._unjudged -= rounds if shape.num_drafted else 0
        if shape == self._probe:
            self._left -= rounds
        else:
            self._since += rounds

    def begins(self, tokens: int) -> None:
        """Another text begins, alone, with so many tokens: what is usual of such is expected."""
        self._is_alone_no_more()
        self._length, self._is_alone = _length_of(tokens), True
        for position in self._positions():
            position.begins(self._length)
        self._unjudged = ROUNDS_BETWEEN_CHOICES
        if self._probe is not None:  # its text has ended
            self._probe, self._left, self._since = None, 0, 0

    def joins(self, tokens: int, others: int) -> None:
        """Another text begins, with so many tokens, beside so many others.

        What is usual of such is its part of what is expected. Until one was alone nothing tells
        what is usual.
        """
        self._is_alone_no_more()
        for position in self._positions():
            position.joins(_length_of(tokens), others)

    def _is_alone_no_more(self) -> None:
        if self._is_alone:
            for position in self._positions():
                position.was_alone(self._length)
        self._is_alone = False

    def _positions(self) -> Iterator[_Position]:
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
        is not sent twice. A way without a cost is left out. Where no way has one it is `own`, else
        plain decoding, else the first way that is ready. Raises ValueError if nothing is ready.
        """
        known = self._known(costs, ready)
        if not known:
            return ShapeChoice(self._without_costs(ready), ROUNDS_BETWEEN_CHOICES)
        tokens = self._tokens(known)
        best = _fastest(known, tokens, terms)
        if self._probe in known and self._left > 0:
            sent = under_way.rounds if under_way and under_way.shape == self._probe else 0
            if self._left > sent:
                return ShapeChoice(self._probe, self._left - sent)
            return ShapeChoice(best, ROUNDS_BETWEEN_CHOICES)  # until it is heard
        self._judge(best, known, terms)
        wait = min(max(self._wait, terms.first_wait), terms.most_wait)
        left = max(wait, terms.rows * (terms.unread - self._since)) - self._since
        if left <= 0 and (probe := _probe(best, known, tokens, terms)):
            self._probe, self._left = probe
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
            return _fastest(known, self._tokens(known), terms)
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
        tokens = self._tokens(known)
        rates = {way: _rate(way, tokens[way].expected / ms, terms) for way, ms in known.items()}
        to_beat = max(rates.values(), default=0.0)
        return {way for way, rate in rates.items() if doubt * rate >= to_beat}

    def _known(
        self, costs: Mapping[DraftShape, float], ready: Collection[DraftShape]
    ) -> dict[DraftShape, float]:
        """Milliseconds of the ways that can be taken."""
        priced = {way: priced for way, priced in self._priced.items() if way in ready}
        return {way: costs[shape] for way, shape in priced.items() if shape in costs}

    def _heard_of(self, way: DraftShape) -> list[_Position]:
        if way.is_chain:
            return self._chains
        if way not in self._trees:
            self._trees[way] = [_Position() for _ in self._chains]
        return self._trees[way]

    def _without_costs(self, ready: Collection[DraftShape]) -> DraftShape:
        for way in (self._own, PLAIN, *self.ways):
            if way in ready:
                return way
        raise ValueError("no way to draft is ready: compile one of them first")

    def _tokens(self, ways: Iterable[DraftShape]) -> dict[DraftShape, _Tokens]:
        """What a round of each way commits, as far as is known."""
        new = _Record()
        promised = self._promised(ways).items()
        return {way: self._records.get(way, new).corrected(tokens) for way, tokens in promised}

    def _promised(self, ways: Iterable[DraftShape]) -> dict[DraftShape, _Tokens]:
        """The same by shares alone."""
        trees = [(heard, _of_a_chain) for heard in self._trees.values()]
        of_chains = _tokens(self._chains, _shares(self._chains, trees, FIRST_SHARE))
        tokens = {}
        for way in ways:
            expected, most = of_chains
            if not way.is_chain:
                heard, guesses = self._heard_of(way), [(self._chains, _of_a_tree)]
                expected, most = _tokens(heard, _shares(heard, guesses, _of_a_tree(FIRST_SHARE)))
            tokens[way] = _Tokens(expected[way.levels - 1], most[way.levels - 1])
        return tokens

    def _judge(self, best: DraftShape, known: Collection[DraftShape], terms: Terms) -> None:
        """Says how long the next wait is, where a probe has ended or the text has changed."""
        text = self._promised([self._own])[self._own].expected
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
            self._wait = terms.first_wait if paid else min(2 * self._wait, terms.most_wait)
            self._text = text
        self._probe = None
        if was_probed or gave_up:
            self._since = 0
        if could:
            self._best = best


def _fastest(
    costs: Mapping[DraftShape, float], tokens: Mapping[DraftShape, _Tokens], terms: Terms
) -> DraftShape:
    return max(costs, key=lambda way: _rate(way, tokens[way].expected / costs[way], terms))


def _rate(way: DraftShape, tokens_a_ms: float, terms: Terms) -> float:
    """Tokens a millisecond, as ways are compared: drafting must keep to the terms."""
    return tokens_a_ms if way.num_drafted else terms.gain * tokens_a_ms


def _probe(
    best: DraftShape,
    costs: Mapping[DraftShape, float],
    tokens: Mapping[DraftShape, _Tokens],
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


def _tokens(heard: Sequence[_Position], shares: Sequence[float]) -> tuple[list[float], ...]:
    """What a round commits that drafts none, one, two ... positions, as `_Tokens` has it."""
    most = [_highest(share, at.rounds) for share, at in zip(shares, heard, strict=True)]
    return _committed(shares), _committed(most)


def _tells_more(way: DraftShape, than: DraftShape) -> bool:
    """Whether a way drafts something that the other does not."""
    if way.is_chain and than.is_chain:
        return way.levels > than.levels
    return way != than and way.num_drafted > 0


def _shares(
    heard: Sequence[_Position],
    others: Sequence[tuple[Sequence[_Position], Callable[[float], float]]],
    first: float,
) -> list[float]:
    """The share of each position: what was heard, with a guess for what was heard of little.

    `others` have each a function that makes a guess of their shares.
    """
    shares, guess, guessed = [], first, FIRST_GUESSED
    for place, position in enumerate(heard):
        for positions, translated in others:
            if weight := (other := positions[place]).weight:
                guess = _mean(translated(other.share), weight, guess, guessed)
                guessed = GUESSED
        guess, guessed = _mean(position.share, position.weight, guess, guessed), GUESSED
        shares.append(guess)
    return shares


def _length_of(tokens: int) -> int:
    """The same number for texts that are about as long."""
    return max(tokens - 1, SHORTEST - 1).bit_length()


def _mean(one: float, weight: float, other: float, weight_of_other: float) -> float:
    return (one * weight + other * weight_of_other) / (weight + weight_of_other)


def _highest(share: float, rounds: float) -> float:
    """Wilson's upper bound of a share that was counted in so many rounds; 1 for no rounds."""
    squared = DEVIATIONS**2
    spread = math.sqrt(squared * (rounds * share * (1 - share) + squared / 4))
    return (rounds * share + squared / 2 + spread) / (rounds + squared)


def _committed(shares: Iterable[float]) -> list[float]:
    """Tokens that a round commits which drafts none, one, two ... of these positions."""
    return list(itertools.accumulate(itertools.accumulate(shares, operator.mul), initial=1.0))


def _of_a_tree(share: float) -> float:
    """The share of a tree's level, guessed from a chain's."""
    return 1 - (1 - share) ** RESCUED


def _of_a_chain(share: float) -> float:
    """The share of a chain's position, guessed from a tree's."""
    return 1 - (1 - share) ** (1 / RESCUED)
