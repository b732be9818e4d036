"""Training whose reused layers see what they see in decoding, beside the reference's rule."""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import load_drafter, load_target
from moa_jax.config import MaskConfig, Objective
from moa_jax.data.batch import Batch
from moa_jax.drafters import losses
from moa_jax.drafters.moa import Moa, block_configs, make, train
from moa_jax.model.llama import unembed
from moa_jax.training import distillation
from tests.compare import ARRAYS, assert_close, assert_value
from tests.drafters.test_moa import drafted_logits

LENGTHS, ROW = (20, 13), 36  # tokens of two conversations, and of a row that holds both
PROMPT, LONGEST = 5, 3  # tokens of a prompt, and of the longest run of unknown ones
KNOWN = (8, 9, 13, 17)  # answer tokens whose activations the drafter has
BLOCKS = {4: (5, 6, 7), 9: (10, 11, 12), 13: (14, 15, 16), 17: (18, 19)}  # last known: unknown


@dataclasses.dataclass(frozen=True)
class ReusingPair:
    """A drafter that reuses some of its target's layers; what its functions need."""

    moa: Moa
    params: Any
    target_params: Any  # layers stacked, as training has them

    @property
    def stacked(self):
        """What the drafter borrows in training."""
        return self.moa.shared_params(self.target_params)

    @property
    def shared(self):
        """The same in decoding: a list of layers."""
        layers, reused = self.stacked["layers"], self.moa.cfg.target_layer_inference
        cut = [jax.tree.map(lambda a, i=i: a[i], layers) for i in range(reused)]
        return self.stacked | {"layers": cut}


@functools.cache
def open_pair(folder, num_reused: int) -> ReusingPair:
    target = load_target(folder / "target", jnp.float32, layers="stacked")
    drafter = load_drafter(folder / "draft", target, target_layer_inference=num_reused)
    cfg = drafter.config
    moa = Moa(cfg, target.config, block_configs(cfg, target.config))
    return ReusingPair(moa, drafter.params, target.params)


@partial(jax.jit, static_argnums=0)
def tap(moa: Moa, target_params, batch: Batch):
    functions = make(moa.cfg, moa.target_cfg)
    return distillation.tap(moa.target_cfg, functions, target_params, batch, jnp.float32)


@partial(jax.jit, static_argnums=0)
def exact_logits(moa: Moa, params, shared, batch: Batch, tapped, known_BT):
    return unembed(shared, train.teacher_forced(moa, params, shared, batch, tapped, known_BT, 1))


@partial(jax.jit, static_argnums=0)
def reference_logits(moa: Moa, params, shared, batch: Batch, tapped, known_BT):
    draws = train.Draws(known_BT, jnp.zeros(len(known_BT), bool))
    found = train.trace(moa, Objective(), params, shared, batch, tapped, draws)
    return unembed(shared, found.feature_BTD)


def rows_of(*rows: tuple[int, ...]) -> Batch:
    """Rows that hold these of the two conversations, each a prompt and its answer."""
    random = np.random.default_rng(3)
    tokens = [random.integers(3, 101, length) for length in LENGTHS]

    def row(conversations: tuple[int, ...]) -> Batch:
        position = [np.arange(LENGTHS[i]) for i in conversations]
        segment = [np.full(LENGTHS[i], n) for n, i in enumerate(conversations, 1)]
        parts = [tokens[i] for i in conversations], segment, position
        whole = (np.concatenate(part).astype(np.int32) for part in parts)
        padded = [np.pad(part, (0, ROW - len(part))) for part in whole]
        return Batch(*padded, padded[2] >= PROMPT)

    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(row, rows))


def known_of(batch: Batch, answer: tuple[int, ...] = KNOWN):
    """Prompts and the named answer tokens."""
    return ~batch.response_BT | np.isin(batch.position_BT, answer)


@pytest.mark.parametrize(
    ("family", "num_reused", "layers"),
    [("qwen3", 1, "list"), pytest.param("llama31", 3, "stacked", marks=pytest.mark.slow)],
)
def test_equals_cached_decoding(family, num_reused, layers, saved):
    """At every unknown token; the reference's rule in the first block only."""
    pair = open_pair(saved / family, num_reused)
    batch = rows_of(*[(0,)] * len(BLOCKS))  # one copy for each block that is decoded
    tapped = tap(pair.moa, pair.target_params, batch)
    shared = pair.stacked if layers == "stacked" else pair.shared
    given = pair.moa, pair.params, shared, batch, tapped, known_of(batch)
    exact_TV, reference_TV = exact_logits(*given)[0], reference_logits(*given)[0]

    starts_B = np.array(list(BLOCKS), np.int32)
    drafted_BJV = drafted_logits(
        pair.moa, pair.params, pair.shared, batch.tokens_BT, tapped, starts_B + 1, LONGEST
    )
    for (start, tokens), drafted_JV in zip(BLOCKS.items(), drafted_BJV, strict=True):
        for t, expected_V in zip(tokens, drafted_JV, strict=False):
            assert_close(exact_TV[t], expected_V, f"token {t}")
            error = np.abs(reference_TV[t] - expected_V).max() / np.abs(expected_V).max()
            assert error < ARRAYS if start < PROMPT else error > 1e-2, f"reference's rule at {t}"


