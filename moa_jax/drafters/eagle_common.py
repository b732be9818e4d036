"""Drafters that are fed their own features: common code of EAGLE-1, EAGLE-2 and EAGLE-3.

A layer turns a token and the previous token's feature into the token's own feature. The feature is
the input of the head, which gives the next token's logits, and an input of the next step. Features
of verified tokens come from the target:

    position          0     1     2    | 3 = length: root   drafts
    token             a     b     c    | d                  e        f
    feature before    none  t(a)  t(b) | t(c)               o(d)     o(e)    t target's, o its own
    row of the cache  (0)   1     2    | 3                  4        5

Row 0 is never seen, since token 0 has no feature before it. A row's rotary position is that of
the feature, one less than the position of the token, as in the authors' code.

References: EAGLE (2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840); authors'
train/eagle.py and inference/eagle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moa_jax.config import BlockConfig, Objective
from moa_jax.data.batch import Batch
from moa_jax.drafters import distill_loss
from moa_jax.drafters.api import (
    Drafter,
    DrafterLoss,
    Params,
    Shared,
    TapSpec,
    TargetActivations,
    target_head,
)
from moa_jax.drafters.tree import Nodes, by_level
from moa_jax.model import cache as kv_cache
from moa_jax.model import llama, masks
from moa_jax.model.attention import Seen
from moa_jax.model.cache import KV
from moa_jax.model.layers import MLP, Attention, RMSNorm, Rotation, rotation, rows_of

Array = jax.Array


class EagleLayer(nn.Module):
    """A decoder layer that reads the embeddings of tokens and the features before them.

    Each kind defines in `layer_inputs` the start of the residual stream and the input of attention.
    """

    block: BlockConfig

    def setup(self) -> None:
        self.attention = Attention(self.block)
        self.post_attention_norm = RMSNorm(self.block.rms_norm_eps)
        self.mlp = MLP(self.block)

    def layer_inputs(self, embedding_BTD: Array, feature_BTD: Array) -> tuple[Array, Array]:
        """The start of the residual stream (B, T, D), and the input of attention."""
        raise NotImplementedError

    def rows(self, embedding_BTD: Array, feature_BTD: Array, turn: Rotation) -> KV:
        """The cache rows of these tokens, without their features."""
        _, read_BTX = self.layer_inputs(embedding_BTD, feature_BTD)
        return rows_of(self.attention.project(read_BTX, turn))

    def __call__(
        self,
        embedding_BTD: Array,
        feature_BTD: Array,
        turn: Rotation,
        seen: Seen,
        past: KV | None = None,
    ) -> tuple[Array, KV, KV | None]:
        """The tokens' features, the tokens' rows, and the cache with these rows written."""
        x_BTD, read_BTX = self.layer_inputs(embedding_BTD, feature_BTD)
        y_BTD, rows, past = self.attention(read_BTX, turn, seen, past)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.post_attention_norm.parts(x_BTD)), rows, past


def init_layer(module: EagleLayer, key: Array) -> Params:
    """N(0, 0.02) weights, unit norms."""
    x_BTD = jnp.zeros((1, 1, module.block.hidden_size))
    turn = rotation(module.block, jnp.zeros((1, 1), jnp.int32))
    return module.init(key, x_BTD, x_BTD, turn, masks.causal_tree(1))["params"]


class Layer(NamedTuple):
    """The functions and settings that differ between drafter kinds."""

    block: BlockConfig  # of the rows and rotary angles
    taps: TapSpec
    init: Callable[[Array], Params]
    # (params, tapped) -> the features of verified tokens_BTD
    fuse: Callable[[Params, TargetActivations], Array]
    # (params, embedding_BTD, feature before_BTD, turn) -> cache rows of these tokens
    rows: Callable[[Params, Array, Array, Rotation], KV]
    # (params, embedding_BTD, feature before_BTD, turn, seen, past)
    # -> (feature_BTD, rows, past with the rows written)
    apply: Callable[..., tuple[Array, KV, KV | None]]
    # (objective, shared, head, draft of each pass, target's final-normed states_BTD, progress)
    # -> (loss, metrics)
    loss: Callable[..., tuple[Array, dict[str, Array]]]
    # (params, shared, feature_BTD) -> logits
    head: Callable[[Params, Shared, Array], Array] = target_head
    own_head: bool = False
    draft_ids: tuple[int, ...] | None = None
    fuse_only: tuple[str, ...] = ()  # parts of the params that `fuse` alone reads
    shifted_mask: bool = False  # see `_shifted`


class EagleCache(NamedTuple):
    """Rows of attention, and features of the same tokens; n = length, N = nodes per round.

    row        0 ......... n-1 | n ........ n+N-1 | n+N ....... S-1
    rows       verified tokens | root and drafts  | left-overs, never seen
    features   the target's    | its own          | left-overs, never read
    """

    rows: KV
    feature_B1SD: Array


def make(layer: Layer, objective: Objective) -> Drafter:
    """The drafter as pure functions."""
    propose, draft_one = by_level(partial(step, layer))
    return Drafter(
        taps=layer.taps,
        shared_params=lambda params: {name: x for name, x in params.items() if name != "layers"},
        init=layer.init,
        init_cache=partial(init_cache, layer),
        extend=partial(extend, layer),
        propose=propose,
        condense=lambda params, length_B, tapped: layer.fuse(params, tapped),
        condense_only=layer.fuse_only,
        draft_one=draft_one,
        loss=make_loss(layer, objective),
        teacher_forced=partial(teacher_forced, layer),
        head=layer.head,
        own_head=layer.own_head,
        draft_ids=layer.draft_ids,
    )


# ---- decoding -----------------------------------------------------------------------------


def init_cache(layer: Layer, batch: int, rows: int, dtype: jnp.dtype) -> EagleCache:
    """An empty cache."""
    feature_B1SD = jnp.zeros((batch, 1, rows, layer.block.hidden_size), dtype)
    return EagleCache(kv_cache.empty(layer.block, batch, rows, dtype), feature_B1SD)


def extend(
    layer: Layer,
    params: Params,
    shared: Shared,
    cache: EagleCache,
    tokens_BT: Array,
    length_B: Array,
    feature_BTD: Array,
) -> EagleCache:
    """Adds verified tokens: rows from their embeddings and the target's features before them.

    The cache stores the features of all T tokens, since this function does not take the number of
    accepted tokens.
    """
    earlier_BTD = jnp.concatenate([_last_feature(cache, length_B), feature_BTD[:, :-1]], axis=1)
    position_BT = length_B[:, None] + jnp.arange(tokens_BT.shape[1]) - 1
    turn = rotation(layer.block, position_BT)
    rows = layer.rows(params, llama.embed(shared, tokens_BT), earlier_BTD, turn)
    return EagleCache(
        kv_cache.write(cache.rows, rows, length_B),
        kv_cache.write_rows(cache.feature_B1SD, feature_BTD[:, None], length_B),
    )


def step(
    layer: Layer, params: Params, shared: Shared, cache: EagleCache, nodes: Nodes
) -> tuple[Array, EagleCache]:
    """Logits after some nodes; the cache holds the nodes' own features until `extend` runs.

    The nodes see all rows before the root except row 0, and their ancestors.
    """
    ancestor_BWX = nodes.ancestor_BWX
    if layer.shifted_mask and nodes.depth:
        ancestor_BWX = _shifted(ancestor_BWX)
    seen = masks.cache_mask(nodes.length_B, ancestor_BWX, first=1)
    feature_BWD, _, kv = layer.apply(
        params,
        llama.embed(shared, nodes.tokens_BW),
        _before(cache, nodes),
        rotation(layer.block, nodes.position_BW - 1),
        seen,
        cache.rows,
    )
    kept_B1SD = kv_cache.write_rows(cache.feature_B1SD, feature_BWD[:, None], nodes.start_B)
    return layer.head(params, shared, feature_BWD), EagleCache(kv, kept_B1SD)


def _before(cache: EagleCache, nodes: Nodes) -> Array:
    """The features (B, W, D) of the nodes' parents.

    The root's parent is the token before the root. Any other parent is the last of a node's
    ancestors among the nodes fed earlier; the i-th of these nodes has row length + i.
    """
    W, X = nodes.ancestor_BWX.shape[1:]
    if X == W:
        return _last_feature(cache, nodes.length_B)
    earlier = X - W
    above_BWX = nodes.ancestor_BWX[:, :, :earlier]
    parent_BW = jnp.max(jnp.where(above_BWX, jnp.arange(earlier), 0), axis=-1)
    row_BW = nodes.length_B[:, None] + parent_BW
    return jnp.take_along_axis(cache.feature_B1SD[:, 0], row_BW[..., None], axis=1)


def _last_feature(cache: EagleCache, length_B: Array) -> Array:
    """The feature (B, 1, D) of the token before the root; row 0 if the length is 0."""
    last_B = jnp.maximum(length_B - 1, 0)
    return jnp.take_along_axis(cache.feature_B1SD[:, 0], last_B[:, None, None], axis=1)


def _shifted(ancestor_BWX: Array) -> Array:
    """The authors' mask: the root's column twice, then the column of node i for node i + 1.

    right   root  a  b  c        shifted   root  a  b  c
    a       x     x  .  .        a         x     x  x  .
    b       x     .  x  .        b         x     x  .  x
    c       x     .  .  x        c         x     x  .  .
    """
    return jnp.concatenate([ancestor_BWX[..., :1], ancestor_BWX[..., :-1]], axis=-1)


# ---- training -----------------------------------------------------------------------------


class TrainingInputs(NamedTuple):
    """Inputs of a layer of this family in training, and the training target of its features."""

    embedding_BTD: Array
    feature_BTD: Array  # the target's features, from `Layer.fuse`
    goal_BTD: Array  # the target's final-normed states
    draftable_BT: Array | None = None  # as in `TargetActivations`


def training_inputs(
    layer: Layer,
    params: Params,
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    noise_2BTD: Array | None = None,
) -> TrainingInputs:
    """The layer inputs of a batch; `noise_2BTD`, if given, is added to features and embeddings."""
    feature_BTD = layer.fuse(params, tapped)
    embedding_BTD = llama.embed(shared, batch.tokens_BT, feature_BTD.dtype)
    if noise_2BTD is not None:
        feature_BTD, embedding_BTD = feature_BTD + noise_2BTD[0], embedding_BTD + noise_2BTD[1]
    return TrainingInputs(embedding_BTD, feature_BTD, tapped.hidden_BTD, tapped.draftable_BT)


def passes(
    layer: Layer, params: Params, inputs: TrainingInputs, batch: Batch, steps: int
) -> list[Array]:
    """The features (B, T, D) of all tokens per pass; pass j is the (j + 1)-th draft of a round.

    The input of pass 0 is the target's features, the input of each later pass the features of the
    previous pass. `masks.fed_back` defines the visible rows of earlier passes.
    """
    turn = rotation(layer.block, batch.position_BT - 1)
    follows_BT1 = (batch.position_BT > 0)[..., None]  # whether a token has a feature before it
    found: list[Array] = []
    past: KV | None = None
    for index in range(steps):
        before_BTD = jnp.roll(found[-1] if found else inputs.feature_BTD, 1, axis=1)
        fed_BTD = jnp.where(follows_BT1, before_BTD, 0)
        seen = masks.fed_back(batch.segment_BT, index)
        out_BTD, rows, _ = layer.apply(params, inputs.embedding_BTD, fed_BTD, turn, seen, past)
        past = rows if past is None else kv_cache.join(past, rows)
        found.append(out_BTD)
    return found


def make_loss(layer: Layer, objective: Objective) -> DrafterLoss:
    """The loss of this kind, with the noise of `objective.feedback`."""

    def loss(
        params: Params,
        shared: Shared,
        batch: Batch,
        tapped: TargetActivations,
        key: Array,
        progress: Array,
    ) -> tuple[Array, dict[str, Array]]:
        noise_2BTD = None
        if objective.feedback.noise:
            shape = (2, *tapped.hidden_BTD.shape)
            draw_2BTD = jax.random.uniform(key, shape, tapped.hidden_BTD.dtype)
            noise_2BTD = objective.feedback.noise * (draw_2BTD - 0.5)
        inputs = training_inputs(layer, params, shared, batch, tapped, noise_2BTD)
        return loss_of(layer, objective, params, shared, batch, inputs, progress)

    return loss


def loss_of(
    layer: Layer,
    objective: Objective,
    params: Params,
    shared: Shared,
    batch: Batch,
    inputs: TrainingInputs,
    progress: Array,
) -> tuple[Array, dict[str, Array]]:
    """The loss over all passes; pass j includes answer tokens at positions above j."""
    found = passes(layer, params, inputs, batch, objective.feedback.steps)
    counted = [batch.response_BT & (batch.position_BT > index) for index in range(len(found))]
    drafts = [
        distill_loss.Draft(*pair, inputs.draftable_BT) for pair in zip(found, counted, strict=True)
    ]
    head = partial(layer.head, params, shared) if layer.own_head else None
    return layer.loss(objective, shared, head, drafts, inputs.goal_BTD, progress)


def mean_of_passes(each: list[dict[str, Array]], decay: float) -> dict[str, Array]:
    """The mean of each part over passes; each pass has `decay` times the previous pass's weight."""
    weights = [decay**index for index in range(len(each))]
    total = sum(weights)
    return jax.tree.map(
        lambda *x: sum(w * v for w, v in zip(weights, x, strict=True)) / total, *each
    )


def teacher_forced(
    layer: Layer,
    params: Params,
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    known_BT: Array,
    horizon: int,
) -> Array:
    """The features of unknown tokens, as in decoding from the last known token before them."""
    inputs = training_inputs(layer, params, shared, batch, tapped)
    found = passes(layer, params, inputs, batch, horizon)
    start_BT = masks.known_until(known_BT, batch.segment_BT)
    distance_BT = jnp.arange(start_BT.shape[1]) - start_BT
    chosen_BTD = found[0]
    for index, out_BTD in enumerate(found[1:], 1):
        chosen_BTD = jnp.where((distance_BT == index + 1)[..., None], out_BTD, chosen_BTD)
    return chosen_BTD
