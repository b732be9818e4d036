"""Key-value caches of verified tokens: preallocated rows, written in place, one pair per layer.

A cache of S rows during a round (n = length, N = nodes of the round):

    row      0 ......... n-1 | n ........ n+N-1 | n+N ....... S-1
             verified tokens | root and drafts  | left-overs, never seen

Committing a chain moves no rows: the accepted nodes are already stored at their final rows, and the
length grows over them. The accepted path of a tree is written again, from row n on. All caches
of a generation have the same length, except a drafter's caches with a draft lag (decode/step.py).

The cache of a layer with a sliding window is a ring: the row of a position is the position mod S. A
target's ring has few rows (`ring_rows`), other rings have all. A round at length n overwrites rows
whose position is before the window of each of its tokens. A ring of 8 rows, window 3, n = 9, N = 3:

    row        0     1     2     3     4     5     6     7
    position   8   | 9    10    11   | 4     5     6     7      10 and 11 may be rejected
    root 9     x   | x     .     .   | .     .     .     x
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import BlockConfig
from moa_jax.runtime.devices import traced_platform

Array = jax.Array

TILE = 128  # XLA pads caches whose rows are no multiple, in every layer and round


class KV(NamedTuple):
    """Keys (after RoPE) and values of one layer; with T instead of S, the new rows of one pass."""

    k_BKSE: Array
    v_BKSE: Array


class HiddenCache(NamedTuple):
    """One vector per token, such as a residual stream; a mesh splits the feature axis."""

    x_B1SD: Array


class SlotCache(NamedTuple):
    """Caches of R slots, of which a pass of B sequences reads and writes B, in place.

    slots     0 1 2 3 4 ... R-1          slot_B    the slot of each sequence; no slot twice
                  ^   ^
    pass          2   4                  moving rows to a cache of B sequences would copy them
    """

    arrays: KV | HiddenCache  # (R, K, S, E)
    slot_B: Array


AnyCache = TypeVar("AnyCache", KV, HiddenCache, SlotCache)


def is_cache(part: Any) -> bool:
    """Whether a part of a state has rows for tokens that a `SlotCache` can read and write."""
    return isinstance(part, KV | HiddenCache)


def of_slots(cache: KV | SlotCache) -> KV:
    """The arrays of a cache, with one row per slot or per sequence."""
    return cache.arrays if isinstance(cache, SlotCache) else cache


def parts_of(cache: KV | SlotCache) -> tuple[KV, Array]:
    """The arrays of a cache, and the row of each sequence (B,)."""
    if isinstance(cache, SlotCache):
        return cache
    return cache, jnp.asarray(np.arange(cache.k_BKSE.shape[0], dtype=np.int32))  # a constant


def with_arrays(cache: AnyCache, arrays: KV) -> AnyCache:
    """The cache with other arrays."""
    return cache._replace(arrays=arrays) if isinstance(cache, SlotCache) else arrays


def empty(cfg: BlockConfig, batch: int, rows: int, dtype: jnp.dtype) -> KV:
    """A zeroed cache for one layer of `cfg`."""
    shape = (batch, cfg.num_kv_heads, rows, cfg.head_dim)
    return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def ring_rows(window: int, rows: int, ahead: int | None) -> int:
    """The rows of a layer's cache: `rows`, or fewer for a layer with a window.

    `ahead` is the number of rows that calls may have written after a sequence's tokens. None: all
    layers have `rows`.
    """
    if not window or ahead is None:
        return rows
    return min(rows, -(-(window + ahead) // TILE) * TILE)


def write(
    cache: AnyCache, new: KV | HiddenCache, start_B: Array, is_ring: bool = False
) -> AnyCache:
    """`cache` with the T rows of `new` at rows start .. start + T - 1 of each batch row.

    In a ring, the start is a position. Elsewhere the new rows must fit: XLA clamps a start above
    S - T and so overwrites older rows.
    """
    if isinstance(cache, SlotCache):
        place = lambda past, rows: _write_slots(past, rows, cache.slot_B, start_B, is_ring)
        return cache._replace(arrays=jax.tree.map(place, cache.arrays, new))
    return jax.tree.map(lambda past, rows: write_rows(past, rows, start_B, is_ring), cache, new)


def join(past: KV, new: KV) -> KV:
    """The P rows of `past` followed by the T rows of `new`."""
    return KV(*(jnp.concatenate(pair, axis=2) for pair in zip(past, new, strict=True)))


def take(rows: AnyCache, path_BD: Array, is_ring: bool = False) -> KV | HiddenCache:
    """Selects the rows of a path of D nodes from the T rows of one pass, or from caches.

    In a ring, the path has positions.
    """
    if is_ring:
        path_BD = path_BD % of_slots(rows).k_BKSE.shape[2]
    if isinstance(rows, SlotCache):
        slot_B11, path_B1D = rows.slot_B[:, None, None], path_BD[:, None, :]
        pick = lambda x_RKSE: x_RKSE[slot_B11, jnp.arange(x_RKSE.shape[1])[:, None], path_B1D]
        return jax.tree.map(pick, rows.arrays)
    pick = lambda x_BKTE: jnp.take_along_axis(x_BKTE, path_BD[:, None, :, None], axis=2)
    return jax.tree.map(pick, rows)


def lean(tree: Any) -> Any:
    """Squeezes arrays; a loop on a CPU should carry the caches of a single sequence squeezed.

    XLA on CPUs fuses the write of a single row into each bitcast of the cache. Two bitcasts, for
    attention and for the next round, are two writes, and each write would copy the cache. Slots
    have no bitcasts.
    """
    slots = lambda part: isinstance(part, SlotCache)
    squeeze = lambda part: part if slots(part) else jnp.squeeze(part)
    return jax.tree.map(squeeze, tree, is_leaf=slots)


def write_rows(cache_BKSE: Array, new_BKTE: Array, start_B: Array, is_ring: bool = False) -> Array:
    """One array of a cache with T new rows; any array with rows on axis 2 works."""
    if is_ring and (len(start_B) > 1 or new_BKTE.shape[2] > 1):
        slot_B = jnp.arange(len(start_B))
        return _write_slots(cache_BKSE, new_BKTE, slot_B, start_B, is_ring)
    new_BKTE = new_BKTE.astype(cache_BKSE.dtype)
    start_B = start_B % cache_BKSE.shape[2] if is_ring else start_B
    B, K, S, E = cache_BKSE.shape
    if cache_BKSE.dtype == jnp.bfloat16 and traced_platform() == "cpu":
        # XLA on CPUs would convert the whole cache to float32 for the scatter.
        bits = lambda rows: lax.bitcast_convert_type(rows, jnp.uint16)
        written = write_rows(bits(cache_BKSE), bits(new_BKTE), start_B)
        return lax.bitcast_convert_type(written, cache_BKSE.dtype)
    if B == 1:  # a plain slice update stays in place; a scatter may not
        heads = () if K == 1 else (K,)  # axes of 1 would be bitcasts around the update: see `lean`
        rows, new = cache_BKSE.reshape(*heads, S, E), new_BKTE.reshape(*heads, -1, E)
        start = (*(0 for _ in heads), start_B[0], 0)
        return lax.dynamic_update_slice(rows, new, start).reshape(cache_BKSE.shape)
    update = lambda row, new, start: lax.dynamic_update_slice(row, new, (0, start, 0))
    return jax.vmap(update)(cache_BKSE, new_BKTE, start_B)


def _write_slots(
    cache_RKSE: Array, new_BKTE: Array, slot_B: Array, start_B: Array, is_ring: bool
) -> Array:
    """One array of the caches of all slots, with T new rows in B slots."""
    new_BKTE = new_BKTE.astype(cache_RKSE.dtype)
    is_cpu = traced_platform() == "cpu"
    if is_cpu and cache_RKSE.dtype == jnp.bfloat16:  # as in `write_rows`
        bits = lambda rows: lax.bitcast_convert_type(rows, jnp.uint16)
        written = _write_slots(bits(cache_RKSE), bits(new_BKTE), slot_B, start_B, is_ring)
        return lax.bitcast_convert_type(written, cache_RKSE.dtype)

    def write_one(b: Array | int, cache_RKSE: Array) -> Array:
        new_1KTE = lax.dynamic_slice_in_dim(new_BKTE, b, 1, axis=0)
        if is_ring:
            return _write_around(cache_RKSE, new_1KTE, slot_B[b], start_B[b])
        return lax.dynamic_update_slice(cache_RKSE, new_1KTE, (slot_B[b], 0, start_B[b], 0))

    if len(slot_B) == 1:
        return write_one(0, cache_RKSE)
    if traced_platform() != "gpu":  # in place, as XLA's expansion of a scatter is not
        return lax.fori_loop(0, len(slot_B), write_one, cache_RKSE)
    if is_ring:
        row_BT = (start_B[:, None] + jnp.arange(new_BKTE.shape[2])) % cache_RKSE.shape[2]
        at = cache_RKSE.at[slot_B[:, None], :, row_BT]
        return at.set(new_BKTE.swapaxes(1, 2), unique_indices=True)  # indexed axes come first
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, 2),
    )
    at_B2 = jnp.stack([slot_B, start_B], axis=-1)
    mode = lax.GatherScatterMode.CLIP
    return lax.scatter(cache_RKSE, at_B2, new_BKTE, dimensions, unique_indices=True, mode=mode)


def _write_around(cache_RKSE: Array, new_1KTE: Array, slot: Array, position: Array) -> Array:
    """One slot of a ring with T new rows, of which the last `over` continue at row 0.

    new rows     a b c d           rolled by 2 over the end: c d a b
    ring         . . . . . a b     first a and b of these, at the last T rows
                 c d . . . a b     then c and d, at the first T rows
    """
    S, T = cache_RKSE.shape[2], new_1KTE.shape[2]
    start = position % S
    if T == 1:
        return lax.dynamic_update_slice(cache_RKSE, new_1KTE, (slot, 0, start, 0))
    over = jnp.maximum(start + T - S, 0)
    rolled_1KTE, is_over_T1 = jnp.roll(new_1KTE, over, axis=2), (jnp.arange(T) < over)[:, None]
    for row, is_new_T1 in ((start - over, ~is_over_T1), (0, is_over_T1)):
        at = (slot, 0, row, 0)
        old_1KTE = lax.dynamic_slice(cache_RKSE, at, new_1KTE.shape)
        rows_1KTE = jnp.where(is_new_T1, rolled_1KTE, old_1KTE)
        cache_RKSE = lax.dynamic_update_slice(cache_RKSE, rows_1KTE, at)
    return cache_RKSE
