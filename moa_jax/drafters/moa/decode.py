"""Cached drafting with a MoA drafter: `extend` once per verification, `step` per drafted token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moa_jax import cache as kv_cache
from moa_jax import masks, target
from moa_jax.cache import KV
from moa_jax.config import DraftShape
from moa_jax.drafters.api import Guide, Params, Shared, Tapped, Tree
from moa_jax.drafters.grow import grow
from moa_jax.drafters.moa.blocks import Moa
from moa_jax.layers import Block, CrossBlock, rotation

Array = jax.Array


class MoaCache(NamedTuple):
    """Rows of verified tokens in SA, CA and (N > 0) the drafter's copy of the last N layers."""

    self_attention: KV | None  # None: a drafter without SA
    cross_attention: KV
    reused: tuple[KV, ...]


def init_cache(moa: Moa, batch: int, rows: int, dtype: jnp.dtype) -> MoaCache:
    """Empty rows for every part."""
    sa, ca, _ = moa.blocks
    reused = range(moa.cfg.target_layer_inference)
    return MoaCache(
        None if sa is None else kv_cache.empty(sa, batch, rows, dtype),
        kv_cache.empty(ca, batch, rows, dtype),
        tuple(kv_cache.empty(moa.target_cfg.block, batch, rows, dtype) for _ in reused),
    )


def extend(
    moa: Moa,
    params: Params,
    shared: Shared,
    cache: MoaCache,
    tokens_BT: Array,
    length_B: Array,
    tapped: Tapped,
) -> MoaCache:
    """Adds verified tokens: SA rows from embeddings, CA rows from memory, copies for TLI."""
    sa, ca, _ = moa.blocks
    position_BT = length_B[:, None] + jnp.arange(tokens_BT.shape[1])
    sa_cache = cache.self_attention
    if sa is not None:
        x_BTD, turn = target.embed(shared, tokens_BT), rotation(sa, position_BT)
        sa_params = {"params": params["self_attention"]}
        sa_rows = Block(sa).apply(sa_params, x_BTD, turn, method="rows")
        sa_cache = kv_cache.write(sa_cache, sa_rows, length_B)
    ca_rows = CrossBlock(ca).apply(
        {"params": params["cross_attention"]},
        moa.memory(params, tapped.rows_LBKTE),
        rotation(ca, position_BT),
        method="rows",
    )
    last = [
        jax.tree.map(lambda a, i=i: a[i - len(cache.reused)], tapped.rows_LBKTE)
        for i in range(len(cache.reused))
    ]
    return MoaCache(
        sa_cache,
        kv_cache.write(cache.cross_attention, ca_rows, length_B),
        tuple(kv_cache.write(c, r, length_B) for c, r in zip(cache.reused, last, strict=True)),
    )


def propose(
    moa: Moa,
    params: Params,
    shared: Shared,
    cache: MoaCache,
    root_B: Array,
    length_B: Array,
    shape: DraftShape,
    guide: Guide,
) -> tuple[Tree, MoaCache]:
    """The tree of `shape`, grown from the root level by level."""

    def level(
        cache: MoaCache, tokens_BW: Array, ancestor_BWX: Array, depth: int
    ) -> tuple[Array, MoaCache]:
        return step(moa, params, shared, cache, tokens_BW, ancestor_BWX, length_B, depth)

    return grow(level, cache, root_B, shape, guide)


def step(
    moa: Moa,
    params: Params,
    shared: Shared,
    cache: MoaCache,
    tokens_BW: Array,
    ancestor_BWX: Array,
    length_B: Array,
    depth: int | Array,
) -> tuple[Array, MoaCache]:
    """Logits after W nodes, of one `depth` or each its own, the last of the X fed in this round.

    SA and the reused layers see verified rows and a node's ancestors, CA verified rows only.
    The reused layers' verified rows are the target's own:

        row        0 .. n-1 | n     n+1 n+2   ...     n = length
        SA, TLI    x .. x   | root  its ancestors
        CA         x .. x   | .     .

    References: paper section 3. The authors' decoding with N > 0 never ran; training computes
    the same with MaskConfig.on_policy_reuse.
    """
    sa, ca, _ = moa.blocks
    W, X = ancestor_BWX.shape[1:]
    start_B = length_B + X - W
    position_BW = jnp.broadcast_to(length_B[:, None] + depth, tokens_BW.shape)
    rows = cache.cross_attention.k_BKSE.shape[2]
    seen_BWS = masks.cached(ancestor_BWX, length_B, rows)
    verified_B1S = (jnp.arange(rows) < length_B[:, None])[:, None, :]
    x_BWD, sa_cache = target.embed(shared, tokens_BW), cache.self_attention
    if sa is not None:
        sa_params, turn = {"params": params["self_attention"]}, rotation(sa, position_BW)
        x_BWD, _, sa_cache = Block(sa).apply(sa_params, x_BWD, turn, seen_BWS, sa_cache, start_B)
    x_BWD = CrossBlock(ca).apply(
        {"params": params["cross_attention"]},
        x_BWD,
        rotation(ca, position_BW),
        cache.cross_attention,
        verified_B1S,
    )
    reused = cache.reused
    if reused:
        block = moa.target_cfg.block
        turn = rotation(block, position_BW)
        x_BWD, _, _, reused = target.apply_blocks(
            block, shared["layers"], x_BWD, turn, seen_BWS, reused, start_B
        )
        x_BWD = target.final_norm(block, shared, x_BWD)
    cache = MoaCache(sa_cache, cache.cross_attention, reused)
    return target.unembed(shared, x_BWD), cache
