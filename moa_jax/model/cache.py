"""Key-value caches of verified tokens: preallocated rows, written in place, one pair per layer.

A cache of S rows during a round (n = length, N = nodes of the round):

    row      0 ......... n-1 | n ........ n+N-1 | n+N ....... S-1
             verified tokens | root and drafts  | left-overs, never seen

Committing a chain moves no rows: the accepted nodes are already stored at their final rows, and the
length grows over them. The accepted path of a tree is written again, from row n on. All caches
of a generation have the same length, except a drafter's caches with a draft lag (decode/step.py).
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


def write(cache: AnyCache, new: KV | HiddenCache, start_B: Array) -> AnyCache:
    """`cache` with the T rows of `new` at rows start .. start + T - 1 of each batch row.

    The new rows must fit: XLA clamps a start above S - T and so overwrites older rows.
    """
    if isinstance(cache, SlotCache):
        place = lambda past, rows: _write_slots(past, rows, cache.slot_B, start_B)
        return cache._replace(arrays=jax.tree.map(place, cache.arrays, new))
    return jax.tree.map(lambda past, rows: write_rows(past, rows, start_B), cache, new)


def join(past: KV, new: KV) -> KV:
    """The P rows of `past` followed by the T rows of `new`."""
    return KV(*(jnp.concatenate(pair, axis=2) for pair in zip(past, new, strict=True)))


def take(rows: AnyCache, path_BD: Array) -> KV | HiddenCache:
    """Selects the rows of a path of D nodes from the T rows of one pass, or from caches."""
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


def write_rows(cache_BKSE: Array, new_BKTE: Array, start_B: Array) -> Array:
    """One array of a cache with T new rows; any array with rows on axis 2 works."""
    new_BKTE = new_BKTE.astype(cache_BKSE.dtype)
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


def _write_slots(cache_RKSE: Array, new_BKTE: Array, slot_B: Array, start_B: Array) -> Array:
    """One array of the caches of all slots, with T new rows in B slots."""
    new_BKTE = new_BKTE.astype(cache_RKSE.dtype)
    is_cpu = traced_platform() == "cpu"
    if is_cpu and cache_RKSE.dtype == jnp.bfloat16:  # as in `write_rows`
        bits = lambda rows: lax.bitcast_convert_type(rows, jnp.uint16)
        written = _write_slots(bits(cache_RKSE), bits(new_BKTE), slot_B, start_B)
        return lax.bitcast_convert_type(written, cache_RKSE.dtype)

    def write_one(b: Array | int, cache_RKSE: Array) -> Array:
        new_1KTE = lax.dynamic_slice_in_dim(new_BKTE, b, 1, axis=0)
        return lax.dynamic_update_slice(cache_RKSE, new_1KTE, (slot_B[b], 0, start_B[b], 0))

    if len(slot_B) == 1:
        return write_one(0, cache_RKSE)
    if is_cpu:  # in place, as XLA's expansion of a scatter is not
        return lax.fori_loop(0, len(slot_B), write_one, cache_RKSE)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, 2),
    )
    at_B2 = jnp.stack([slot_B, start_B], axis=-1)
    mode = lax.GatherScatterMode.CLIP
    return lax.scatter(cache_RKSE, at_B2, new_BKTE, dimensions, unique_indices=True, mode=mode)
