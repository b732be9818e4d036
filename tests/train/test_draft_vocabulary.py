"""The draft vocabulary of a run's own data: counted tokens, refused settings, saved files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.config import BorrowedConfig, ChunkConfig, Eagle3Config, Objective, TargetConfig
from moa_jax.data.batch import Batch
from moa_jax.data.batches import Batches
from moa_jax.data.mixture import Mixture
from moa_jax.decode.draft_vocabulary import FILE, load_vocabulary, vocabulary_of
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.pretrained import SpecialIds, Target, describe_target, load_drafter
from moa_jax.training.distillation import _draftable, make_loss, make_probe, over_vocabulary
from tests.conftest import slow
from tests.model_folders import refusal
from tests.train.test_packing import KINDS, SMALL, TARGET, assert_close, frozen_weights
from tests.train.test_training import changed, distill_config
from train import bench, distill, vocabulary
from train.run import draft_vocabulary
from train.run.draft_vocabulary import frequent_in

CONVERSATIONS = Path(__file__).parents[2] / "moa_jax/demo/conversations.jsonl"


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


# ---- training over it ---------------------------------------------------------------------

IDS = np.arange(1, 96, 2)  # half of the target's tokens
SLICED = {name: KINDS[name] for name in ("moa-reuse", "eagle")}
SLICED["independent-borrowed"] = (BorrowedConfig(SMALL), Objective(chunks=ChunkConfig(head=7)))


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[TargetConfig, dict]]:
    """Returns a target, and the same target without the tokens that are not in IDS."""
    frozen = frozen_weights(TARGET)
    cut = {"embed": frozen["embed"][IDS], "lm_head": frozen["lm_head"][:, IDS]}
    small = dataclasses.replace(TARGET, vocab_size=len(IDS))
    return {"whole": (TARGET, frozen), "cut": (small, frozen | cut)}


def trained(model, name: str, ids, batch: Batch) -> tuple:
    """Returns loss, metrics and gradient of a drafter over these ids, and sums of its probe."""
    (target, frozen), (config, objective) = model, SLICED[name]
    drafter = DRAFTERS[method_of(config)].make(config, target, objective)
    params = jax.tree.map(lambda x: 3 * x, jax.jit(drafter.init)(jax.random.key(2)))
    if ids is not None:
        drafter = over_vocabulary(drafter, ids)
    gradient = jax.value_and_grad(make_loss(target, drafter, jnp.float32), has_aux=True)
    probe = make_probe(target, drafter, jnp.float32, horizon=3)
    both = lambda *x: (gradient(*x, jax.random.key(3), jnp.float32(0.7)), probe(*x))
    return jax.jit(both)(params, frozen, batch)


def tokens_of(draw: np.random.Generator, size: int) -> Batch:
    tokens_BT, position_BT = draw.integers(0, size, (2, 20)), np.tile(np.arange(20), (2, 1))
    return Batch(tokens_BT, np.ones_like(tokens_BT), position_BT, position_BT >= 5)


@pytest.mark.parametrize("name", [*map(slow, sorted(SLICED))])
def test_training_is_that_of_a_target_with_these_tokens_alone(name, models):
    """Text of these tokens is the same text to both; the whole vocabulary cuts nothing."""
    batch = tokens_of(np.random.default_rng(0), len(IDS))
    (small, sums) = trained(models["cut"], name, None, batch)
    same = batch._replace(tokens_BT=IDS[batch.tokens_BT])
    ((loss, metrics), gradient), cut_sums = trained(models["whole"], name, IDS, same)
    assert metrics.pop("oov_tokens") == 0 and 0 < cut_sums.pop("oov_mass")
    cut_sums |= {"hits_J": sums["hits_J"]}  # the target's argmax may be another token
    assert_close((((loss, metrics), gradient), cut_sums), (small, sums))
    whole = trained(models["whole"], name, None, same)
    ((loss, metrics), gradient), sums = trained(models["whole"], name, range(96), same)
    assert metrics.pop("oov_tokens") == 0 and sums.pop("oov_mass") < 1e-3
    assert_close((((loss, metrics), gradient), sums), whole)


def test_tokens_outside_are_left_out_and_their_shares_are_reported(models):
    """The target's mass is inside or outside; so are tokens, except at the end of a row."""
    batch = tokens_of(np.random.default_rng(1), 96)
    rest = np.setdiff1d(np.arange(96), IDS)
    ((found, inside), (other, outside)) = (
        trained(models["whole"], "eagle", ids, batch) for ids in (IDS, rest)
    )
    assert_close(inside["oov_mass"] + outside["oov_mass"], inside["tokens"])
    shares = [metrics["oov_tokens"] for (_, metrics), _ in (found, other)]
    np.testing.assert_allclose(sum(shares), 28 / 30, rtol=1e-5)
    even = batch._replace(tokens_BT=batch.tokens_BT // 2 * 2)  # no token is in IDS
    even = even._replace(response_BT=even.response_BT & (even.position_BT < 19))
    ((_, metrics), _), _ = trained(models["whole"], "eagle", IDS, even)
    assert metrics["cross_entropy"] == 0 and metrics["oov_tokens"] > 0.99
    one = Batch(*(np.array([row]) for row in ([5, 1, 2, 3, 4], [1, 1, 1, 2, 2])), None, None)
    assert _draftable(one, [3, 4], 6).tolist() == [[False, False, True, True, True]]


@pytest.mark.slow
def test_a_step_is_timed_beside_that_of_the_whole_vocabulary(capsys):
    flags = ["--config", "configs/tiny.py", "--draft_vocabulary", "512", "--json", "--no-plain"]
    bench.main([*flags, "--cached-target", "bfloat16", "--steps", "1", "--data.rows_per_batch=2"])
    report = json.loads(capsys.readouterr().out)
    narrow, whole = report["modes"]
    assert (narrow["mode"], whole["mode"]) == ("distill", "whole")
    assert narrow["model_flops_per_token"] < 0.5 * whole["model_flops_per_token"]
    assert report["gain"]["whole"] == narrow["tokens_per_s"] / whole["tokens_per_s"]


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
