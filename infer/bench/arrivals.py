"""Arrival times of independent clients, and percentiles of their latencies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times (s) of `count` clients: the first at 0, then `rate` per second on average.

    Gaps have an exponential distribution, so the arrivals are a Poisson process.
    """
    gaps = random.Random(seed)
    times = itertools.accumulate((gaps.expovariate(rate) for _ in range(count - 1)), initial=0.0)
    return list(times)


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The median and the 95th percentile; None if `values` is empty."""
    found = np.quantile(values, (0.5, 0.95)).tolist() if len(values) else (None, None)
    return dict(zip(("p50", "p95"), found, strict=True))