def test_packed_and_prompts_alone(saved):
    """Packing changes nothing; with no known answer token both rules are the same."""
    pair, batch = open_pair(saved / "qwen3", 1), rows_of((0,), (1,), (0, 1), (1, 0))
    tapped, known_BT = tap(pair.moa, pair.target_params, batch), known_of(batch)
    given = pair.moa, pair.params, pair.shared, batch, tapped
    exact_BTV = exact_logits(*given, known_BT)
    long, short = LENGTHS
    for b, start, alone in ((2, 0, 0), (2, long, 1), (3, 0, 1), (3, short, 0)):
        size = LENGTHS[alone]
        packed_TV = exact_BTV[b, start : start + size]
        assert_close(packed_TV, exact_BTV[alone, :size], f"conversation {alone} of row {b}")

    prompts_BT = known_of(batch, ())
    real_BT = batch.segment_BT > 0
    rules = (rule(*given, prompts_BT)[real_BT] for rule in (exact_logits, reference_logits))
    assert_close(*rules, "both rules")


def test_drafts_read_nothing_newer(saved):
    """A draft reads no activation after its last known token; a known token teaches nothing."""
    pair, batch = open_pair(saved / "qwen3", 1), rows_of(*[(0,)] * 4)
    tapped, known_BT = tap(pair.moa, pair.target_params, batch), known_of(batch)
    late = jax.tree.map(lambda rows_LBKTE: rows_LBKTE.at[:, :, :, 14:].set(7.0), tapped.rows_LBKTE)
    other = tapped._replace(rows_LBKTE=late, streams=(jnp.full_like(tapped.streams[0], 7.0),))
    given = pair.moa, pair.params, pair.shared, batch
    exact_TV, other_TV = (exact_logits(*given, x, known_BT)[0] for x in (tapped, other))
    drafted_T = np.isin(np.arange(ROW), sum(BLOCKS.values(), ()))
    before_T = np.arange(ROW) <= 16  # the block after token 13 ends here
    same_TV = np.asarray(exact_TV == other_TV)
    assert same_TV[drafted_T & before_T].all()
    assert not same_TV[drafted_T & ~before_T].all(axis=1).any()

    target_TV = unembed(pair.shared, tapped.hidden_BTD[0])
    known_T = known_BT[0] & (batch.segment_BT[0] > 0)
    assert_close(exact_TV[known_T], target_TV[known_T], "known tokens give the target's logits")


OPTION = Objective(MaskConfig(staircase=False, on_policy_reuse=True))


def trained_on(pair: ReusingPair):
    """What the loss takes."""
    batch = rows_of((0,), (1,), (0, 1), (1, 0))
    tapped = tap(pair.moa, pair.target_params, batch)
    return pair.params, pair.stacked, batch, tapped, jax.random.key(5), jnp.float32(0.2)


def test_option_chooses_the_rule(saved):
    """The loss is made of the exact rule's logits, which are not the reference's."""
    pair = open_pair(saved / "qwen3", 1)
    given = params, stacked, batch, tapped, key, progress = trained_on(pair)
    _, parts = jax.jit(train.make_loss(pair.moa, OPTION))(*given)
    known_BT = train.draw(OPTION.masks, key, batch, progress).known_BT
    target_BTV = unembed(stacked, tapped.hidden_BTD)

    def cross_entropy(rule) -> float:
        logits_BTV = rule(pair.moa, params, pair.shared, batch, tapped, known_BT)
        each_BT = losses.soft_cross_entropy(target_BTV, logits_BTV)
        return float(losses.answer_mean(each_BT, batch.response_BT))

    exact, reference = cross_entropy(exact_logits), cross_entropy(reference_logits)
    assert_value(parts["cross_entropy"], exact, "cross-entropy")
    assert abs(exact - reference) > 1e-3


@pytest.mark.slow
def test_option_trains_every_weight(saved):
    pair = open_pair(saved / "qwen3", 1)
    gradient = jax.jit(jax.grad(train.make_loss(pair.moa, OPTION), has_aux=True))
    weights, _ = gradient(*trained_on(pair))
    for leaf in jax.tree.leaves(weights):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0
