"""Training objectives that all drafter kinds share: token losses and weighted feature losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import LossConfig, Objective
from moa_jax.drafters import losses
from moa_jax.drafters.api import Shared
from moa_jax.model import chunks, llama, sharding

Array = jax.Array
Parts = dict[str, Array]
# The target's states, and per draft the features and the token weights.
Piece = tuple[Array, list[Array], list[Array]]


class Draft(NamedTuple):
    """Features of one drafter pass, and the tokens that the loss includes."""

    feature_BTD: Array  # input of the head
    response_BT: Array  # the answer tokens of the mean
    draftable_BT: Array | None = None  # of these, the tokens that the loss includes; None: all


class _Scorer(NamedTuple):
    """Computes losses and metrics, one `Piece` of tokens at a time."""

    loss: LossConfig
    draft_ids: tuple[int, ...] | None
    shared: Shared
    head: Callable[[Array], Array]

    def target_of(self, hidden_BTD: Array) -> tuple[Array, Array | float]:
        """The target's logits of the draft ids, and whether its argmax is among these ids."""
        target_BTU = llama.unembed(self.shared, hidden_BTD)
        if self.draft_ids is None:
            return target_BTU, 1.0
        ids_U = np.array(self.draft_ids)
        known_V = jnp.array(np.isin(np.arange(target_BTU.shape[-1]), ids_U))
        return target_BTU[..., ids_U], known_V[jnp.argmax(target_BTU, axis=-1)]

    def of_draft(
        self, feature_BTD: Array, target_BTU: Array, share_BT: Array
    ) -> tuple[Array, Parts]:
        """The training loss, and all sums."""
        each = _each_token(self.loss, target_BTU, self.head(feature_BTD))
        parts = {name: jnp.sum(value_BT * share_BT) for name, value_BT in each.items()}
        return parts[self.loss.token], parts

    def sums(self, piece: Piece) -> list[Parts]:
        hidden_BTD, features, shares = piece
        target_BTU, known_BT = self.target_of(hidden_BTD)
        # Stores the logits of one draft at a time.
        one = jax.checkpoint(self.of_draft) if len(features) > 1 else self.of_draft
        pairs = zip(features, shares, strict=True)
        return [one(x_BTD, target_BTU, share_BT * known_BT)[1] for x_BTD, share_BT in pairs]

    def sums_and_gradients(self, piece: Piece) -> tuple[list[Parts], list[Array]]:
        hidden_BTD, features, shares = piece
        target_BTU, known_BT = self.target_of(hidden_BTD)
        one = jax.grad(self.of_draft, has_aux=True)
        pairs = zip(features, shares, strict=True)
        found = [one(x_BTD, target_BTU, share_BT * known_BT) for x_BTD, share_BT in pairs]
        return [parts for _, parts in found], [towards_BTD for towards_BTD, _ in found]


def token_losses(
    objective: Objective,
    shared: Shared,
    head: Callable[[Array], Array] | None,
    hidden_BTD: Array,
    drafts: Sequence[Draft],
    draft_ids: tuple[int, ...] | None = None,
) -> list[Parts]:
    """The token loss that `objective` selects and further metrics, for each of `drafts`.

    The values are means over the answer tokens of a draft; only the selected loss has a gradient.
    The target's head, in `shared`, computes the logits of `hidden_BTD` once for all drafts, and
    `head` computes the drafter's logits of the features, one chunk of tokens at a time; on a mesh
    each device computes its part of the vocabulary. With `head` None the drafter uses the target's
    frozen head: gradients are then computed along with the logits, which are not recomputed.

    With `draft_ids` the target's distribution is taken over these ids only, and the loss includes
    a token only if the target's argmax is one of these ids (EAGLE-3, 2503.01840). `shared` may also
    hold a slice of the target's head; then `draftable_BT` of the drafts excludes tokens.
    """
    shares = [_share(draft) for draft in drafts]
    piece = (hidden_BTD, [draft.feature_BTD for draft in drafts], shares)
    piece = jax.tree.map(lambda x: sharding.constrain(x, "head_rows"), piece)
    size = objective.chunks.head
    if head is None and 0 < size < hidden_BTD.shape[1]:
        return _in_one_sweep(objective.loss, size, shared, *piece)
    head = head or functools.partial(llama.unembed, shared)
    return chunks.sum_over(_Scorer(objective.loss, draft_ids, shared, head).sums, piece, size)


def _share(draft: Draft) -> Array:
    share_BT = losses.answer_share(draft.response_BT)
    return share_BT if draft.draftable_BT is None else share_BT * draft.draftable_BT


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_one_sweep(loss: LossConfig, size: int, shared: Shared, *piece: Any) -> list[Parts]:
    """Losses and metrics of a `Piece` by the frozen head; only the features have a gradient."""
    return chunks.sum_over(_by_target(loss, shared).sums, piece, size)


def _sweep(
    loss: LossConfig, size: int, shared: Shared, *piece: Any
) -> tuple[list[Parts], list[Array]]:
    return chunks.sum_and_join(_by_target(loss, shared).sums_and_gradients, piece, size)


def _swept(
    loss: LossConfig, size: int, gradients: list[Array], towards: list[Parts]
) -> tuple[None, None, list[Array], None]:
    weights = [parts[loss.token] for parts in towards]
    pairs = zip(weights, gradients, strict=True)
    return None, None, [(w * g_BTD).astype(g_BTD.dtype) for w, g_BTD in pairs], None


_in_one_sweep.defvjp(_sweep, _swept)


def _by_target(loss: LossConfig, shared: Shared) -> _Scorer:
    return _Scorer(loss, None, shared, functools.partial(llama.unembed, shared))


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
    """The loss, and a dict of the loss and its parts; `feature_fade` fades the feature weight.

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
