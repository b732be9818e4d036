"""When clients come who know nothing of each other, and how long they wait."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """When each client comes, in seconds: the first at once, then `rate` a second on average.

    The gaps follow an exponential law, so their number in any time is Poisson's.
    """
    return list(itertools.islice(_times(rate, seed), count))


def arrivals_within(seconds: float, rate: float, seed: int = 0) -> list[float]:
    """The same clients, those who come before so many seconds have passed."""
    return list(itertools.takewhile(lambda time: time < seconds, _times(rate, seed)))


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The half and all but a twentieth of the values are below these; None without values."""
    found = np.quantile(values, (0.5, 0.95)).tolist() if len(values) else (None, None)
    return dict(zip(("p50", "p95"), found, strict=True))


def _times(rate: float, seed: int) -> Iterator[float]:
    law, time = random.Random(seed), 0.0
    while True:
        yield time
        time += law.expovariate(rate)
