"""What drafters of every kind are trained for: token losses and feature distances."""

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
# Some tokens: the target's states, and of each draft the features and the weights of tokens.
Piece = tuple[Array, list[Array], list[Array]]


class Draft(NamedTuple):
    """Features of a pass of the drafter, and the tokens that count."""

    feature_BTD: Array  # goes to the head
    response_BT: Array  # the answer tokens that count


class _Scorer(NamedTuple):
    """Scores of some tokens, a piece of them at a time."""

    loss: LossConfig
    draft_ids: tuple[int, ...] | None
    shared: Shared
    head: Callable[[Array], Array]

    def target_of(self, hidden_BTD: Array) -> tuple[Array, Array | float]:
        """The target's logits, and which tokens are known to a drafter with `draft_ids`."""
        target_BTU = llama.unembed(self.shared, hidden_BTD)
        if self.draft_ids is None:
            return target_BTU, 1.0
        ids_U = np.array(self.draft_ids)
        known_V = jnp.array(np.isin(np.arange(target_BTU.shape[-1]), ids_U))
        return target_BTU[..., ids_U], known_V[jnp.argmax(target_BTU, axis=-1)]

    def of_draft(
        self, feature_BTD: Array, target_BTU: Array, share_BT: Array
    ) -> tuple[Array, Parts]:
        """The loss that is trained, and all sums."""
        each = _each_token(self.loss, target_BTU, self.head(feature_BTD))
        parts = {name: jnp.sum(value_BT * share_BT) for name, value_BT in each.items()}
        return parts[self.loss.token], parts

    def sums(self, piece: Piece) -> list[Parts]:
        hidden_BTD, features, shares = piece
        target_BTU, known_BT = self.target_of(hidden_BTD)
        # Hold the logits of one draft at a time.
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
    """For each of `drafts`, the token loss that `objective` names and the measures beside it.

    They are means over the answer tokens of a draft; a gradient they have for that loss alone. The
    target's head, in `shared`, makes logits of `hidden_BTD` once for all drafts, and `head` makes
    the drafter's of their features, a chunk of tokens at a time; on a mesh each device does so for
    its part of the vocabulary. Without a `head` of its own a drafter uses the target's, which is
    frozen: then gradients are made while the logits are there, and no logits are made again.

    With `draft_ids` the target's law is taken over these ids only, and tokens count only where the
    target's choice is one of them (EAGLE-3, 2503.01840).
    """
    shares = [losses.answer_share(draft.response_BT) for draft in drafts]
    piece = (hidden_BTD, [draft.feature_BTD for draft in drafts], shares)
    piece = jax.tree.map(lambda x: sharding.constrain(x, "head_rows"), piece)
    size = objective.chunks.head
    if head is None and 0 < size < hidden_BTD.shape[1]:
        return _in_one_sweep(objective.loss, size, shared, *piece)
    head = head or functools.partial(llama.unembed, shared)
    return chunks.sum_over(_Scorer(objective.loss, draft_ids, shared, head).sums, piece, size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_one_sweep(loss: LossConfig, size: int, shared: Shared, *piece: Any) -> list[Parts]:
    """Scores of a `Piece` by the frozen head; nothing but the features has a gradient."""
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
