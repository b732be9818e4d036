"""Acceptance rates: the evidence of a shape's rounds about positions, and its decay."""

from __future__ import annotations

import numpy as np
import pytest

from moa_jax.config import DraftShape
from moa_jax.speculation.acceptance import GUESS, PRIOR, WINDOW, AcceptanceRates

FOUR = DraftShape(4)
ROUNDS = [3, 1, 3, 1, 1, 2]
TREE = DraftShape(4, 2, 6)


def after(shape: DraftShape, accepted: list[int], rounds: int, times: int = 1) -> AcceptanceRates:
    found = AcceptanceRates(5)
    for _ in range(times):
        found.update(shape, accepted, rounds)
    return found


def test_the_example_of_the_docstring():
    found = after(FOUR, ROUNDS * 1000, 1)
    assert found.rates(FOUR) == pytest.approx([1.0, 0.5, 2 / 3], abs=0.03)
    assert found.tokens(FOUR) == pytest.approx(2.83, abs=0.08)
    assert found.tokens(DraftShape(1)) == 1.0


def test_a_position_is_counted_in_rounds_that_accepted_the_one_before():
    found = AcceptanceRates(2)
    found.update(DraftShape(3), [0] * 30 + [2] * 10, 1)
    assert found._counts == [40, 10]
    assert found._rates == pytest.approx([0.25, 1.0])


def test_the_prior_of_a_position_is_the_rate_before_it():
    found = after(FOUR, ROUNDS * 1000, 1)
    *_, third, fourth = found.rates(DraftShape(5))
    assert fourth == third
    assert AcceptanceRates(2).rates(DraftShape(3)) == pytest.approx([PRIOR, PRIOR])


def test_one_call_does_not_replace_earlier_ones():
    found = after(FOUR, [3] * 8, 8, times=4)
    found.update(FOUR, [0], 1)
    assert 0.8 < found.rates(FOUR)[0] < 0.95


@pytest.mark.parametrize("rows", [1, 64])
def test_rounds_of_many_rows_decay_as_those_of_one(rows):
    found = after(FOUR, [0] * 8 * rows, 8, times=100)
    assert found.rates(FOUR)[0] < 0.1
    for _ in range(2 * WINDOW // 8):
        found.update(FOUR, [3] * 8 * rows, 8)
    assert found.rates(FOUR)[0] > 0.75


def test_positions_that_no_round_reaches_decay():
    found = after(FOUR, [3] * 8, 8, times=20)
    for _ in range(40):
        found.update(FOUR, [0] * 8, 8)
    assert found.rates(FOUR)[2] < 0.3


@pytest.mark.parametrize("rows", [1, 64])
def test_plain_rounds_widen_the_confidence_interval(rows):
    found = after(FOUR, [0] * 8 * rows, 8, times=20)
    before = found.tokens(FOUR, 2.0)
    found.age(2 * WINDOW)
    assert found.tokens(FOUR, 2.0) > before + 0.3
    assert found.tokens(FOUR) < found.tokens(FOUR, 2.0) <= 4.0


def test_an_upper_bound_is_that_of_wilson():
    found = after(DraftShape(2), [0] * 8, 8, times=50)
    count, (rate,) = found._counts[0] + GUESS, found.rates(DraftShape(2))
    (upper,) = found.rates(DraftShape(2), 2.0)
    # The bound is the rate from which `rate` lies two standard errors away.
    assert upper - 2 * np.sqrt(upper * (1 - upper) / count) == pytest.approx(rate)


def test_chains_and_trees_inform_each_other():
    of_chain, of_tree = after(FOUR, [1, 0] * 400, 1), after(TREE, [1, 0] * 400, 1)
    assert of_chain.rates(TREE)[0] == pytest.approx(1 - 0.5**1.5, abs=0.02)
    assert of_tree.rates(TREE)[0] == pytest.approx(0.5, abs=0.03)
    assert of_tree.rates(FOUR)[0] == pytest.approx(1 - 0.5 ** (1 / 1.5), abs=0.03)
