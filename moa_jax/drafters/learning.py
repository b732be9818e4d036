"""What drafters of every kind are trained for: token losses and feature distances."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import LossConfig, Objective
from moa_jax.drafters import losses
from moa_jax.drafters.api import Shared
from moa_jax.model import chunks, llama, sharding

Array = jax.Array
Parts = dict[str, Array]
# Some tokens: the target's states, and the features and weights of each draft.
Piece = tuple[Array, list[tuple[Array, Array]]]


class Draft(NamedTuple):
    """What a pass of the drafter gives, and which tokens count."""

    feature_BTD: Array  # goes to the head
    response_BT: Array  # the answer tokens that count


def token_losses(
    objective: Objective,
    shared: Shared,
    head: Callable[[Array], Array] | None,
    hidden_BTD: Array,
    drafts: Sequence[Draft],
    draft_ids: tuple[int, ...] | None = None,
) -> list[Parts]:
    """For each of `drafts`, the token loss that `objective` names and the measures beside it.

    They are means over the answer tokens of a draft; a gradient they have for that loss alone. The
    target's head, in `shared`, makes logits of `hidden_BTD` once for all drafts, and `head` makes
    the drafter's of their features, a chunk of tokens at a time; on a mesh each device does so for
    its part of the vocabulary. Without a `head` of its own a drafter uses the target's, which is
    frozen: then gradients are made while the logits are there, and no logits are made again.

    With `draft_ids` the target's law is taken over these ids only, and tokens count only where the
    target's choice is one of them (EAGLE-3, 2503.01840).
    """
    scored = functools.partial(llama.unembed, shared) if head is None else head
    if draft_ids is not None:
        ids_U = np.array(draft_ids)
        known_V = jnp.array(np.isin(np.arange(shared["embed"].shape[0]), ids_U))

    def target_of(hidden_BTD: Array) -> tuple[Array, Array | float]:
        target_BTU = llama.unembed(shared, hidden_BTD)
        if draft_ids is None:
            return target_BTU, 1.0
        return target_BTU[..., ids_U], known_V[jnp.argmax(target_BTU, axis=-1)]

    def of_draft(feature_BTD: Array, target_BTU: Array, share_BT: Array) -> tuple[Array, Parts]:
        each = _each_token(objective.loss, target_BTU, scored(feature_BTD))
        parts = {name: jnp.sum(value_BT * share_BT) for name, value_BT in each.items()}
        return parts[objective.loss.token], parts

    def sums(piece: Piece) -> list[Parts]:
        hidden_BTD, asked = piece
        target_BTU, known_BT = target_of(hidden_BTD)
        # Hold the logits of one draft at a time.
        one = jax.checkpoint(of_draft) if len(asked) > 1 else of_draft
        return [one(x_BTD, target_BTU, share_BT * known_BT)[1] for x_BTD, share_BT in asked]

    def sums_and_gradients(piece: Piece) -> tuple[list[Parts], list[Array]]:
        hidden_BTD, asked = piece
        target_BTU, known_BT = target_of(hidden_BTD)
        one = jax.grad(of_draft, has_aux=True)
        found = [one(x_BTD, target_BTU, share_BT * known_BT) for x_BTD, share_BT in asked]
        return [parts for _, parts in found], [towards_BTD for towards_BTD, _ in found]

    shares = [losses.answer_share(draft.response_BT) for draft in drafts]
    features = [draft.feature_BTD for draft in drafts]
    rows = functools.partial(jax.tree.map, lambda x: sharding.constrain(x, "head_rows"))
    hidden_BTD, shares, features = rows((hidden_BTD, shares, features))
    size = objective.chunks.head
    total = lambda asked: chunks.sum_over(sums, (hidden_BTD, asked), size)  # noqa: E731
    if head is not None or not 0 < size < hidden_BTD.shape[1]:
        return total(list(zip(features, shares, strict=True)))

    @jax.custom_vjp
    def in_one_sweep(features: list[Array]) -> list[Parts]:
        return total(list(zip(features, shares, strict=True)))

    def forward(features: list[Array]) -> tuple[list[Parts], list[Array]]:
        asked = list(zip(features, shares, strict=True))
        return chunks.sum_and_join(sums_and_gradients, (hidden_BTD, asked), size)

    def backward(gradients: list[Array], towards: list[Parts]) -> tuple[list[Array]]:
        weights = [parts[objective.loss.token] for parts in towards]
        return (
            [(w * g_BTD).astype(g_BTD.dtype) for w, g_BTD in zip(weights, gradients, strict=True)],
        )

    in_one_sweep.defvjp(forward, backward)
    return in_one_sweep(features)


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
