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

import numpy as np
import numpy.typing as npt

from moa_jax.config import DraftShape

# Published drafters accept 0.6 to 0.8 of first positions, so a chain is tried before any round.
PRIOR = 0.7
# Rounds in the decayed mean. The standard error of a rate is then at most 0.06, and a text that
# changes is followed within a paragraph.
WINDOW = 64
# Rounds that a guess counts as: two, so that three rounds of its own outweigh it.
GUESS = 2.0
# EAGLE-2's trees of 60 nodes accept 0.83 per level where chains accept 0.7: 0.3 ** 1.5 = 0.16.
RESCUE = 1.5


class AcceptanceRates:
    """Decayed acceptance rates of a chain's positions."""

    def __init__(self, levels: int) -> None:
        """`levels` is the largest number of levels below the root of any shape."""
        self._rate_P = np.full(levels, PRIOR)
        self._count_P = np.zeros(levels)  # rounds that reached the position, decayed

    def rates(self, shape: DraftShape, deviations: float = 0.0) -> npt.NDArray[np.float64]:
        """Rates of a shape's levels; with `deviations` the upper end of that confidence interval.

        The prior of a position is the rate of the position before it.
        """
        levels = shape.levels - 1
        rate_P, before = np.zeros(levels), PRIOR
        for place, (rate, count) in enumerate(zip(self._rate_P, self._count_P, strict=True)):
            if place < levels:
                rate_P[place] = before = (rate * count + before * GUESS) / (count + GUESS)
        if deviations:
            rate_P = _upper_bounds(rate_P, self._count_P[:levels] + GUESS, deviations)
        return rate_P if shape.is_chain else 1 - (1 - rate_P) ** RESCUE

    def tokens(self, shape: DraftShape, deviations: float = 0.0) -> float:
        """Expected number of tokens that a round of a shape commits."""
        return 1 + float(np.cumprod(self.rates(shape, deviations)).sum())

    def update(self, shape: DraftShape, accepted: npt.ArrayLike, rounds: int) -> None:
        """Records the number of accepted drafts of each row in some rounds of a shape."""
        self.age(rounds)
        accepted_N = np.asarray(accepted)
        power = 1.0 if shape.is_chain else RESCUE
        reached = accepted_N.size
        for place in range(shape.levels - 1):
            hits = int(np.count_nonzero(accepted_N > place))
            if reached:
                count = self._count_P[place]
                rate = 1 - (1 - self._rate_P[place]) ** power
                rate = (rate * count + hits) / (count + reached)
                self._rate_P[place] = 1 - (1 - rate) ** (1 / power)
                self._count_P[place] = min(count + reached, WINDOW)
            reached = hits

    def age(self, rounds: int) -> None:
        """Decays the counts by some rounds."""
        self._count_P *= (1 - 1 / WINDOW) ** rounds


def _upper_bounds(
    rate_P: npt.NDArray[np.float64], count_P: npt.NDArray[np.float64], deviations: float
) -> npt.NDArray[np.float64]:
    """Upper ends of Wilson's confidence intervals."""
    squared = deviations**2
    spread_P = np.sqrt(squared * (count_P * rate_P * (1 - rate_P) + squared / 4))
    return (count_P * rate_P + squared / 2 + spread_P) / (count_P + squared)
