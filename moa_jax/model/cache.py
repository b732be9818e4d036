"""Keys and values of verified tokens: preallocated rows, written in place, one pair a layer.

A cache of S rows while a round is under way (n = length, N = nodes of the round):

    row      0 ......... n-1 | n ........ n+N-1 | n+N ....... S-1
             verified tokens | root and drafts  | left-overs, never seen

The commit of a chain moves no rows: accepted nodes already stand where they belong, and the
length grows over them. The accepted path of a tree is written again, from row n on. All caches
of a generation have the same length.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moa_jax.config import BlockConfig

Array = jax.Array


class KV(NamedTuple):
    """Keys (after RoPE) and values of one layer; with T for S, the new rows of one pass."""

    k_BKSE: Array
    v_BKSE: Array


def empty(cfg: BlockConfig, batch: int, rows: int, dtype: jnp.dtype) -> KV:
    """A zeroed cache for one layer of `cfg`."""
    shape = (batch, cfg.num_kv_heads, rows, cfg.head_dim)
    return KV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KV, new: KV, start_B: Array) -> KV:
    """`cache` with the T rows of `new` at rows start .. start + T - 1 of each batch row.

    The rows must fit: a start above S - T would be clamped, and older rows overwritten.
    """
    return KV(*(write_rows(past, rows, start_B) for past, rows in zip(cache, new, strict=True)))


def take(rows: KV, path_BD: Array) -> KV:
    """The rows of a path of D nodes, from the T rows of one pass."""
    pick = lambda rows_BKTE: jnp.take_along_axis(rows_BKTE, path_BD[:, None, :, None], axis=2)  # noqa: E731
    return KV(pick(rows.k_BKSE), pick(rows.v_BKSE))


def write_rows(cache_BKSE: Array, new_BKTE: Array, start_B: Array) -> Array:
    """One array of a cache with T new rows; any array that is kept by rows will do."""
    new_BKTE = new_BKTE.astype(cache_BKSE.dtype)
    if cache_BKSE.shape[0] == 1:  # a plain slice update stays in place; a scatter may not
        return lax.dynamic_update_slice(cache_BKSE, new_BKTE, (0, 0, start_B[0], 0))
    update = lambda row, new, start: lax.dynamic_update_slice(row, new, (0, start, 0))  # noqa: E731
    return jax.vmap(update)(cache_BKSE, new_BKTE, start_B)
