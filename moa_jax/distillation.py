"""What distillation computes for any drafter: its loss on a batch, and how well it would draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moa_jax import losses, masks, target
from moa_jax.batch import Batch
from moa_jax.config import TargetConfig
from moa_jax.drafters.api import Drafter, Tapped
from moa_jax.training import Loss

Array = jax.Array
Probe = Callable[[Any, Any, Batch], dict[str, Array]]


def tap(cfg: TargetConfig, drafter: Drafter, params: Any, batch: Batch, dtype: Any) -> Tapped:
    """One pass of the frozen target over whole conversations, kept apart by their segments."""
    found = target.forward(
        cfg,
        params,
        batch.tokens_BT,
        batch.position_BT,
        masks.causal(batch.segment_BT),
        tap=drafter.taps.streams,
        dtype=dtype,
    )
    tapped = Tapped(target.stack_rows(found.rows), found.tapped, found.hidden_BTD)
    return jax.tree.map(jax.lax.stop_gradient, tapped)


def make_loss(cfg: TargetConfig, drafter: Drafter, dtype: Any) -> Loss:
    """The drafter's own loss behind a target pass; `frozen` is the target's parameters."""

    def loss(params: Any, frozen: Any, batch: Batch, key: Array, progress: Array):
        tapped = tap(cfg, drafter, frozen, batch, dtype)
        return drafter.loss(params, drafter.borrow(frozen), batch, tapped, key, progress)

    return loss


def make_probe(cfg: TargetConfig, drafter: Drafter, dtype: Any, horizon: int) -> Probe:
    """Sums over one batch, with every (horizon + 1)-th token of an answer known.

    So each answer token is 0 to `horizon` steps after the last known one, as in rounds that
    all accept `horizon` drafts. Known tokens are not asked: decoding never drafts after one,
    but after the root, one step further. Returns sums of cross-entropy and entropy with their token
    count, and hits and counts by distance; `summarise` turns sums into figures.
    """

    def probe(params: Any, frozen: Any, batch: Batch) -> dict[str, Array]:
        tapped = tap(cfg, drafter, frozen, batch, dtype)
        shared = drafter.borrow(frozen)
        known_BT = ~batch.response_BT | (batch.position_BT % (horizon + 1) == 0)
        draft_BTV = drafter.teacher_forced(params, shared, batch, tapped, known_BT)
        target_BTV = target.unembed(shared, tapped.hidden_BTD)
        start_BT = masks.known_until(known_BT, batch.segment_BT)
        distance_BT = jnp.arange(start_BT.shape[1]) - start_BT
        asked_BT = batch.response_BT & _next_is_answer(batch) & (distance_BT > 0)
        hits_J, counts_J = losses.agreement_by_distance(
            target_BTV, draft_BTV, distance_BT, asked_BT, horizon
        )
        cross_BT = losses.soft_cross_entropy(target_BTV, draft_BTV)
        return {
            "cross_entropy": jnp.sum(cross_BT * asked_BT),
            "entropy": jnp.sum(losses.entropy(target_BTV) * asked_BT),
            "tokens": jnp.sum(asked_BT),
            "hits_J": hits_J,
            "counts_J": counts_J,
        }

    return probe


def summarise(sums: dict[str, Array]) -> dict[str, Any]:
    """Cross-entropy and KL per token, agreement by future position, and the simulated tau."""
    tokens = jnp.maximum(sums["tokens"], 1)
    agreement_J = sums["hits_J"] / jnp.maximum(sums["counts_J"], 1)
    cross_entropy = sums["cross_entropy"] / tokens
    return {
        "cross_entropy": cross_entropy,
        "kl": cross_entropy - sums["entropy"] / tokens,
        "simulated_tau": losses.simulated_tau(agreement_J),
        "agreement": agreement_J,
    }


def _next_is_answer(batch: Batch) -> Array:
    """Whether a token's successor is an answer token of the same conversation."""
    same_BT = batch.segment_BT[:, 1:] == batch.segment_BT[:, :-1]
    return jnp.pad(batch.response_BT[:, 1:] & same_BT, ((0, 0), (0, 1)))
