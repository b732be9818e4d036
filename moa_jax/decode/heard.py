"""What rounds told of drafts, position by position, and what their next ones promise by it.

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

**What comes of it.** Trials do not all begin alike. One of a short chain whose drafts are all
accepted often ends in the middle of tokens that are easy, so the next begins well; one of a long
chain ends at a token that was refused, and such tokens stand together. So shares that short chains
told promise too much of long ones. What rounds of a chain accepted is kept beside what was expected
of them, for longer than shares are, and corrects what its next rounds promise.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

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


class Promised(NamedTuple):
    """What a round of a way commits."""

    expected: float
    most: float  # at the highest shares that are likely


class Trials(NamedTuple):
    """Trials that came to a position, and those of them that accepted it."""

    came: float = 0.0
    accepted: float = 0.0

    def plus(self, other: Trials) -> Trials:
        return Trials(self.came + other.came, self.accepted + other.accepted)

    def times(self, factor: float) -> Trials:
        return Trials(factor * self.came, factor * self.accepted)


class Position:
    """What was heard of a position of chains, or of a level of a tree."""

    __slots__ = ("rounds", "share", "_all", "_begun", "_here", "_usual")

    def __init__(self, share: float = 0.0, rounds: float = 0.0) -> None:
        self.rounds = rounds  # that came to the position; old ones count less
        self.share = share  # of them that accepted it
        self._all = 0  # rounds that came to it, old ones too
        self._begun = Trials(rounds, rounds * share)  # what this text began with
        self._here = Trials()  # what it told, where it was alone
        self._usual: dict[int, Trials] = {}  # of texts before it, by length

    @property
    def weight(self) -> float:
        """Trials, and at least a few: what was known last is not forgotten, but soon overruled."""
        return max(self.rounds, min(self._all, LEAST_HEARD))

    def add(self, came: int, accepted: int, alone: bool) -> None:
        """Hears of rounds of one text, or of several."""
        if came:
            self.share = _mean(self.share, self.weight, accepted / came, came)
            self.rounds = min(self.rounds + came, MOST_HEARD)
            self._all += came
            self._here = self._here.plus(Trials(alone * came, alone * accepted))

    def begins(self, length: int) -> None:
        """A text of such a length begins alone."""
        if self._usual:
            self.rounds, self.share = self._usual_of(length)
        self.rounds = min(self.rounds, ROUNDS_OF_USUAL)
        self._begun = Trials(self.rounds, self.rounds * self.share)

    def was_alone(self, length: int) -> None:
        """A text of such a length is alone no more: what it told belongs to what is usual.

        What is usual fades where nothing was heard, too: at last it may be probed again.
        """
        here = self._here.times(min(1.0, MOST_OF_A_TEXT / max(self._here.came, 1.0)))
        if here.came or length in self._usual:
            usual = self._usual.get(length, self._begun)
            self._usual[length] = usual.times(KEPT_OF_USUAL if usual.came > 1 else 1.0).plus(here)
        self._here = Trials()

    def joins(self, length: int, others: int) -> None:
        """A text of such a length joins so many others, of whom it is one more from now on."""
        if self._usual:
            rounds, share = self._usual_of(length)
            self.share = _mean(self.share, others, share, 1)
            self.rounds = _mean(self.rounds, others, min(rounds, ROUNDS_OF_USUAL), 1)

    def _usual_of(self, length: int) -> tuple[float, float]:
        """Trials of texts of the nearest length that is known, and the share of them."""
        usual = self._usual[min(self._usual, key=lambda other: abs(other - length))]
        return usual.came, usual.accepted / usual.came


class TrackRecord:
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

    def corrected(self, tokens: Promised) -> Promised:
        """What a round commits, given what shares promise."""
        kept = (self.accepted + AS_EXPECTED) / (self.expected + AS_EXPECTED)
        return tokens._replace(expected=min(1 + (tokens.expected - 1) * kept, tokens.most))


def promised(heard: Sequence[Position], shares: Sequence[float]) -> tuple[list[float], ...]:
    """What a round commits that drafts none, one, two ... positions, as `Promised` has it."""
    most = [_highest(share, at.rounds) for share, at in zip(shares, heard, strict=True)]
    return _committed(shares), _committed(most)


def shares_of(
    heard: Sequence[Position],
    others: Sequence[tuple[Sequence[Position], Callable[[float], float]]],
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


def length_of(tokens: int) -> int:
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


def of_a_tree(share: float) -> float:
    """The share of a tree's level, guessed from a chain's."""
    return 1 - (1 - share) ** RESCUED


def of_a_chain(share: float) -> float:
    """The share of a chain's position, guessed from a tree's."""
    return 1 - (1 - share) ** (1 / RESCUED)
