"""Losses as settings; work in chunks of tokens uses less memory and gives the same numbers."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import InputError
from moa_jax.config import ChunkConfig, LossConfig, MaskConfig, MoaConfig, Objective
from moa_jax.data.batch import Batch
from moa_jax.drafters import distill_loss, losses
from moa_jax.drafters.moa import make
from moa_jax.model import attention
from moa_jax.model.cache import KV
from moa_jax.training.distillation import abstract_frozen, make_loss
from tests.compare import assert_norm_close, assert_value
from tests.conftest import slow
from tests.train.test_packing import TARGET, frozen_weights

DRAFTER = MoaConfig(1, 24, 1, 24, 2, 16, target_layer_inference=1)
ON_POLICY = Objective(MaskConfig(on_policy_reuse=True), LossConfig("log_acceptance"))
T = 30  # not a multiple of any chunk below


def batch_of(rows: int = 3) -> Batch:
    tokens_BT = np.random.default_rng(0).integers(0, 96, (rows, T)).astype(np.int32)
    position_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (rows, T))
    response_BT = position_BT >= np.array([[5], [9], [20]])[:rows]
    return Batch(tokens_BT, np.ones((rows, T), np.int32), position_BT, response_BT)


stacked_target = functools.cache(partial(frozen_weights, TARGET))


@functools.cache
def drafter_params() -> dict:
    init = jax.jit(make(DRAFTER, TARGET).init)
    return jax.tree.map(lambda x: 3 * x, init(jax.random.key(2)))


@functools.cache
def gradient(objective: Objective):
    """Returns the compiled gradient of the loss, and its parts."""
    loss = make_loss(TARGET, make(DRAFTER, TARGET, objective), jnp.float32)
    return jax.jit(jax.grad(loss, has_aux=True))


def gradient_of(objective: Objective):
    given = (drafter_params(), stacked_target(), batch_of(), jax.random.key(3))
    return jax.tree.map(np.asarray, gradient(objective)(*given, jnp.float32(0.5)))


# ---- chunks -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("objective", [Objective(), ON_POLICY], ids=["paper", "on-policy"])
def test_chunked_training_equals_plain(objective):
    whole = dataclasses.replace(objective, chunks=ChunkConfig(0, 0))
    pieces = dataclasses.replace(objective, chunks=ChunkConfig(7, 11))
    (expected, parts), (found, same) = gradient_of(whole), gradient_of(pieces)
    for name, value in parts.items():
        assert_value(same[name], value, name)
    jax.tree.map(lambda a, b: assert_norm_close(a, b, "gradient"), found, expected)


@pytest.mark.slow
def test_long_attention_in_chunks_equals_short(monkeypatch):
    keys = jax.random.split(jax.random.key(0), 3)
    q_BKGTE = jax.random.normal(keys[0], (2, 2, 3, T, 4))
    kv = KV(*(jax.random.normal(key, (2, 2, T, 4)) for key in keys[1:]))
    mask_1TT = jnp.tril(jnp.ones((1, T, T), bool))

    def found():
        total = lambda q, kv: jnp.sum(jnp.sin(attention.attend(q, kv, mask_1TT)))
        return jax.jit(jax.grad(total, (0, 1)))(q_BKGTE, kv)

    whole = found()
    monkeypatch.setattr(attention, "QUERY_CHUNK", 8)
    jax.tree.map(lambda a, b: assert_norm_close(a, b, "gradient"), found(), whole)


@pytest.mark.parametrize(
    "token", ["cross_entropy", slow("total_variation"), slow("log_acceptance")]
)
def test_gradients_made_beside_the_logits_are_those_of_a_backward_pass(token):
    """Holds for drafts of unequal weights, and if a program recomputes the forward."""
    shared, batch = stacked_target(), batch_of()
    hidden_BTD, *features = jax.random.normal(jax.random.key(1), (3, 3, T, 32))
    asked = [batch.response_BT, batch.response_BT & (batch.position_BT > 12)]

    def total(features, size):
        objective = Objective(chunks=ChunkConfig(head=size), loss=LossConfig(token))
        drafts = [distill_loss.Draft(*each) for each in zip(features, asked, strict=True)]
        first, second = distill_loss.token_losses(objective, shared, None, hidden_BTD, drafts)
        return 0.3 * first[token] + 1.7 * second[token], (first, second)

    gradient = lambda f: jax.jit(jax.value_and_grad(f, has_aux=True))(features)
    (expected, parts), slopes = gradient(lambda x: total(x, 0))
    again = jax.checkpoint(lambda x: total(x, 7))
    for within in (lambda x: total(x, 7), again):
        (value, found), made = gradient(within)
        compared = (value, found, made), (expected, parts, slopes)
        jax.tree.map(lambda a, b: assert_norm_close(a, b, token), *compared)


# ---- losses -------------------------------------------------------------------------------


def test_token_losses_equal_their_definitions():
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(7), (2, 3)) for _ in range(2))
    target_BTV, draft_BTV = np.log(p) + 3.0, np.log(q) - 1.0  # logits with any constant offset
    overlap_BT = np.minimum(p, q).sum(-1)
    np.testing.assert_allclose(losses.overlap(target_BTV, draft_BTV), overlap_BT, rtol=1e-5)
    total_variation_BT = 0.5 * np.abs(p - q).sum(-1)
    np.testing.assert_allclose(1 - overlap_BT, total_variation_BT, rtol=1e-5)
    kl_BT = (p * np.log(p / q)).sum(-1)
    found_BT = losses.relative_entropy(target_BTV, draft_BTV)
    np.testing.assert_allclose(found_BT, kl_BT, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("token", ["total_variation", "log_acceptance"])
def test_loss_is_the_token_loss_chosen(token):
    cfg = LossConfig(token, token_weight=2.0, feature_weight=0.0)
    gradient, parts = gradient_of(Objective(loss=cfg))
    assert_value(parts["loss"], 2.0 * parts[token], token)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_feature_loss_fades():
    objective = Objective(loss=LossConfig(feature_fade=0.4))
    loss = jax.jit(make_loss(TARGET, make(DRAFTER, TARGET, objective), jnp.float32))
    given = (drafter_params(), stacked_target(), batch_of(), jax.random.key(3))
    for progress, weight in ((0.0, 1.0), (0.2, 0.5), (0.4, 0.0), (0.9, 0.0)):
        _, parts = loss(*given, jnp.float32(progress))
        feature = 0.5 * parts["feature_loss"] + 0.5 * parts["prev_feature_loss"]
        assert_value(parts["loss"], 0.1 * parts["cross_entropy"] + weight * feature, "loss")


WEIGHTS = ((-1.0, 1.0), (0.1, float("nan")), (0, 0))  # of tokens and of features
IMPOSSIBLE = [(LossConfig, dict(token_weight=t, feature_weight=f)) for t, f in WEIGHTS]
IMPOSSIBLE += [(LossConfig, dict(feature_fade=0.0)), (ChunkConfig, dict(head=-1))]
IMPOSSIBLE += [(MaskConfig, dict(shortest_future=9, longest_future=8))]
IMPOSSIBLE += [(MaskConfig, dict(first_tokens=True, bounded=False))]


@pytest.mark.parametrize("kind, settings", IMPOSSIBLE)
def test_impossible_settings_are_refused(kind, settings):
    with pytest.raises(InputError):
        kind(**settings)


# ---- memory -------------------------------------------------------------------------------


def test_no_array_of_tokens_by_vocabulary_lives():
    """Neither direction holds logits of all tokens: the program has no such shape."""
    V, rows, length = 5_003, 2, 64
    cfg = dataclasses.replace(TARGET, vocab_size=V)
    abstract = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    batch = Batch(*(abstract((rows, length), dtype) for dtype in ("int32",) * 3 + ("bool",)))

    def shapes(size: int) -> str:
        drafter = make(DRAFTER, cfg, Objective(chunks=ChunkConfig(size, size)))
        params = jax.eval_shape(drafter.init, jax.random.key(0))
        gradient = jax.jit(jax.grad(make_loss(cfg, drafter, jnp.float32), has_aux=True))
        given = (abstract_frozen(cfg), batch, jax.random.key(0), jnp.float32(0))
        return gradient.lower(params, *given).as_text()

    chunked = shapes(16)
    assert f"{rows}x{length}x{V}" not in chunked
    assert f"{rows}x16x{V}" in chunked
