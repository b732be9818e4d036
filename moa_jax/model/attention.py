"""Grouped softmax attention: within a pass, and over a cache of which a pass sees a part.

Within a pass, in training, each token sees an interval of rows. GPUs and TPUs take them in blocks
whose scores stay on the chip (`attention_intervals.py`); elsewhere an einsum makes all scores.

    row of a cache   0 ......... n-1 | n ....... n+X-1 | n+X ....... S-1
                     prefix: all see | tree: ancestors | left-overs, never seen
                     every row       |                 |

Allocated rows are S, used rows n + X. The einsum reads all S under a mask, but on a CPU of several
long caches, and of one for a chunk of a prompt, a quarter, half or all, as the longest text needs.
The kernels of accelerators read the n rows of the prefix, which need no mask but their number, and
apart from these the X rows of the tree. They join the two by their log-sum-exps. `attend_cached`
chooses: a program compiled for a GPU gets Pallas-Triton, one for a TPU gets Pallas, any other the
einsum. On a mesh each device does this for its heads and its rows of the batch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from types import ModuleType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.model import cache, chunks, sharding
from moa_jax.model.cache import KV
from moa_jax.model.masks import Intervals, Sight
from moa_jax.model.rotary import Rotation, rotate_packed
from moa_jax.runtime.devices import traced_platform

Array = jax.Array

LONG = 512  # rows of caches of several texts that a CPU reads as far as they are used
MANY = 32  # tokens of one text for which it does so too: a chunk of a prompt, and few trees
QUERY_CHUNK = 512  # tokens whose attention scores are held at a time
INTERVALS = "scores_of_intervals_"  # names operations, before a number of parts, for `flops.py`


# Within a pass intervals or a mask (B, T, S), a sight where there is a cache.
Seen = Array | Intervals | Sight
_by_einsum = ContextVar("_by_einsum", default=False)


@contextlib.contextmanager
def computed(way: Literal["blocks", "einsum"]) -> Iterator[None]:
    """Inside it programs are traced that take intervals in blocks, where there is a kernel."""
    before = _by_einsum.set(way == "einsum")
    try:
        yield
    finally:
        _by_einsum.reset(before)


def sees_anything(seen: Seen) -> Array:
    """Whether a token sees any row at all, (B, T, 1); T is 1 where that is the same for all."""
    if isinstance(seen, Intervals):
        return (seen.first_PBT <= seen.last_PBT).any(axis=0)[..., None]
    if not isinstance(seen, Sight):
        return seen.any(axis=-1, keepdims=True)
    prefix_B11 = (seen.length_B > seen.first)[:, None, None]
    if seen.ancestor_BTX is None:
        return prefix_B11 | (seen.num_behind > 0)
    return prefix_B11 | seen.ancestor_BTX.any(axis=-1, keepdims=True)


def attend(q_BKGTE: Array, kv: KV, seen: Array | Intervals) -> Array:
    """Attention over the visible rows, (B, T, K, G, E).

    By einsum the queries of a group join the token axis, so that both products are plain batched
    matrix products and the scores, the largest array here, are never transposed. There a token
    that sees nothing gets the mean of rows, and zeros from a kernel.
    """
    if isinstance(seen, Intervals):
        if kernels := _by_intervals(q_BKGTE, kv):
            return kernels.attend(q_BKGTE, kv, seen)
        with jax.named_scope(f"{INTERVALS}{seen.first_PBT.shape[0]}"):
            return attend(q_BKGTE, kv, seen.mask())
    if q_BKGTE.shape[3] > QUERY_CHUNK:  # the scores of long rows would outgrow the weights
        q_BTKGE = jnp.moveaxis(q_BKGTE, 3, 1)
        part = lambda piece: _attend(jnp.moveaxis(piece[0], 1, 3), kv, piece[1])
        mask_BTS = jnp.broadcast_to(seen, (q_BTKGE.shape[0], *seen.shape[1:]))
        return chunks.map_over(part, (q_BTKGE, mask_BTS), QUERY_CHUNK, axis=1)
    return _attend(q_BKGTE, kv, seen)


def _by_intervals(q_BKGTE: Array, kv: KV) -> ModuleType | None:
    """The kernels that take such heads; None where there are none for them or for the device."""
    if _by_einsum.get() or _kernels() is None:
        return None
    from moa_jax.model import attention_intervals  # Pallas takes a while to be imported

    if attention_intervals.is_possible(q_BKGTE, kv):
        return attention_intervals
    T, E = q_BKGTE.shape[3:]
    _say(f"no kernel for rows of {T} tokens and heads of {E}", "their scores are stored")
    return None


def attend_cached(packed_BTKXE: Array, turn: Rotation, past: KV, sight: Sight) -> tuple[Array, KV]:
    """Writes the new rows of a pass to a cache and attends to the cache's visible rows.

    Heads come as a projection gives them, and are rotated here. The G queries of each key-value
    head are followed by a key and a value, X = G + 2, unless the sight has no tokens behind the
    prefix. Returns (B, T, K, G, E) and the cache.
    """
    if not sharding.is_cut():
        return _attend_cached(packed_BTKXE, turn, past, sight)
    mesh = jax.sharding.get_abstract_mesh()
    heads = sharding.dividing(("rows", None, "kv_heads"), packed_BTKXE.shape, mesh)
    given, caches = sharding.specs_of((turn, past, sight), mesh), sharding.specs_of(past, mesh)
    part = jax.shard_map(
        _attend_cached, in_specs=(heads, *given), out_specs=(heads, caches), check_vma=False
    )
    return part(packed_BTKXE, turn, past, sight)


def _attend_cached(packed_BTKXE: Array, turn: Rotation, past: KV, sight: Sight) -> tuple[Array, KV]:
    kernels = _kernels()
    if kernels and not kernels.is_possible(packed_BTKXE, past):
        _say(f"no {kernels.PLATFORM} kernel for such heads or caches")
        kernels = None
    if kernels is None:
        return by_einsum(packed_BTKXE, turn, past, sight)
    branch = {kernels.PLATFORM: kernels.attend}
    return lax.platform_dependent(packed_BTKXE, turn, past, sight, default=by_einsum, **branch)


def keep_path(
    caches: tuple[KV, ...], taken: tuple[KV, ...], path_BD: Array, length_B: Array
) -> tuple[KV, ...]:
    """Puts the rows of a path of D nodes to the front of those behind the verified ones.

    Node i stands at row length + i of each cache, its place on the path is length + level. `taken`
    has the same rows as the pass made them: XLA would copy a cache that it reads and writes.
    """
    given = (caches, taken, path_BD, length_B)
    if not sharding.is_cut():
        return _keep_path(*given)
    specs = sharding.specs_of(given, jax.sharding.get_abstract_mesh())
    part = jax.shard_map(_keep_path, in_specs=specs, out_specs=specs[0], check_vma=False)
    return part(*given)


def _keep_path(
    caches: tuple[KV, ...], taken: tuple[KV, ...], path_BD: Array, length_B: Array
) -> tuple[KV, ...]:
    write = functools.partial(_write_path, taken)
    kernels = _kernels() if caches else None
    able = kernels is not None and kernels.keep_path is not None
    if not (able and kernels.is_possible(caches[0].k_BKSE, caches[0])):
        return write(caches, path_BD, length_B)
    branch = {kernels.PLATFORM: kernels.keep_path}
    return lax.platform_dependent(caches, path_BD, length_B, default=write, **branch)


def _kernels() -> ModuleType | None:
    """The kernels of the device that a program is traced for; None where it has none."""
    platform = traced_platform()
    try:
        if platform == "tpu":
            from moa_jax.model import attention_tpu as found
        elif platform == "gpu":
            from moa_jax.model import attention_gpu as found
        else:
            return None
    except ImportError as error:
        _say(f"this jax has no Pallas kernels for a {platform} ({error})")
        return None
    is_here = platform == jax.default_backend()
    if is_here and (reason := found.lacks(jax.local_devices()[0])):
        _say(reason)
        return None
    return found


@functools.cache  # once for each reason
def _say(reason: str, so: str = "attention reads whole caches") -> None:
    logging.getLogger(__name__).warning("%s: %s (einsum)", reason, so)


def _write_path(
    taken: tuple[KV, ...], caches: tuple[KV, ...], path_BD: Array, length_B: Array
) -> tuple[KV, ...]:
    pairs = zip(caches, taken, strict=True)
    return tuple(cache.write(past, rows, length_B) for past, rows in pairs)


def by_einsum(packed_BTKXE: Array, turn: Rotation, past: KV, sight: Sight) -> tuple[Array, KV]:
    """`attend_cached` without a kernel, which reads rows under a mask; kernels equal it."""
    heads_BKXTE = rotate_packed(packed_BTKXE, turn, has_rows=sight.num_behind > 0)
    q_BKGTE, T = heads_BKXTE, heads_BKXTE.shape[3]
    if sight.num_behind:
        q_BKGTE = heads_BKXTE[:, :, :-2]
        rows = KV(heads_BKXTE[:, :, -2], heads_BKXTE[:, :, -1])
        past = cache.write(past, rows, sight.start_B(T))
    mask_BTS = sight.mask(T, past.k_BKSE.shape[2])
    if _pays_to_look(past, T):
        return _as_far_as_used(q_BKGTE, past, mask_BTS, sight.length_B + sight.num_behind), past
    return attend(q_BKGTE, past, mask_BTS), past


def _pays_to_look(kv: KV, tokens: int) -> bool:
    """Whether to look how far texts have come takes less than for `tokens` to read all rows."""
    B, _, S, _ = kv.k_BKSE.shape
    return traced_platform() == "cpu" and (B > 1 or tokens >= MANY) and S >= LONG


def _as_far_as_used(q_BKGTE: Array, kv: KV, mask_BTS: Array, used_B: Array) -> Array:
    """`attend` to the first rows of each text, as many of three sizes as the longest one needs.

    text 0   x x . . | . . . . | . . . . . . . .      half of the rows are read of each text
    text 1   x x x x   x x . . | . . . . . . . .
    """
    S = kv.k_BKSE.shape[2]
    sizes = (S // 4, S // 2, S)

    def to_rows(size: int) -> Array:
        rows = KV(kv.k_BKSE[:, :, :size], kv.v_BKSE[:, :, :size])
        return attend(q_BKGTE, rows, mask_BTS[:, :, :size])

    place = jnp.sum(jnp.max(used_B) > np.array(sizes[:-1]))
    return lax.switch(place, [functools.partial(to_rows, size) for size in sizes])


def _attend(q_BKGTE: Array, kv: KV, mask_BTS: Array) -> Array:
    B, K, G, T, E = q_BKGTE.shape
    q_BKXE = q_BKGTE.reshape(B, K, G * T, E)
    score_BKXS = jnp.einsum(
        "BKXE,BKSE->BKXS", q_BKXE, kv.k_BKSE, preferred_element_type=jnp.float32
    )
    score_BKGTS = score_BKXS.reshape(B, K, G, T, -1) * E**-0.5
    hidden = jnp.finfo(jnp.float32).min  # not -inf: rows of padding may see nothing at all
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, hidden)
    weight_BKXS = jax.nn.softmax(score_BKGTS, axis=-1).reshape(B, K, G * T, -1)
    # XLA for CPUs would store float32 values first to give a product in bfloat16.
    result = jnp.float32 if traced_platform() == "cpu" else q_BKXE.dtype
    weight_BKXS = weight_BKXS.astype(q_BKXE.dtype)
    mixed_BKXE = jnp.einsum(
        "BKXS,BKSE->BKXE", weight_BKXS, kv.v_BKSE, preferred_element_type=result
    ).astype(q_BKXE.dtype)
    return jnp.moveaxis(mixed_BKXE.reshape(B, K, G, T, E), 3, 1)
