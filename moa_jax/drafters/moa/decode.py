"""Cached drafting with a MoA drafter.

condense  once per verification, on the target's machine: LSA, cache rows of CA and TLI
extend    once per verification: writes the digest to the caches, maybe on another machine
step      once per level of drafted nodes: SA, CA, TLI, head
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moa_jax.drafters.api import Params, Shared, TargetActivations
from moa_jax.drafters.moa.blocks import Moa
from moa_jax.drafters.tree import Nodes
from moa_jax.model import cache as kv_cache
from moa_jax.model import llama
from moa_jax.model.cache import KV
from moa_jax.model.layers import Block, CrossBlock, rotation

Array = jax.Array


class MoaCache(NamedTuple):
    """Rows of SA, of CA and, with N > 0, of the last N target layers; n = length.

    row           0 ......... n-1 | n ............ | ....... S-1
    SA, reused    verified tokens | root, drafts   | left-overs, never seen
    CA            verified tokens | left-overs, never seen
    """

    self_attention: KV | None  # None: a drafter without SA
    cross_attention: KV
    reused: tuple[KV, ...]


class MoaDigest(NamedTuple):
    """Cache rows of T verified tokens, from the target's activations: those of CA and TLI."""

    cross_attention: KV
    reused: tuple[KV, ...]


def init_cache(moa: Moa, batch: int, rows: int, dtype: jnp.dtype) -> MoaCache:
    """Empty caches of all parts."""
    sa, ca, _ = moa.blocks
    reused = range(moa.cfg.target_layer_inference)
    return MoaCache(
        None if sa is None else kv_cache.empty(sa, batch, rows, dtype),
        kv_cache.empty(ca, batch, rows, dtype),
        tuple(kv_cache.empty(moa.target_cfg.block, batch, rows, dtype) for _ in reused),
    )


def condense(moa: Moa, params: Params, length_B: Array, tapped: TargetActivations) -> MoaDigest:
    """CA's keys and values of the tokens' memory, and rows of the target's last N layers."""
    _, ca, _ = moa.blocks
    memory_BTD = moa.memory(params, tapped)
    position_BT = length_B[:, None] + jnp.arange(memory_BTD.shape[1])
    ca_rows = CrossBlock(ca).apply(
        {"params": params["cross_attention"]}, memory_BTD, rotation(ca, position_BT), method="rows"
    )
    layers = range(-moa.cfg.target_layer_inference, 0)
    reused = tuple(jax.tree.map(lambda a, i=i: a[i], tapped.rows_LBKTE) for i in layers)
    return MoaDigest(ca_rows, reused)


def extend(
    moa: Moa,
    params: Params,
    shared: Shared,
    cache: MoaCache,
    tokens_BT: Array,
    length_B: Array,
    digest: MoaDigest,
) -> MoaCache:
    """Adds verified tokens: SA rows from embeddings, all other rows from the digest."""
    sa, _, _ = moa.blocks
    position_BT = length_B[:, None] + jnp.arange(tokens_BT.shape[1])
    sa_cache = cache.self_attention
    if sa is not None:
        x_BTD, turn = llama.embed(shared, tokens_BT), rotation(sa, position_BT)
        sa_params = {"params": params["self_attention"]}
        sa_rows = Block(sa).apply(sa_params, x_BTD, turn, method="rows")
        sa_cache = kv_cache.write(sa_cache, sa_rows, length_B)
    pairs = zip(cache.reused, digest.reused, strict=True)
    return MoaCache(
        sa_cache,
        kv_cache.write(cache.cross_attention, digest.cross_attention, length_B),
        tuple(kv_cache.write(past, rows, length_B) for past, rows in pairs),
    )


def step(
    moa: Moa, params: Params, shared: Shared, cache: MoaCache, nodes: Nodes
) -> tuple[Array, MoaCache]:
    """Logits after some nodes, and the cache with their rows.

    SA and the reused layers see all rows before the root and a node's ancestors. CA sees known
    rows only, since its memory comes from the target. The rows of known tokens in the reused layers
    are the target's own rows. In a round all tokens before the root are known:

        row        0 .. n-1 | n     n+1 n+2   ...     n = length = known
        SA, TLI    x .. x   | root  its ancestors
        CA         x .. x   | .     .

    References: paper section 3. The authors' decoding with N > 0 does not run; training with
    MaskConfig.on_policy_reuse computes the same function.
    """
    sa, ca, _ = moa.blocks
    position_BW = nodes.position_BW
    x_BWD, sa_cache = llama.embed(shared, nodes.tokens_BW), cache.self_attention
    if sa is not None:
        sa_params, turn = {"params": params["self_attention"]}, rotation(sa, position_BW)
        x_BWD, _, sa_cache = Block(sa).apply(sa_params, x_BWD, turn, nodes.seen, sa_cache)
    x_BWD = CrossBlock(ca).apply(
        {"params": params["cross_attention"]},
        x_BWD,
        rotation(ca, position_BW),
        cache.cross_attention,
        nodes.known,
    )
    reused = cache.reused
    if reused:
        context = llama.Context(position_BW, nodes.seen, reused)
        layers = shared["layers"]
        x_BWD, _, _, reused = llama.apply_blocks(moa.target_cfg, layers, x_BWD, context)
        x_BWD = llama.final_norm(moa.target_cfg.block, shared, x_BWD)
    cache = MoaCache(sa_cache, cache.cross_attention, reused)
    return llama.unembed(shared, x_BWD), cache
