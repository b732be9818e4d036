"""What drafters of every kind are trained for: token losses and feature distances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import LossConfig, Objective
from moa_jax.drafters import losses
from moa_jax.drafters.api import Shared
from moa_jax.model import chunks, llama

Array = jax.Array
Parts = dict[str, Array]


class Draft(NamedTuple):
    """What a pass of the drafter gives, and which tokens count."""

    feature_BTD: Array  # goes to the head
    response_BT: Array  # the answer tokens that count


def token_losses(
    objective: Objective,
    shared: Shared,
    head: Callable[[Array], Array],
    hidden_BTD: Array,
    drafts: Sequence[Draft],
    draft_ids: tuple[int, ...] | None = None,
) -> list[Parts]:
    """For each of `drafts`, the token loss that `objective` names and the measures beside it.

    They are means over the answer tokens of a draft. The target's head, in `shared`, makes logits
    of `hidden_BTD` once for all drafts, and `head` makes the drafter's of their features, a chunk
    of tokens at a time. With `draft_ids` the target's law is taken over these ids
    only, and tokens count only where the target's choice is one of them (EAGLE-3, 2503.01840).
    """
    if draft_ids is not None:
        ids_U = np.array(draft_ids)
        known_V = jnp.array(np.isin(np.arange(shared["embed"].shape[0]), ids_U))

    def sums(piece: tuple[Array, list[tuple[Array, Array]]]) -> list[Parts]:
        hidden_BTD, asked = piece
        target_BTU = llama.unembed(shared, hidden_BTD)
        known_BT = 1.0
        if draft_ids is not None:
            known_BT = known_V[jnp.argmax(target_BTU, axis=-1)]
            target_BTU = target_BTU[..., ids_U]

        def of_draft(target_BTU: Array, feature_BTD: Array, share_BT: Array) -> Parts:
            each = _each_token(objective.loss, target_BTU, head(feature_BTD))
            return {name: jnp.sum(value_BT * share_BT) for name, value_BT in each.items()}

        if len(asked) > 1:  # hold the logits of one draft at a time
            of_draft = jax.checkpoint(of_draft)
        return [of_draft(target_BTU, x_BTD, share_BT * known_BT) for x_BTD, share_BT in asked]

    shares = [(draft.feature_BTD, losses.answer_share(draft.response_BT)) for draft in drafts]
    return chunks.sum_over(sums, (hidden_BTD, shares), objective.chunks.head)


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
    """The loss and all its parts, as metrics; the weight of `feature` fades as `cfg` says.

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
