"""Losses and agreement measures over answer tokens, all float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from moa_jax.data.batch import Batch

Array = jax.Array


def answer_share(response_BT: Array) -> Array:
    """Each token's weight in a mean over the batch's answer tokens; all 0 if there are none.

    The divisor's small constant is that of the authors' code (train/moa_spec.py).
    """
    return response_BT / (jnp.sum(response_BT) + 1e-5)


def answer_mean(value_BT: Array, response_BT: Array) -> Array:
    """Mean over the batch's answer tokens; 0 if there are none."""
    return jnp.sum(value_BT * answer_share(response_BT))


def soft_cross_entropy(target_logits_BTV: Array, draft_logits_BTV: Array) -> Array:
    """- sum_v p(v) log q(v) per token; p is the target's distribution, q the drafter's."""
    p = jax.nn.softmax(target_logits_BTV, axis=-1)
    return -jnp.sum(p * jax.nn.log_softmax(draft_logits_BTV, axis=-1), axis=-1)


def relative_entropy(target_logits_BTV: Array, draft_logits_BTV: Array) -> Array:
    """KL(p, q) in nats per token, from the target's distribution to the drafter's."""
    log_p, log_q = (jax.nn.log_softmax(x, axis=-1) for x in (target_logits_BTV, draft_logits_BTV))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def overlap(target_logits_BTV: Array, draft_logits_BTV: Array) -> Array:
    """sum_v min(p(v), q(v)) per token: the chance that a draft sampled from q is accepted.

    References: 2211.17192, theorem 3.5; 1 - overlap is the total variation of p and q.
    """
    p, q = (jax.nn.softmax(x, axis=-1) for x in (target_logits_BTV, draft_logits_BTV))
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def entropy(logits_BTV: Array) -> Array:
    """Entropy in nats of each token's distribution."""
    return soft_cross_entropy(logits_BTV, logits_BTV)


def smooth_l1(a: Array, b: Array) -> Array:
    """Huber distance with knee 1, mean over the last axis."""
    d = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    return jnp.mean(jnp.where(d < 1.0, 0.5 * d * d, d - 0.5), axis=-1)


def next_token_loss(logits_BTV: Array, batch: Batch) -> tuple[Array, dict[str, Array]]:
    """Mean cross-entropy of the next token, over tokens with a next token in their conversation.

    Metrics: `loss`, and `accuracy` over answer tokens.
    """
    label_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
    next_segment_BT = jnp.roll(batch.segment_BT, -1, axis=1).at[:, -1].set(0)
    has_next_BT = (next_segment_BT == batch.segment_BT) & (batch.segment_BT > 0)
    answer_next_BT = has_next_BT & jnp.roll(batch.response_BT, -1, axis=1)
    log_q = jax.nn.log_softmax(logits_BTV, axis=-1)
    nll_BT = -jnp.take_along_axis(log_q, label_BT[..., None], axis=-1)[..., 0]
    right_BT = jnp.argmax(logits_BTV, axis=-1) == label_BT
    loss = answer_mean(nll_BT, has_next_BT)
    return loss, {"loss": loss, "accuracy": answer_mean(right_BT, answer_next_BT)}


def agreement_by_distance(
    hit_BT: Array, distance_BT: Array, response_BT: Array, horizon: int
) -> tuple[Array, Array]:
    """Positions that match the target's token, by distance from the last known token.

    Returns hits and counts, (horizon,) each: entry k - 1 is for distance k, that is, for the k-th
    drafted token of a round.
    """
    step_J = jnp.arange(1, horizon + 1)
    at_BTJ = (distance_BT[..., None] == step_J) & response_BT[..., None]
    return jnp.sum(hit_BT[..., None] & at_BTJ, (0, 1)), jnp.sum(at_BTJ, (0, 1))


def simulated_tau(rate_J: Array) -> Array:
    """Tokens per verification of a chain with independent acceptances: 1 + sum of products."""
    return 1.0 + jnp.sum(jnp.cumprod(rate_J))
