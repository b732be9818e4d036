"""Acceptance rates of drafts per position, and the tokens that a round commits by them.

    accepted drafts of six rounds that drafted 3 tokens: 3, 1, 3, 1, 1, 2
    position 1    accepted in 6 of 6 rounds            1.0
    position 2    in 3 of the 6 that accepted 1        0.5
    position 3    in 2 of the 3 that accepted 1, 2     0.67
    tokens        1 + 1.0 + 1.0 x 0.5 + 1.0 x 0.5 x 0.67 = 2.83 per round

Old rounds decay, since text changes. One vector serves all shapes: a level of a tree misses as
often as a chain's position does, to the power RESCUE.
"""

from __future__ import annotations

import itertools
import math
import operator

import numpy as np
import numpy.typing as npt

from moa_jax.config import DraftShape

# Published drafters accept 0.6 to 0.8 of first positions, so a chain is tried before any round.
PRIOR = 0.7
# Rounds in the decayed mean. The standard error of a rate is then at most 0.06, and a text that
# changes is followed within a paragraph.
WINDOW = 64
# Rounds that a guess counts as. Four keep a drafter that is right nine times of ten after one miss,
# and give up within half a dozen rounds if nothing is accepted.
GUESS = 4.0
# EAGLE-2's trees of 60 nodes accept 0.83 per level where chains accept 0.7: 0.3 ** 1.5 = 0.16.
RESCUE = 1.5


class AcceptanceRates:
    """Decayed acceptance rates of a chain's positions."""

    def __init__(self, levels: int) -> None:
        """`levels` is the largest number of levels below the root of any shape."""
        self._rates = [PRIOR] * levels
        self._counts = [0.0] * levels  # rounds that reached the position, decayed

    def rates(self, shape: DraftShape, deviations: float = 0.0) -> list[float]:
        """Rates of a shape's levels; with `deviations` the upper end of that confidence interval.

        The prior of a position is the rate of the position before it.
        """
        found, before = [], PRIOR
        for rate, count in zip(self._rates[: shape.levels - 1], self._counts, strict=False):
            before = (rate * count + before * GUESS) / (count + GUESS)
            rate = _upper_bound(before, count + GUESS, deviations)
            found.append(rate if shape.is_chain else 1 - (1 - rate) ** RESCUE)
        return found

    def tokens(self, shape: DraftShape, deviations: float = 0.0) -> float:
        """Expected number of tokens that a round of a shape commits."""
        return 1 + sum(itertools.accumulate(self.rates(shape, deviations), operator.mul))

    def update(self, shape: DraftShape, accepted: npt.ArrayLike, rounds: int) -> None:
        """Records the number of accepted drafts of each row in some rounds of a shape."""
        self.age(rounds)
        accepted_N = np.asarray(accepted)
        power = 1.0 if shape.is_chain else RESCUE
        reached = accepted_N.size
        for place in range(shape.levels - 1):
            hits = int(np.count_nonzero(accepted_N > place))
            if reached:
                count = self._counts[place]
                rate = 1 - (1 - self._rates[place]) ** power
                rate = (rate * count + hits) / (count + reached)
                self._rates[place] = 1 - (1 - rate) ** (1 / power)
                self._counts[place] = min(count + reached, WINDOW)
            reached = hits

    def age(self, rounds: int) -> None:
        """Decays the counts by some rounds."""
        kept = (1 - 1 / WINDOW) ** rounds
        self._counts = [kept * count for count in self._counts]


def _upper_bound(rate: float, count: float, deviations: float) -> float:
    """Upper end of Wilson's confidence interval of a rate; the rate itself for 0 deviations."""
    squared = deviations**2
    spread = math.sqrt(squared * (count * rate * (1 - rate) + squared / 4))
    return (count * rate + squared / 2 + spread) / (count + squared)
