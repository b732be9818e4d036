"""Statistics of measured runs, and bootstrap intervals of tau.

A run is one batch of prompts decoded once. A run's rate is the tokens of all its rows, without the
first token per row (from prefill), over the seconds from the end of prefill to the last row's end.

    tokens/s        median of the rates of all runs, with quartiles
    speedup         median over batches of (median rate over repeats / plain decoding's)
    ... of totals   (all tokens / all seconds) / plain decoding's
    tau             tokens after the first per row / verifications, both summed over rows

References: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13 (percentiles).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moa_jax.decode.session import Result

DRAWS, SHARE = 1000, 0.9  # bootstrap draws, and an interval's share of the draws
Interval = tuple[float, float]


class Run(NamedTuple):
    """One batch of prompts decoded once; `batch` is the batch's index."""

    batch: int
    results: tuple[Result, ...]

    @property
    def tokens(self) -> int:
        return sum(sum(result.accept_lengths) for result in self.results)

    @property
    def seconds(self) -> float:
        return self.results[0].decode_s

    @property
    def rounds(self) -> int:
        """Rounds of the loop: the maximum over rows."""
        return max(result.rounds for result in self.results)


def summarise(runs: Sequence[Run], levels: int) -> dict[str, Any]:
    """Speed and acceptance of one mode whose rounds commit up to `levels` tokens.

    Runs that ended with prefill are excluded.
    """
    runs = [run for run in runs if run.rounds]
    rates = [run.tokens / run.seconds for run in runs]
    results = [result for run in runs for result in run.results]
    tokens, rounds = sum(run.tokens for run in runs), sum(result.rounds for result in results)
    return {
        "tokens_per_s": median(rates),
        "tokens_per_s_quartiles": quartiles(rates),
        "tau": ratio(tokens, rounds),
        "tokens": tokens,
        "rounds": rounds,
        "ms_per_round": median([1e3 * run.seconds / run.rounds for run in runs]),
        "prefill_ms": median([1e3 * run.results[0].prefill_s for run in runs]),
        **acceptance(results, levels),
    }


def beside(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Speedup over plain decoding, and the number of answers that equal plain decoding's."""
    ours, theirs = _rates(runs), _rates(plain)
    ratios = [median(ours[batch]) / median(theirs[batch]) for batch in ours if batch in theirs]
    known = {run.batch: run.results for run in plain}
    last = {run.batch: run.results for run in runs if run.batch in known}
    pairs = [pair for b in last for pair in zip(last[b], known[b], strict=True)]
    totals = [
        ratio(sum(run.tokens for run in each), sum(run.seconds for run in each))
        for each in (runs, plain)
    ]
    return {
        "speedup": median(ratios),
        "speedup_quartiles": quartiles(ratios),
        "speedup_of_totals": ratio(*totals),
        "same_as_plain": sum(one.token_ids == other.token_ids for one, other in pairs),
        "answers": len(pairs),
    }


def acceptance(results: Iterable[Result], levels: int) -> dict[str, Any]:
    """Acceptance rate of drafts, overall and by position; position 1 is the root's child.

    Unconditional: of the rounds that drafted the position. Conditional: of the rounds that drafted
    the position and accepted the previous position. The last round of an answer is excluded,
    because a stop or the limit truncates it.
    """
    accepted, reached, drafted = [], [], 0  # per round: accepted, levels; all nodes
    for result in results:
        accepted += [length - 1 for length in result.accept_lengths[:-1]]
        reached += (result.drafted_levels or result.drafted)[:-1]
        drafted += sum(result.drafted[:-1])
    positions_P1 = np.arange(levels)[:, None]
    hits_PR = np.array(accepted, int) >= positions_P1  # position 0: the root
    tried_PR = np.array(reached, int) >= positions_P1
    hits_P = hits_PR.sum(1)[1:].tolist()
    came_P = (hits_PR[:-1] & tried_PR[1:]).sum(1).tolist()
    return {
        "acceptance_rate": ratio(sum(accepted), drafted),
        "acceptance_unconditional": list(map(ratio, hits_P, tried_PR.sum(1)[1:].tolist())),
        "acceptance_conditional": list(map(ratio, hits_P, came_P)),
    }


def median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def quartiles(values: Sequence[float]) -> list[float] | None:
    """The first and the third quartile; None if `values` is empty."""
    return np.quantile(values, (0.25, 0.75)).tolist() if len(values) else None


def ratio(above: float | None, below: float | None) -> float | None:
    """`above` / `below`; None if either is None or `below` is 0."""
    return above / below if above is not None and below else None


def _rates(runs: Sequence[Run]) -> dict[int, list[float]]:
    """Batch -> tokens/s per repeat; runs that ended with prefill are excluded."""
    rates: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        if run.rounds:
            rates[run.batch].append(run.tokens / run.seconds)
    return rates


# ---- intervals ----------------------------------------------------------------------------


class TauCounts(NamedTuple):
    """Tokens and rounds per prompt, (P,); compared counts must have the same prompts."""

    tokens_P: np.ndarray
    rounds_P: np.ndarray


def interval_of(seeds: Sequence[TauCounts], bases: Sequence[TauCounts] = ()) -> Interval:
    """Bootstrap interval of the mean tau over seeds; resamples seeds and prompts.

    With `bases`, the interval of the ratio to the mean tau of `bases`, with the same draws of
    prompts and separate draws of seeds. Prompts without rounds are not drawn; at least one prompt
    must have rounds.
    """
    (some,) = np.nonzero(np.all([counts.rounds_P for counts in (*seeds, *bases)], axis=0))
    prompts_DP = some[np.random.default_rng(0).integers(len(some), size=(DRAWS, len(some)))]
    tau_D = _mean_of_seeds(seeds, prompts_DP, draw=1)
    if bases:
        tau_D = tau_D / _mean_of_seeds(bases, prompts_DP, draw=2)
    low, high = np.quantile(tau_D, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def _mean_of_seeds(seeds: Sequence[TauCounts], prompts_DP: np.ndarray, draw: int) -> np.ndarray:
    taus = [each.tokens_P[prompts_DP].sum(1) / each.rounds_P[prompts_DP].sum(1) for each in seeds]
    tau_DS = np.stack(taus, axis=1)
    seeds_DS = np.random.default_rng(draw).integers(len(seeds), size=tau_DS.shape)
    return np.take_along_axis(tau_DS, seeds_DS, axis=1).mean(axis=1)
