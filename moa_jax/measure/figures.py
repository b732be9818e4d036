"""Statistics of measured runs.

A run is one batch of prompts decoded once; its rate is the tokens of all its rows after their
first, which comes from prefill, over the seconds from prefill's end to the last row's end.

    tokens/s        median of the rates of all runs, with quartiles
    speedup         median over batches of (median rate over repeats / that of plain decoding)
    ... of totals   (all tokens / all seconds) / that of plain decoding
    tau             tokens after each first one / verifications, both summed over rows
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moa_jax.decode.session import Result

Rates = dict[int, list[float]]  # of a batch's repeats, by the batch


class Run(NamedTuple):
    """One batch of prompts decoded once."""

    batch: int  # which batch
    results: tuple[Result, ...]

    @property
    def tokens(self) -> int:
        return sum(sum(result.accept_lengths) for result in self.results)

    @property
    def seconds(self) -> float:
        return self.results[0].decode_s

    @property
    def rounds(self) -> int:
        """Rounds of the loop: those of the longest row."""
        return max(result.rounds for result in self.results)

    @property
    def answers(self) -> list[list[int]]:
        return [result.token_ids for result in self.results]


def summarise(runs: Sequence[Run], levels: int) -> dict[str, Any]:
    """Speed and acceptance of one mode whose rounds commit up to `levels` tokens."""
    runs = [run for run in runs if run.rounds]
    rates = [rate for each in rates_of(runs).values() for rate in each]
    results = [result for run in runs for result in run.results]
    rounds = sum(result.rounds for result in results)
    tokens = sum(run.tokens for run in runs)
    return {
        "tokens_per_s": median(rates),
        "tokens_per_s_quartiles": quartiles(rates),
        "tau": tokens / rounds if rounds else None,
        "tokens": tokens,
        "rounds": rounds,
        "ms_per_round": median([1e3 * run.seconds / run.rounds for run in runs]),
        "prefill_ms": median([1e3 * run.results[0].prefill_s for run in runs]),
        **acceptance(results, levels),
    }


def beside(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """How much faster than plain decoding, and in how many answers it wrote the same."""
    ratios = ratios_of(rates_of(runs), rates_of(plain))
    known = {run.batch: run.answers for run in plain}
    first = {run.batch: run.answers for run in runs}
    pairs = [pair for b in first if b in known for pair in zip(first[b], known[b], strict=True)]
    return {
        "speedup": median(ratios),
        "speedup_quartiles": quartiles(ratios),
        "speedup_of_totals": _ratio(_total_rate(runs), _total_rate(plain)),
        "same_as_plain": sum(ours == theirs for ours, theirs in pairs),
        "answers": len(pairs),
    }


def acceptance(results: Iterable[Result], levels: int) -> dict[str, Any]:
    """Share of accepted drafts, all and by position; position 1 is the root's child.

    Unconditional: of the rounds that drafted the position; conditional: of those that also accepted
    the one before. The last round of an answer is left out, since a stop or the limit cut it.
    """
    results = list(results)
    rounds = [
        (length - 1, levels)
        for result in results
        for length, levels in zip(
            result.accept_lengths[:-1], (result.drafted_levels or result.drafted)[:-1], strict=True
        )
    ]
    num_drafted = sum(sum(result.drafted[:-1]) for result in results)
    hits, tried, reached = [], [], []
    for position in range(1, levels):
        hits.append(sum(accepted >= position for accepted, _ in rounds))
        tried.append(sum(d >= position for _, d in rounds))
        reached.append(sum(a >= position - 1 and d >= position for a, d in rounds))
    return {
        "acceptance_rate": _ratio(sum(a for a, _ in rounds), num_drafted),
        "acceptance_unconditional": [_ratio(h, t) for h, t in zip(hits, tried, strict=True)],
        "acceptance_conditional": [_ratio(h, r) for h, r in zip(hits, reached, strict=True)],
    }


def rates_of(runs: Sequence[Run]) -> Rates:
    """Tokens/s of each batch's repeats; batches that ended with prefill are left out."""
    rates: Rates = defaultdict(list)
    for run in runs:
        if run.rounds:
            rates[run.batch].append(run.tokens / run.seconds)
    return dict(rates)


def ratios_of(ours: Rates, theirs: Rates) -> list[float]:
    """The ratio of medians over repeats, for each batch that both have."""
    return [median(ours[batch]) / median(theirs[batch]) for batch in ours if batch in theirs]


def median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def quartiles(values: Sequence[float]) -> list[float] | None:
    """The first and the third."""
    return np.quantile(values, (0.25, 0.75)).tolist() if len(values) else None


def _total_rate(runs: Sequence[Run]) -> float | None:
    return _ratio(sum(run.tokens for run in runs), sum(run.seconds for run in runs))


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
