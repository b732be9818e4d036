"""What drafters are trained for, whatever they are made of: token losses and feature distances."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moa_jax import chunks, losses, target
from moa_jax.config import LossConfig, Objective
from moa_jax.drafters.api import Shared

Array = jax.Array
Parts = dict[str, Array]


def token_losses(
    objective: Objective,
    shared: Shared,
    head: Callable[[Array], Array],
    hidden_BTD: Array,
    feature_BTD: Array,
    response_BT: Array,
    draft_ids: tuple[int, ...] | None = None,
) -> Parts:
    """The token loss that `objective` names and what one watches beside it, means over answers.

    `hidden_BTD` becomes the target's logits through its head in `shared`, `feature_BTD` the
    drafter's through `head`, a chunk of tokens at a time. With `draft_ids` the target's law is
    taken over these tokens, and where its own choice is none of them nothing is learnt
    (EAGLE-3, 2503.01840).
    """

    def sums(piece: tuple[Array, ...]) -> Parts:
        hidden_BTD, feature_BTD, share_BT = piece
        target_BTV = target.unembed(shared, hidden_BTD)
        if draft_ids is not None:
            ids_U = jnp.array(draft_ids)
            choice_BT = jnp.argmax(target_BTV, axis=-1)
            known_V = jnp.zeros(target_BTV.shape[-1], bool).at[ids_U].set(True)
            share_BT, target_BTV = share_BT * known_V[choice_BT], target_BTV[..., ids_U]
        each = _each_token(objective.loss, target_BTV, head(feature_BTD))
        return {name: jnp.sum(value_BT * share_BT) for name, value_BT in each.items()}

    pieces = (hidden_BTD, feature_BTD, losses.answer_share(response_BT))
    return chunks.sum_over(sums, pieces, objective.chunks.head)


def _each_token(cfg: LossConfig, target_BTU: Array, draft_BTU: Array) -> Parts:
    each = {
        "cross_entropy": losses.soft_cross_entropy(target_BTU, draft_BTU),
        "kl": losses.relative_entropy(target_BTU, jax.lax.stop_gradient(draft_BTU)),
    }
    if cfg.token != "cross_entropy":
        overlap_BT = losses.overlap(target_BTU, draft_BTU)
        each["total_variation"] = 1.0 - overlap_BT
        each["log_acceptance"] = -jnp.log(overlap_BT)
    return each


def weighted(
    cfg: LossConfig, parts: Parts, feature: Array | None, progress: Array
) -> tuple[Array, Parts]:
    """The loss from its parts, and all of them as metrics; `feature` fades as `cfg` says.

    References: paper section 3.4 and authors' train/moa_spec.py for the default weights,
    0.1 x cross-entropy + feature distance.
    """
    loss = cfg.token_weight * parts[cfg.token]
    if feature is not None:
        weight = cfg.feature_weight
        if cfg.feature_fade is not None:
            weight = weight * jnp.maximum(1.0 - progress / cfg.feature_fade, 0.0)
        loss = loss + weight * feature
    return loss, {"loss": loss} | parts
