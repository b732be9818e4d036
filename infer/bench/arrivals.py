"""Arrival times of independent clients, and percentiles of their latencies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times (s) of `count` clients: the first at 0, then `rate` per second on average.

    Gaps have an exponential distribution, so the arrivals are a Poisson process.
    """
    return list(itertools.islice(_times(rate, seed), count))


def arrivals_within(seconds: float, rate: float, seed: int = 0) -> list[float]:
    """The arrival times of `arrivals` before `seconds`."""
    return list(itertools.takewhile(lambda time: time < seconds, _times(rate, seed)))


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The median and the 95th percentile; None if `values` is empty."""
    found = np.quantile(values, (0.5, 0.95)).tolist() if len(values) else (None, None)
    return dict(zip(("p50", "p95"), found, strict=True))


def _times(rate: float, seed: int) -> Iterator[float]:
    random_gaps, time = random.Random(seed), 0.0
    while True:
        yield time
        time += random_gaps.expovariate(rate)
