"""Shares of several sources are exact for any number of steps, and a run may start at any step."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from moa_jax.config import DataConfig
from moa_jax.data import batches
from moa_jax.data.mixture import Mixture, deal
from tests.data.conftest import numbered_rows
from tests.model_folders import refusal


def dealt(source: Mixture, steps: range) -> np.ndarray:
    """Returns the row numbers of these batches, in order."""
    return np.concatenate([source.batch(step).tokens_BT[:, 0] for step in steps])


@pytest.mark.parametrize(
    "weights", [(1, 1), (0.7, 0.3), (2, 1, 1), (0.9, 0.09, 0.01), (1 / 3, 0.5), (1e-4, 1), (5,)]
)
def test_shares_are_exact_at_any_length(weights):
    shares_P = np.array(weights, float) / sum(weights)
    source_N, number_N = deal(shares_P, 0, 30000)
    counts_NP = np.cumsum(source_N[:, None] == np.arange(len(weights)), axis=0)
    wanted_NP = np.arange(1, 30001)[:, None] * shares_P
    assert np.abs(counts_NP - wanted_NP).max() <= (len(weights) + 1) / 2
    for source in range(len(weights)):  # each deals its rows one after the other
        own_R = number_N[source_N == source]
        np.testing.assert_array_equal(own_R, np.arange(len(own_R)))


@pytest.mark.parametrize("first", [0, 1, 17, 4096, 10**9 + 7])
def test_any_part_of_a_run_is_found_without_those_before_it(first):
    shares_P = np.array([0.61, 0.3, 0.09])
    whole = deal(shares_P, first, 600)
    parts = [deal(shares_P, first + i, 7) for i in range(0, 595, 7)]
    for one, several in zip(whole, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(one[:595], np.concatenate(several))


def test_each_source_runs_through_epochs_of_its_own():
    source = Mixture([numbered_rows(5, 0), numbered_rows(40, 100)], (0.5, 0.5), 10, seed=3)
    assert len(source) == 4 and source.rows_per_batch == 10
    run_N = dealt(source, range(8))
    few_N, many_N = run_N[run_N < 100], run_N[run_N >= 100]
    assert sorted(many_N) == list(range(100, 140))
    epochs = few_N.reshape(8, 5)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(5), (8, 1)))
    assert len({tuple(epoch) for epoch in epochs}) > 4


# ---- from a config ------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """Returns a config with two files; the words of a row identify its file."""
    paths = []
    for word, count in (("one", 30), ("two", 10)):
        talk = {"messages": [{"role": "user", "content": "Hi"}]}
        talk["messages"].append({"role": "assistant", "content": word})
        paths.append(tmp_path / f"{word}.jsonl")
        paths[-1].write_text((json.dumps(talk) + "\n") * count + "{}\n")
    train = tuple(map(str, paths))
    return DataConfig(train, train, 64, 64, 8, weights=(0.25, 0.75), pack=False, seed=2)


@pytest.mark.parametrize("cache", [False, True])
def test_weights_of_a_config(config, tokenizer, tmp_path, cache):
    config = dataclasses.replace(config, cache=str(tmp_path / "cache") if cache else None)
    source, report = batches.load(config, tokenizer, 300, "train")
    for step in range(10):
        texts = [tokenizer.decode(row) for row in source.batch(step).tokens_BT]
        assert sum("two" in text for text in texts) == 6
    assert (report.kept, report.rows, sum(report.dropped.values())) == (40, 40, 2)
    (place,) = report.first.values()
    assert place.endswith("one.jsonl line 31")
    validation, same = batches.load(config, tokenizer, 300, "validation")
    assert len(validation.rows.tokens_BT) == 40 and same == report


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0), (1.0, float("nan"))])
def test_weights_that_make_no_shares(config, weights):
    line = refusal(dataclasses.replace, config, weights=weights)
    assert "choose numbers above 0" in line or "1 weights for 2 train paths; give one each" in line
