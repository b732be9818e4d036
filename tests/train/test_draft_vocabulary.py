"""The draft vocabulary of a run's own data: counted tokens, refused settings, saved files."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from moa_jax.config import Eagle3Config, TargetConfig
from moa_jax.data.batch import Batch
from moa_jax.data.batches import Batches
from moa_jax.data.mixture import Mixture
from moa_jax.decode.draft_vocabulary import (
    FILE,
    load_vocabulary,
    vocabulary_of,
)
from moa_jax.drafters import DRAFTERS
from moa_jax.pretrained import SpecialIds, Target, describe_target, load_drafter
from tests.model_folders import refusal
from tests.train.test_training import changed, distill_config
from train import distill, vocabulary
from train.run import draft_vocabulary
from train.run.draft_vocabulary import frequent_in

CONVERSATIONS = Path(__file__).parents[1] / "data" / "conversations.jsonl"


@pytest.fixture
def target(tmp_path) -> Target:
    """Returns a target of 10 tokens without weights; 9 ends a text."""
    config = TargetConfig("llama", 10, 2, None, False, 64)
    return Target(config, None, tmp_path, SpecialIds((9,)))


def rows_of(*rows: str) -> Batch:
    """Returns rows of tokens; the tokens after `|` are answers."""
    parts = [row.split("|") for row in rows]
    tokens_BT = np.array([[int(c) for c in a + b] for a, b in parts], np.int32)
    response_BT = np.array([[False] * len(a) + [True] * len(b) for a, b in parts])
    return Batch(tokens_BT, tokens_BT, tokens_BT, response_BT)


def test_answers_alone_are_counted(target, monkeypatch, capsys):
    """5 occurs three times, 2 twice, 3 and 4 once, 7 in questions alone; 9 ends a text."""
    rows = rows_of("777|55", "7|2354", "7777|2")
    for size, ids in ((1, [9]), (2, [5, 9]), (3, [2, 5, 9]), (4, [2, 3, 5, 9])):
        for block in (1, 2, 99):
            monkeypatch.setattr(draft_vocabulary, "ROWS", block)
            assert frequent_in(Batches(rows, 1, 0), size, target).ids_U.tolist() == ids
    assert "3 of 10 tokens cover 71.43% of the answers" in capsys.readouterr().err


def test_sources_of_a_mixture_count_by_their_shares(target):
    """Each row of the second source is dealt with two of the first, which has fewer rows."""
    sources = rows_of("0|11"), rows_of("0|22", "0|22", "0|22", "0|22", "0|33")
    for shares, ids in (((2, 1), [1, 9]), ((1, 2), [2, 9]), ((9, 10), [1, 9])):
        assert frequent_in(Mixture(sources, shares, 1, 0), 2, target).ids_U.tolist() == ids


def test_invalid_vocabularies_are_refused_before_training(small_target, tmp_path):
    config = changed(distill_config(tmp_path, small_target), draft_vocabulary=321)
    assert "ask for a size from 1 to 320" in refusal(distill.distill, config)
    own = changed(config, drafter=Eagle3Config(1, 24))
    assert "kind eagle3 has a head of its own" in refusal(distill.distill, own)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def drafter(small_target, tmp_path) -> Path:
    """Returns the folder of an untrained drafter."""
    config, target = distill_config(tmp_path, small_target), describe_target(small_target)
    params = DRAFTERS["moa"].make(config.drafter, target.config).init(jax.random.key(0))
    distill.save(config, params, target, None, 0)
    return Path(config.output)


def counted(*flags: str) -> None:
    corpus = ["--corpus", str(CONVERSATIONS), "--limit", "9", "--size", "40"]
    vocabulary.main([*corpus, *map(str, flags)])


def test_the_program_adds_it_to_a_drafter_alone(small_target, tmp_path, drafter, capsys):
    target = describe_target(small_target)
    counted("--target", small_target, "--draft", drafter)
    assert f"{drafter / FILE}: 40 of 320 tokens cover" in capsys.readouterr().out
    for folder, line in (
        (drafter, f"{drafter / FILE} exists already; remove it or use --output"),
        (small_target, "a drafter of kind independent has a head of its own"),  # a whole model
    ):
        assert line in refusal(counted, "--target", small_target, "--draft", folder)
    config, params = distill_config(tmp_path, small_target), load_drafter(drafter, target).params
    distill.save(config, params, target, None, 0)  # a run that writes the folder again keeps it
    assert load_vocabulary(drafter, target).ids_U.size == 40
    found = vocabulary_of(np.array([2], np.int32), target)
    distill.save(config, params, target, found, 0)
    assert load_vocabulary(drafter, target).ids_U.tolist() == [2]
