"""How sure a tau is: where it lies in most draws, with repetition, of as many prompts.

A prompt stays whole, since its rounds are alike. Two drafters are compared on the same draws.

References: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13 (percentiles).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DRAWS, SHARE = 1000, 0.9  # of the bootstrap, and of its draws what an interval holds
Interval = tuple[float, float]


class TauCounts(NamedTuple):
    """Tokens and rounds by prompt (P,); all that are compared have the same prompts."""

    tokens_P: np.ndarray
    rounds_P: np.ndarray


def interval_of(seeds: Sequence[TauCounts], bases: Sequence[TauCounts] = ()) -> Interval:
    """Where the mean tau of some seeds lies in most draws of as many seeds and prompts.

    With `bases`, its ratio to their mean: of the same prompts, but seeds of their own. Prompts
    without a round, whose answers are one token, are not drawn; there must be others.
    """
    (some,) = np.nonzero(np.all([counts.rounds_P for counts in (*seeds, *bases)], axis=0))
    prompts_DP = some[np.random.default_rng(0).integers(len(some), size=(DRAWS, len(some)))]
    tau_D = _mean_of_seeds(seeds, prompts_DP, draw=1)
    if bases:
        tau_D = tau_D / _mean_of_seeds(bases, prompts_DP, draw=2)
    low, high = np.quantile(tau_D, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def _mean_of_seeds(seeds: Sequence[TauCounts], prompts_DP: np.ndarray, draw: int) -> np.ndarray:
    tau_DS = np.stack([_taus(counts, prompts_DP) for counts in seeds], axis=1)
    seeds_DS = np.random.default_rng(draw).integers(len(seeds), size=tau_DS.shape)
    return np.take_along_axis(tau_DS, seeds_DS, axis=1).mean(axis=1)


def _taus(counts: TauCounts, prompts_DP: np.ndarray) -> np.ndarray:
    tokens_D, rounds_D = (by_P[prompts_DP].sum(1) for by_P in counts)
    return tokens_D / rounds_D
