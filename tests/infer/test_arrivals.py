"""Clients who come by a Poisson law."""

import numpy as np
import pytest

from infer.bench.serving.clients import arrivals
from infer.bench.serving.results import percentiles


def test_arrivals_follow_a_poisson_law():
    times = arrivals(4000, 5.0, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0 and times == arrivals(4000, 5.0, seed=3)
    assert times != arrivals(4000, 5.0, seed=4)
    assert gaps.mean() == pytest.approx(0.2, rel=0.06) == pytest.approx(gaps.std(), rel=0.06)
    # How many come in a second has Poisson's variance, which is its mean.
    counts = np.histogram(times, np.arange(0, int(times[-1])))[0]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1) == pytest.approx(5.0, rel=0.1)


def test_percentiles_by_hand():
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p95": 95.0}
    assert percentiles([]) == {"p50": None, "p95": None}
