"""Attention over a cache on TPUs: a Pallas kernel for the prefix, joined with the tree.

    prefix   rows 0 .. n-1, the kernel: later blocks are neither fetched nor computed
    tree     rows n .. n+X-1, an einsum, since X is small

The two parts are joined by their log-sum-exps. A TPU runs the grid in order, so blocks of rows
are processed sequentially and keep a running softmax in scratch memory.

References: FlashAttention-2 (2307.08691).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from moa_jax.model import cache
from moa_jax.model.cache import KV, AnyCache
from moa_jax.model.masks import CacheMask
from moa_jax.model.rotary import Rotation, rotate_packed

Array = jax.Array

PLATFORM = "tpu"
LANES = 128  # lanes of a register row; a scalar per query is broadcast to all lanes
TILE = 16  # rows of a bfloat16 register: queries are padded to a multiple
QUERIES = 512  # maximum queries per program
NOTHING = -1e30  # the log-sum-exp of zero rows; finite, so that a difference of two is finite


keep_path = None  # a launch costs little on TPUs


def lacks(device: jax.Device) -> str:
    """The reason why a device cannot run the kernel: always empty, since every TPU can."""
    return ""


def is_possible(heads: Array, past: KV) -> bool:
    """Whether the kernel supports these caches; `Session` allocates whole blocks of rows."""
    S, E = past.k_BKSE.shape[2:]
    return S % LANES == 0 and E % 64 == 0 and heads.dtype == past.k_BKSE.dtype


def attend(
    packed_BTKXE: Array,
    turn: Rotation,
    past: AnyCache,
    cache_mask: CacheMask,
    *,
    interpret: bool = False,
) -> tuple[Array, AnyCache]:
    """Attention of the T tokens, (B, T, K, G, E), and the cache with their rows.

    The arguments are those of `attention.attend_cached`; a pass without new rows returns `past`.
    """
    heads_BKXTE = rotate_packed(packed_BTKXE, turn, has_rows=cache_mask.tree_size > 0)
    q_BKGTE = heads_BKXTE[:, :, :-2] if cache_mask.tree_size else heads_BKXTE
    B, K, G, T, E = q_BKGTE.shape
    prefix_BKGTE, lse_BKGT = _attend_prefix(q_BKGTE, past, cache_mask, interpret)
    if cache_mask.tree_size:
        rows = KV(heads_BKXTE[:, :, -2], heads_BKXTE[:, :, -1])
        past = cache.write(past, rows, cache_mask.start_B(T), cache_mask.window > 0)
        row_BX = cache_mask.length_B[:, None] + jnp.arange(cache_mask.tree_size)
        if T < cache_mask.tree_size:  # the first rows are those of earlier passes
            rows = cache.take(past, row_BX, cache_mask.window > 0)
        tree_BKGTE, tree_lse_BKGT = _attend_tree(q_BKGTE, rows, row_BX, cache_mask)
        higher_BKGT = jnp.maximum(lse_BKGT, tree_lse_BKGT)
        parts = ((lse_BKGT, prefix_BKGTE), (tree_lse_BKGT, tree_BKGTE))
        weights = [jnp.exp(lse_BKGT - higher_BKGT)[..., None] for lse_BKGT, _ in parts]
        mixed = [weight * part for weight, (_, part) in zip(weights, parts, strict=True)]
        prefix_BKGTE = sum(mixed) / sum(weights)
    return jnp.moveaxis(prefix_BKGTE, 3, 1).astype(q_BKGTE.dtype), past


def _attend_tree(
    q_BKGTE: Array, rows: KV, row_BX: Array, cache_mask: CacheMask
) -> tuple[Array, Array]:
    """Attention to the X rows after the prefix, and its log-sum-exps."""
    (k_BKXE, v_BKXE), (T, E) = rows, q_BKGTE.shape[3:]
    score_BKGTX = E**-0.5 * jnp.einsum(
        "BKGTE,BKXE->BKGTX", q_BKGTE, k_BKXE, preferred_element_type=jnp.float32
    )
    seen_BTX = cache_mask.tree_mask(T)
    if cache_mask.first:
        seen_BTX = seen_BTX & (row_BX >= cache_mask.first)[:, None]
    score_BKGTX = jnp.where(seen_BTX[:, None, None], score_BKGTX, NOTHING)
    lse_BKGT = jax.nn.logsumexp(score_BKGTX, axis=-1)
    weight_BKGTX = jnp.exp(score_BKGTX - lse_BKGT[..., None]).astype(v_BKXE.dtype)
    mixed_BKGTE = jnp.einsum(
        "BKGTX,BKXE->BKGTE", weight_BKGTX, v_BKXE, preferred_element_type=jnp.float32
    )
    return mixed_BKGTE, lse_BKGT


def _attend_prefix(
    q_BKGTE: Array, past: AnyCache, cache_mask: CacheMask, interpret: bool
) -> tuple[Array, Array]:
    """Attention to the verified rows in float32, and its log-sum-exps."""
    B, K, G, T, E = q_BKGTE.shape
    kv, slot_B = cache.parts_of(past)
    S = kv.k_BKSE.shape[2]
    num = -(-G * T // TILE) * TILE
    block = min(num, QUERIES)
    num = -(-num // block) * block
    q_BKQE = q_BKGTE.reshape(B, K, G * T, E)
    q_BKQE = jnp.pad(q_BKQE, ((0, 0), (0, 0), (0, num - G * T), (0, 0)))
    rows = next(size for size in (512, 256, 128) if S % size == 0)
    window = cache_mask.window
    last = lambda length: jnp.maximum(pl.cdiv(length, rows) - 1, 0)
    fetched = lambda s, n: jnp.minimum(s, last(n))
    if window:
        fetched = lambda s, n: jnp.minimum(s + _start(n, window, rows), last(n)) % (S // rows)
    queries = pl.BlockSpec((None, None, block, E), lambda b, k, q, s, n, slot: (b, k, q, 0))
    # A block is not fetched twice in a row: beyond the prefix, the index stays at the last block.
    # The blocks of a ring are those of positions, from the first block in the window on.
    keys = pl.BlockSpec(
        (None, None, rows, E),
        lambda b, k, q, s, n, slot: (slot[b], k, fetched(s, n[b]), 0),
    )
    numbers = pl.BlockSpec((None, None, block, LANES), lambda b, k, q, s, n, slot: (b, k, q, 0))
    scratch = [tpu.VMEM((block, width), jnp.float32) for width in (LANES, LANES, E)]
    firsts: list[Array] = []
    if window:  # of each query, in all lanes
        first_BT = jnp.broadcast_to(cache_mask.first_BT(T), (B, T)).astype(jnp.int32)
        first_BQ = jnp.pad(jnp.tile(first_BT, G), ((0, 0), (0, num - G * T)))
        firsts = [jnp.broadcast_to(first_BQ[..., None], (B, num, LANES))]
    first = pl.BlockSpec((None, block, LANES), lambda b, k, q, s, n, slot: (b, q, 0))
    S_seen = min(S, window or S)
    pairs = B * K * G * T * S_seen
    size = q_BKQE.dtype.itemsize
    mixed_BKQE, lse_BKQX = pl.pallas_call(
        functools.partial(_prefix_kernel, rows, cache_mask.first, window),
        out_shape=[
            jax.ShapeDtypeStruct(q_BKQE.shape, jnp.float32),
            jax.ShapeDtypeStruct((B, K, num, LANES), jnp.float32),
        ],
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            # The first and the last block of a window may be parts of one block of a ring.
            grid=(B, K, num // block, S // rows + (window > 0)),
            in_specs=[queries, keys, keys, *[first] * len(firsts)],
            out_specs=[queries, numbers],
            scratch_shapes=scratch,
        ),
        name="attend_prefix",
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=4 * pairs * E,
            bytes_accessed=size * (q_BKQE.size + (num // block) * 2 * B * K * S_seen * E)
            + 4 * B * K * num * (E + LANES),
            transcendentals=pairs,
        ),
    )(cache_mask.length_B, slot_B, q_BKQE, *kv, *firsts)
    mixed_BKGTE = mixed_BKQE[:, :, : G * T].reshape(B, K, G, T, E)
    return mixed_BKGTE, lse_BKQX[:, :, : G * T, 0].reshape(B, K, G, T)


def _start(length: Array, window: int, rows: int) -> Array:
    """The first block of positions in the window of the root, whose window starts first."""
    return jnp.maximum(length + 1 - window, 0) // rows


def _prefix_kernel(
    rows: int,
    first: int,
    window: int,
    length_ref,
    slot_ref,
    q_ref,
    k_ref,
    v_ref,
    *rest,
) -> None:
    """Processes one block of rows for one block of queries."""
    firsts, (mixed_ref, lse_ref, best_ref, total_ref, sum_ref) = rest[:-5], rest[-5:]
    length, index = length_ref[pl.program_id(0)], pl.program_id(3)
    block = index + _start(length, window, rows) if window else index

    @pl.when(index == 0)
    def _() -> None:
        best_ref[...] = jnp.full_like(best_ref, NOTHING)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(block * rows < length)
    def _() -> None:
        q_QE, v_RE = q_ref[...], v_ref[...]
        # Rows beyond the prefix may hold NaN, which a weight of 0 would not remove.
        row_RE = block * rows + lax.broadcasted_iota(jnp.int32, v_RE.shape, 0)
        v_RE = jnp.where(row_RE < length, v_RE, jnp.zeros_like(v_RE))
        precision = lax.Precision.HIGHEST if q_QE.dtype == jnp.float32 else None
        dot = functools.partial(
            lax.dot_general, preferred_element_type=jnp.float32, precision=precision
        )
        score_QR = dot(q_QE, k_ref[...], (((1,), (1,)), ((), ()))) * q_QE.shape[1] ** -0.5
        row_QR = block * rows + lax.broadcasted_iota(jnp.int32, score_QR.shape, 1)
        seen_QR = (row_QR < length) & (row_QR >= first)
        if window:
            seen_QR &= row_QR >= firsts[0][:, :1]
        score_QR = jnp.where(seen_QR, score_QR, NOTHING)
        best_Q1 = best_ref[:, :1]
        higher_Q1 = jnp.maximum(best_Q1, jnp.max(score_QR, axis=1, keepdims=True))
        weight_QR = jnp.where(seen_QR, jnp.exp(score_QR - higher_Q1), 0.0)
        fade_Q1 = jnp.exp(best_Q1 - higher_Q1)
        total_Q1 = fade_Q1 * total_ref[:, :1] + jnp.sum(weight_QR, axis=1, keepdims=True)
        mixed_QE = dot(weight_QR.astype(v_RE.dtype), v_RE, (((1,), (0,)), ((), ())))
        sum_ref[...] = fade_Q1 * sum_ref[...] + mixed_QE
        best_ref[...] = jnp.broadcast_to(higher_Q1, best_ref.shape)
        total_ref[...] = jnp.broadcast_to(total_Q1, total_ref.shape)

    @pl.when(index == pl.num_programs(3) - 1)
    def _() -> None:
        total_QX = total_ref[...]
        found_QX = total_QX > 0
        divisor_QX = jnp.where(found_QX, total_QX, 1.0)
        mixed_ref[...] = sum_ref[...] / divisor_QX[:, :1]
        lse_ref[...] = jnp.where(found_QX, best_ref[...] + jnp.log(divisor_QX), NOTHING)
