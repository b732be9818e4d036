"""Training of a MoA drafter: the choice of known tokens, the forward, the loss.

One pass drafts at every position at once. The last known token before a token plays the role of
the last verified token: cross-attention sees memory up to this known token only, and reused layers
see the target's own stream up to the known token and the drafter's stream after it. The
reference's rule for reused layers approximates this; `MaskConfig.on_policy_reuse` is exact.

With `MaskConfig.bounded` False, an ablation, training is standard: all earlier tokens are known
(`masks.known_past`), as for the first token of a round. Reused layers then follow the exact rule,
the only rule that allows a token to be both drafted and known. `MaskConfig.first_tokens` trains
both modes, in two passes over one memory.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moa_jax.config import ChunkConfig, MaskConfig, Objective
from moa_jax.data.batch import Batch
from moa_jax.drafters import distill_loss, losses
from moa_jax.drafters.api import DrafterLoss, Params, Shared, TargetActivations
from moa_jax.drafters.moa.blocks import Moa
from moa_jax.model import llama, masks, sharding
from moa_jax.model.layers import Block, CrossBlock, rotation

Array = jax.Array

# The settings that reproduce decoding in one pass; LSA takes 256 tokens at a time.
AS_DECODED = Objective(MaskConfig(on_policy_reuse=True), chunks=ChunkConfig(memory=256))


class Draws(NamedTuple):
    """The random choices of one training step."""

    known_BT: Array  # bool: tokens whose target activations the drafter may read
    staircase_B: Array  # bool: rows whose SA sees only tokens after the last known one


class MoaTrace(NamedTuple):
    """Every stage of the training forward, for the loss and for parity tests."""

    memory_BTD: Array
    sa_seen: masks.IntervalMask
    ca_seen: masks.IntervalMask
    sa_BTD: Array  # the embeddings if the drafter has no SA
    ca_BTD: Array
    entry_BTD: Array | None  # N > 0: input of the reused layers
    feature_BTD: Array  # input of the head


def draw(mask_cfg: MaskConfig, key: Array, batch: Batch, progress: Array) -> Draws:
    """Draws the known answer tokens, and the rows that use the staircase.

    All prompt tokens are known and, with variable future length, one token per period; the period
    is drawn per row and counted from the start of a conversation. A row uses the staircase with a
    probability that falls from 1 to 0 over the first half of the run. Standard training uses
    neither, since each token then directly follows its last known token.
    References: paper section 3.3; the authors update the probability once per epoch.
    """
    period_key, stair_key = jax.random.split(key)
    B = batch.tokens_BT.shape[0]
    known_BT = ~batch.response_BT
    if mask_cfg.variable_future_length and mask_cfg.bounded:
        shortest, longest = mask_cfg.shortest_future, mask_cfg.longest_future
        period_B1 = jax.random.randint(period_key, (B, 1), shortest, longest + 1)
        known_BT |= batch.position_BT % period_B1 == 0
    draw_B = jax.random.uniform(stair_key, (B,))
    staircase = mask_cfg.staircase and mask_cfg.bounded
    return Draws(known_BT, (draw_B >= staircase_threshold(progress)) & staircase)


def trace(
    moa: Moa,
    objective: Objective,
    params: Params,
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    draws: Draws,
    *,
    memory_BTD: Array | None = None,
) -> MoaTrace:
    """Every stage of the training forward, or the stages after a given memory.

    `objective.masks` selects the rule of reused layers, and whether memory is bounded. If memory is
    not bounded, all earlier tokens are known, and `draws` only separates prompts from answers.
    References: paper section 3; authors' train/moa_spec.py, `forward`.
    """
    sa, ca, _ = moa.blocks
    segment_BT, bounded = batch.segment_BT, objective.masks.bounded
    # 1. The last known token at or before each token, and the masks.
    if bounded:
        start_BT = masks.known_until(draws.known_BT, segment_BT)
    else:
        start_BT = masks.known_past(segment_BT)
    causal, stairs = masks.causal(segment_BT), masks.staircase(start_BT)
    choose = functools.partial(jnp.where, draws.staircase_B[:, None])
    sa_seen = jax.tree.map(choose, stairs, causal)
    ca_seen = masks.bounded_memory(start_BT, segment_BT)

    # 2. Memory (LSA), then the stream of drafted tokens: SA, and CA over the memory.
    if memory_BTD is None:
        memory_BTD = moa.memory(_folded(params), tapped, objective.chunks.memory)
        memory_BTD = sharding.constrain(memory_BTD, "rows")
    x_BTD = llama.embed(shared, batch.tokens_BT, memory_BTD.dtype)
    sa_BTD = sharding.constrain(x_BTD, "rows")
    if sa is not None:
        turn = rotation(sa, batch.position_BT)
        sa_params = {"params": params["self_attention"]}
        sa_BTD, *_ = Block(sa).apply(sa_params, sa_BTD, turn, sa_seen)
    ca_BTD = CrossBlock(ca).apply(
        {"params": params["cross_attention"]},
        sa_BTD,
        memory_BTD,
        rotation(ca, batch.position_BT),
        ca_seen,
        method=CrossBlock.both,
    )
    # 3. The last N layers of the target; known tokens enter with the target's own stream.
    entry_BTD, feature_BTD = None, ca_BTD
    if moa.cfg.target_layer_inference:
        entry_BTD = jnp.where(draws.known_BT[..., None], tapped.streams[0], ca_BTD)
        with sharding.use_rules(sharding.TRAIN):  # sharded like the target's layers
            if objective.masks.on_policy_reuse or not bounded:
                feature_BTD = _reuse_on_policy(moa, shared, batch, tapped, entry_BTD, start_BT)
            else:
                feature_BTD = _reuse(moa, shared, batch, entry_BTD, causal)
    return MoaTrace(memory_BTD, sa_seen, ca_seen, sa_BTD, ca_BTD, entry_BTD, feature_BTD)


def _folded(params: Params) -> Params:
    """Parameters of the same function, with LSA's input norm as a factor of the product after it.

    The target's keys and values need no gradient. With the scale before the product, its gradient
    is computed from theirs, by a product that takes a tenth of the step on a CPU.
    """
    if (lsa := params.get("layer_self_attention")) is None:
        return params
    scale_M, qkv = lsa["input_norm"]["scale"], lsa["attention"]["qkv"]
    qkv = qkv | {"kernel": qkv["kernel"] * scale_M[:, None, None, None]}
    unit = {"input_norm": {"scale": jnp.ones_like(scale_M)}}
    attention = {"attention": lsa["attention"] | {"qkv": qkv}}
    return params | {"layer_self_attention": lsa | unit | attention}


def _reuse(
    moa: Moa, shared: Shared, batch: Batch, entry_BTD: Array, causal: masks.IntervalMask
) -> Array:
    """TLI by the reference's rule: one causal stream, which is the target's at known tokens.

    A draft then sees the drafter's states of all earlier unknown tokens, including those before
    the last known token. In decoding the target would already have verified the latter.
    """
    cfg, context = moa.target_cfg, llama.Context(batch.position_BT, causal)
    x_BTD, *_ = llama.apply_blocks(cfg, shared["layers"], entry_BTD, context)
    return llama.final_norm(cfg.block, shared, x_BTD)


def _reuse_on_policy(
    moa: Moa,
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    entry_BTD: Array,
    start_BT: Array,
) -> Array:
    """TLI as in decoding: the target's own rows up to the last known token, drafts after it.

        rows of each layer   0 ........ T-1 | T ............ 2T-1
                             the target's   | the drafter's stream

    The target's rows are tapped, so the target's stream is not recomputed; `masks.on_policy`
    defines the visible rows. Known tokens see target rows only, and so give the target's output.
    """
    cfg, reused = moa.target_cfg, moa.cfg.target_layer_inference
    layers = shared["layers"]
    if not isinstance(layers, list):  # stacked for training, but caches are a list
        layers = [jax.tree.map(lambda a, i=i: a[i], layers) for i in range(reused)]
    true_rows = tuple(
        jax.tree.map(lambda a, i=i: a[i - reused], tapped.rows_LBKTE) for i in range(reused)
    )
    seen = masks.on_policy(start_BT, batch.segment_BT)
    context = llama.Context(batch.position_BT, seen, true_rows)
    x_BTD, *_ = llama.apply_blocks(cfg, layers, entry_BTD, context)
    return llama.final_norm(cfg.block, shared, x_BTD)


def make_loss(moa: Moa, objective: Objective) -> DrafterLoss:
    """The loss of `objective`: the token loss and the feature loss, unless that has faded out."""

    def loss(
        params: Params,
        shared: Shared,
        batch: Batch,
        tapped: TargetActivations,
        key: Array,
        progress: Array,
    ) -> tuple[Array, dict[str, Array]]:
        given = (params, shared, batch, tapped)
        draws = draw(objective.masks, key, batch, progress)
        passes = [trace(moa, objective, *given, draws)]
        if objective.masks.first_tokens:
            free = dataclasses.replace(objective.masks, bounded=False, first_tokens=False)
            draws = draw(free, key, batch, progress)
            first = dataclasses.replace(objective, masks=free)
            passes.append(trace(moa, first, *given, draws, memory_BTD=passes[0].memory_BTD))
        return loss_of(passes, shared, batch, tapped, objective, progress)

    return loss


def loss_of(
    passes: Sequence[MoaTrace],
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    objective: Objective,
    progress: Array,
) -> tuple[Array, dict[str, Array]]:
    """The loss and its parts, means over the training forwards and over answer tokens.

    The feature loss is the distance of the head's input from the target's final-normed state; with
    TLI, half of the feature loss is instead the distance at the input of the reused layers.
    References: paper section 3.4; authors' train/moa_spec.py.
    """
    mean = lambda x_BT: losses.answer_mean(x_BT, batch.response_BT)
    counted = (batch.response_BT, tapped.draftable_BT)
    drafts = [distill_loss.Draft(found.feature_BTD, *counted) for found in passes]
    each = distill_loss.token_losses(objective, shared, None, tapped.hidden_BTD, drafts)
    for parts, found in zip(each, passes, strict=True):
        parts["feature_loss"] = mean(losses.smooth_l1(found.feature_BTD, tapped.hidden_BTD))
        if found.entry_BTD is not None:
            entry = mean(losses.smooth_l1(found.entry_BTD, tapped.streams[0]))
            parts["prev_feature_loss"] = entry
    parts = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
    feature = parts["feature_loss"]
    if "prev_feature_loss" in parts:
        feature = 0.5 * feature + 0.5 * parts["prev_feature_loss"]
    return distill_loss.weighted(objective.loss, parts, feature, progress)


def teacher_forced(
    moa: Moa,
    params: Params,
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    known_BT: Array,
    horizon: int,
) -> Array:
    """The features of unknown tokens, exactly as in decoding from the last known token.

    One pass is correct for any `horizon`, since no feature of a draft is fed back.
    """
    draws = Draws(known_BT, jnp.zeros(batch.tokens_BT.shape[0], bool))
    return trace(moa, AS_DECODED, params, shared, batch, tapped, draws).feature_BTD


def staircase_threshold(progress: Array) -> Array:
    """Rows that draw at least this value from [0, 1) use the staircase; 0 to 1 in half a run."""
    return jnp.minimum(2.0 * progress, 1.0)
