"""Grouped softmax attention, within a pass or over the visible rows of a key-value cache.

In training, each token attends to intervals of rows of its own pass. On GPUs and TPUs kernels keep
the scores on chip (`kernels/train_intervals.py`); on other devices an einsum stores all scores.

    row of a cache   0 ......... n-1 | n ....... n+X-1 | n+X ....... S-1
                     prefix: all see | tree: ancestors | left-overs, never seen
                     every row       |                 |

A cache has S allocated rows, of which n + X are used. The einsum reads all S rows under a mask. In
the cache of a layer with a window the row of a position is the position mod S.
On a CPU, for a batch of long caches or a chunk of a prompt, the einsum reads a quarter, half or all
of the rows, depending on the longest sequence; rows in slots are read in blocks. Kernels read the n
prefix rows, which need only their number as a mask, separately from the X tree rows, and join both
parts by their log-sum-exps.
`attend_cached` selects the implementation: Pallas-Triton in a program compiled for a GPU, Pallas
for a TPU, the einsum otherwise. On a mesh each device computes its own heads and batch rows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.model import cache, chunks, sharding
from moa_jax.model.cache import KV, AnyCache, SlotCache
from moa_jax.model.masks import CacheMask, IntervalMask
from moa_jax.model.rotary import Rotation, rotate_packed
from moa_jax.runtime.devices import traced_platform

Array = jax.Array

LONG = 512  # minimum cache rows for which a CPU reads only the used part of a batch's caches
MANY = 32  # minimum tokens for which a CPU does so for one sequence: a prompt chunk, few trees
# Rows of a slot that a CPU reads at a time: the overhead of a small block equals the time to read
# it, and large blocks alone would read far more rows than a short sequence has.
BLOCKS = (1024, 256)
QUERY_CHUNK = 512  # query tokens whose attention scores are stored at a time
INTERVALS = "scores_of_intervals_"  # prefix of a named scope, before a number of parts: `flops.py`


# An `IntervalMask` or a mask (B, T, S) within a pass; a `CacheMask` over a cache.
Seen = Array | IntervalMask | CacheMask
_by_einsum = ContextVar("_by_einsum", default=False)


@contextlib.contextmanager
def computed(way: Literal["blocks", "einsum"]) -> Iterator[None]:
    """Context manager that traces an `IntervalMask` with the block kernels or by einsum."""
    before = _by_einsum.set(way == "einsum")
    try:
        yield
    finally:
        _by_einsum.reset(before)


def sees_anything(seen: Seen) -> Array:
    """Whether each token sees any row, (B, T, 1); T is 1 if the result is the same for all."""
    if isinstance(seen, IntervalMask):
        return (seen.first_PBT <= seen.last_PBT).any(axis=0)[..., None]
    if not isinstance(seen, CacheMask):
        return seen.any(axis=-1, keepdims=True)
    prefix_B11 = (seen.length_B > seen.first)[:, None, None]
    if seen.ancestor_BTX is None:
        return prefix_B11 | (seen.tree_size > 0)
    return prefix_B11 | seen.ancestor_BTX.any(axis=-1, keepdims=True)


def attend(q_BKGTE: Array, kv: KV, seen: Array | IntervalMask) -> Array:
    """Attention over the visible rows, (B, T, K, G, E).

    The einsum joins the queries of a group to the token axis, so that both products are plain
    batched matrix products and the scores, the largest array here, are never transposed. A token
    that sees nothing gets the mean of all rows from the einsum, and zeros from a kernel.
    """
    if isinstance(seen, IntervalMask):
        if kernels := _by_intervals(q_BKGTE, kv):
            return kernels.attend(q_BKGTE, kv, seen)
        whole, own = seen.apart()
        rows = KV(*(x_BKSE[:, :, : whole.num_rows] for x_BKSE in kv))
        with jax.named_scope(f"{INTERVALS}{len(whole.first_PBT)}"):
            return _attend_in_chunks(q_BKGTE, rows, whole.mask(), own and _own_rows(kv, own))
    return _attend_in_chunks(q_BKGTE, kv, seen)


class OwnRows(NamedTuple):
    """N rows per token that no other token sees."""

    k_BTKNE: Array
    v_BTKNE: Array
    seen_BTN: Array


def _own_rows(kv: KV, own: IntervalMask) -> OwnRows:
    """The rows at `own.offsets`, from the last parts of `kv`."""
    T, N = own.first_PBT.shape[2], len(own.offsets)

    def moved(x_BKSE: Array) -> Array:
        parts = jnp.split(x_BKSE[:, :, -N * T :], N, axis=2)
        pairs = zip(parts, own.offsets, strict=True)
        rows_BKTNE = jnp.stack([jnp.roll(part, far, axis=2) for part, far in pairs], axis=3)
        return jnp.moveaxis(rows_BKTNE, 2, 1)

    seen_PBT = own.first_PBT <= own.last_PBT
    return OwnRows(moved(kv.k_BKSE), moved(kv.v_BKSE), jnp.moveaxis(seen_PBT, 0, -1))


def _attend_in_chunks(q_BKGTE: Array, kv: KV, mask_BTS: Array, own: OwnRows | None = None) -> Array:
    """Attention by einsum, a chunk of queries at a time: scores may outgrow the weights."""
    if q_BKGTE.shape[3] <= QUERY_CHUNK:
        return _attend(q_BKGTE, kv, mask_BTS, own)
    q_BTKGE = jnp.moveaxis(q_BKGTE, 3, 1)
    mask_BTS = jnp.broadcast_to(mask_BTS, (q_BTKGE.shape[0], *mask_BTS.shape[1:]))
    part = lambda piece: _attend(jnp.moveaxis(piece[0], 1, 3), kv, *piece[1:])
    return chunks.map_over(part, (q_BTKGE, mask_BTS, own), QUERY_CHUNK, axis=1)


def _by_intervals(q_BKGTE: Array, kv: KV) -> ModuleType | None:
    """The kernels that support these heads on the traced device, or None."""
    if _by_einsum.get() or _kernels() is None:
        return None
    from moa_jax.model.kernels import train_intervals  # not at the top: importing Pallas is slow

    if train_intervals.is_possible(q_BKGTE, kv):
        return train_intervals
    T, E = q_BKGTE.shape[3:]
    _say(f"no kernel for rows of {T} tokens and heads of {E}", "their scores are stored")
    return None


def attend_cached(
    packed_BTKXE: Array, turn: Rotation, past: AnyCache, cache_mask: CacheMask
) -> tuple[Array, AnyCache]:
    """Writes the new rows of a pass to a cache and attends to the cache's visible rows.

    `packed_BTKXE` is the output of a projection; this function rotates the heads. A key and a
    value follow the G queries of each key-value head, X = G + 2, unless `cache_mask` has no tokens
    after the prefix (X = G). Returns the attention output (B, T, K, G, E) and the cache.
    """
    if not sharding.on_decode_mesh():
        return _attend_cached(packed_BTKXE, turn, past, cache_mask)
    mesh = jax.sharding.get_abstract_mesh()
    heads = sharding.dividing(("rows", None, "kv_heads"), packed_BTKXE.shape, mesh)
    given, caches = sharding.specs_of((turn, past, cache_mask), mesh), sharding.specs_of(past, mesh)
    part = jax.shard_map(
        _attend_cached, in_specs=(heads, *given), out_specs=(heads, caches), check_vma=False
    )
    return part(packed_BTKXE, turn, past, cache_mask)


def _attend_cached(
    packed_BTKXE: Array, turn: Rotation, past: AnyCache, cache_mask: CacheMask
) -> tuple[Array, AnyCache]:
    kernels = _kernels()
    if kernels and not kernels.is_possible(packed_BTKXE, cache.of_slots(past)):
        _say(f"no {kernels.PLATFORM} kernel for such heads or caches")
        kernels = None
    if kernels is None:
        return by_einsum(packed_BTKXE, turn, past, cache_mask)
    branch = {kernels.PLATFORM: kernels.attend}
    return lax.platform_dependent(packed_BTKXE, turn, past, cache_mask, default=by_einsum, **branch)


def keep_path(
    caches: tuple[AnyCache, ...],
    taken: tuple[KV, ...],
    path_BD: Array,
    length_B: Array,
    windows: Sequence[int] = (),
) -> tuple[AnyCache, ...]:
    """Moves the rows of a path of D nodes to the rows directly after the verified ones.

    Node i is stored at row length + i of each cache; this function stores the node of each level
    at row length + level. `taken` holds the same rows as the pass computed them, because XLA would
    copy a cache that a program both reads and writes. Caches of layers with windows are rings.
    """
    given = (caches, taken, path_BD, length_B)
    is_ring = tuple(window > 0 for window in windows) or (False,) * len(caches)
    keep = functools.partial(_keep_path, is_ring)
    if not sharding.on_decode_mesh():
        return keep(*given)
    specs = sharding.specs_of(given, jax.sharding.get_abstract_mesh())
    return jax.shard_map(keep, in_specs=specs, out_specs=specs[0], check_vma=False)(*given)


def _keep_path(
    is_ring: tuple[bool, ...],
    caches: tuple[AnyCache, ...],
    taken: tuple[KV, ...],
    path_BD: Array,
    length_B: Array,
) -> tuple[AnyCache, ...]:
    write = functools.partial(_write_path, is_ring, taken)
    kernels = _kernels() if caches else None
    able = kernels is not None and kernels.keep_path is not None
    first = cache.of_slots(caches[0]) if caches else None
    if not (able and kernels.is_possible(first.k_BKSE, first)):
        return write(caches, path_BD, length_B)
    branch = {kernels.PLATFORM: functools.partial(kernels.keep_path, is_ring=is_ring)}
    return lax.platform_dependent(caches, path_BD, length_B, default=write, **branch)


def _kernels() -> ModuleType | None:
    """The kernels of the device that the program is traced for, or None."""
    platform = traced_platform()
    try:
        if platform == "tpu":
            from moa_jax.model.kernels import decode_tpu as found
        elif platform == "gpu":
            from moa_jax.model.kernels import decode_gpu as found
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


@functools.cache  # one warning per reason
def _say(reason: str, so: str = "attention reads whole caches") -> None:
    logging.getLogger(__name__).warning("%s: %s (einsum)", reason, so)


def _write_path(
    is_ring: tuple[bool, ...],
    taken: tuple[KV, ...],
    caches: tuple[AnyCache, ...],
    path_BD: Array,
    length_B: Array,
) -> tuple[AnyCache, ...]:
    each = zip(caches, taken, is_ring, strict=True)
    return tuple(cache.write(past, rows, length_B, wraps) for past, rows, wraps in each)


def by_einsum(
    packed_BTKXE: Array, turn: Rotation, past: AnyCache, cache_mask: CacheMask
) -> tuple[Array, AnyCache]:
    """`attend_cached` without a kernel: reads rows under a mask; kernels give the same result."""
    heads_BKXTE = rotate_packed(packed_BTKXE, turn, has_rows=cache_mask.tree_size > 0)
    q_BKGTE, T = heads_BKXTE, heads_BKXTE.shape[3]
    if cache_mask.tree_size:
        q_BKGTE = heads_BKXTE[:, :, :-2]
        rows = KV(heads_BKXTE[:, :, -2], heads_BKXTE[:, :, -1])
        past = cache.write(past, rows, cache_mask.start_B(T), cache_mask.window > 0)
    S = cache.of_slots(past).k_BKSE.shape[2]
    mask_BTS = cache_mask.mask(T, S)
    if isinstance(past, SlotCache):
        return _attend_slots(q_BKGTE, past, mask_BTS, _used(cache_mask, S)), past
    if _pays_to_look(past, T):
        return _as_far_as_used(q_BKGTE, past, mask_BTS, _used(cache_mask, S)), past
    return attend(q_BKGTE, past, mask_BTS), past


def _used(cache_mask: CacheMask, rows: int) -> Array:
    """The number of used rows (B,) of a cache, or of a ring, which may be full."""
    used_B = cache_mask.length_B + cache_mask.tree_size
    return jnp.minimum(used_B, rows) if cache_mask.window else used_B


def _pays_to_look(kv: KV, tokens: int) -> bool:
    """Whether reading only the used rows is faster than reading all rows for `tokens` queries."""
    B, _, S, _ = kv.k_BKSE.shape
    return traced_platform() == "cpu" and (B > 1 or tokens >= MANY) and S >= LONG


def _as_far_as_used(q_BKGTE: Array, kv: KV, mask_BTS: Array, used_B: Array) -> Array:
    """`attend` to the first S/4, S/2 or S rows, the smallest size that fits the longest sequence.

    sequence 0   x x . . | . . . . | . . . . . . . .      half of the rows per sequence are read
    sequence 1   x x x x   x x . . | . . . . . . . .
    """
    S = kv.k_BKSE.shape[2]
    sizes = (S // 4, S // 2, S)

    def to_rows(size: int) -> Array:
        rows = KV(kv.k_BKSE[:, :, :size], kv.v_BKSE[:, :, :size])
        return attend(q_BKGTE, rows, mask_BTS[:, :, :size])

    place = jnp.sum(jnp.max(used_B) > np.array(sizes[:-1]))
    return lax.switch(place, [functools.partial(to_rows, size) for size in sizes])


def _attend_slots(q_BKGTE: Array, past: SlotCache, mask_BTS: Array, used_B: Array) -> Array:
    """Attention to the rows of slots: on a CPU block by block, up to the last used row of each.

    used rows   x x x x x x x x x x x x x x x x x x . .
    blocks      |    1024 rows    | 256 | 256 |           whole large ones, then small ones

    Blocks fit into a CPU's cache, so a row is read once from memory, and a pass costs what its
    sequences use. Partial results are joined as in flash-attention (2205.14135).
    """
    B, K, G, T, E = q_BKGTE.shape
    S = past.arrays.k_BKSE.shape[2]
    if traced_platform() != "cpu":
        k_BKSE, v_BKSE = (leaf[past.slot_B] for leaf in past.arrays)
        is_used_BS = jnp.arange(S) < used_B[:, None]
        return attend(q_BKGTE, KV(k_BKSE, _or_zero(is_used_BS[:, None], v_BKSE)), mask_BTS)
    sizes = [size for size in BLOCKS if size <= S] or [S]
    mask_BTS = jnp.broadcast_to(mask_BTS, (B, T, S))

    def attend_one(b: Array | int) -> Array:
        q_KXE = q_BKGTE[b].reshape(K, G * T, E)

        def see(
            size: int, block: Array, state: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            best_KX, total_KX, mixed_KXE = state
            first = jnp.minimum(block * size, S - size)  # the last block goes back
            start = (past.slot_B[b], 0, first, 0)
            k_KSE, v_KSE = (lax.dynamic_slice(x, start, (1, K, size, E))[0] for x in past.arrays)
            mask_TS = lax.dynamic_slice(mask_BTS, (b, 0, first), (1, T, size))[0]
            row_S = first + jnp.arange(size)
            mask_TS &= row_S >= block * size
            v_KSE = _or_zero(row_S < used_B[b], v_KSE)
            score_KXS = E**-0.5 * jnp.einsum(
                "KXE,KSE->KXS", q_KXE, k_KSE, preferred_element_type=jnp.float32
            )
            seen_KXS = jnp.broadcast_to(mask_TS, (K, G, T, size)).reshape(score_KXS.shape)
            score_KXS = jnp.where(seen_KXS, score_KXS, -jnp.inf)
            higher_KX = jnp.maximum(best_KX, score_KXS.max(axis=-1))
            weight_KXS = jnp.exp(score_KXS - higher_KX[..., None])
            fade_KX = jnp.exp(best_KX - higher_KX)
            new_KXE = jnp.einsum(
                "KXS,KSE->KXE",
                weight_KXS.astype(v_KSE.dtype),
                v_KSE,
                preferred_element_type=jnp.float32,
            )
            total_KX = total_KX * fade_KX + weight_KXS.sum(axis=-1)
            return higher_KX, total_KX, mixed_KXE * fade_KX[..., None] + new_KXE

        least_KX = jnp.full((K, G * T), jnp.finfo(jnp.float32).min)  # not -inf: no row may be seen
        state = (least_KX, jnp.zeros_like(least_KX), jnp.zeros((K, G * T, E)))
        begin = 0  # the rows before are read
        for size in sizes:
            missing = size - 1 if size == sizes[-1] else 0  # the last block may be unfinished
            last = (used_B[b] + missing) // size
            state = lax.fori_loop(begin // size, last, functools.partial(see, size), state)
            begin = last * size
        _, total_KX, mixed_KXE = state
        mixed_KXE /= jnp.maximum(total_KX, jnp.finfo(jnp.float32).tiny)[..., None]
        return mixed_KXE.astype(q_BKGTE.dtype).reshape(K, G, T, E)

    if B == 1:
        mixed_BKGTE = attend_one(0)[None]
    else:
        mixed_BKGTE = lax.map(attend_one, jnp.arange(B))
    return jnp.moveaxis(mixed_BKGTE, 3, 1)


def _or_zero(is_used_S: Array, v_KSE: Array) -> Array:
    """Values of used rows, and 0 of others: a slot may hold an earlier NaN, and 0 * NaN is NaN."""
    return jnp.where(is_used_S[..., None], v_KSE, 0)


def _attend(q_BKGTE: Array, kv: KV, mask_BTS: Array, own: OwnRows | None = None) -> Array:
    B, K, G, T, E = q_BKGTE.shape
    q_BKXE = q_BKGTE.reshape(B, K, G * T, E)
    score_BKXS = jnp.einsum(
        "BKXE,BKSE->BKXS", q_BKXE, kv.k_BKSE, preferred_element_type=jnp.float32
    )
    score_BKGTS = score_BKXS.reshape(B, K, G, T, -1) * E**-0.5
    hidden = jnp.finfo(jnp.float32).min  # not -inf: padding rows may see no row at all
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, hidden)
    weight_BKXS = jax.nn.softmax(score_BKGTS, axis=-1).reshape(B, K, G * T, -1)
    # For a bfloat16 result, XLA on CPUs would first store the values in float32.
    result = jnp.float32 if traced_platform() == "cpu" else q_BKXE.dtype
    weight_BKXS = weight_BKXS.astype(q_BKXE.dtype)
    mixed_BKXE = jnp.einsum(
        "BKXS,BKSE->BKXE", weight_BKXS, kv.v_BKSE, preferred_element_type=result
    )
    mixed_BTKGE = jnp.moveaxis(mixed_BKXE.reshape(B, K, G, T, E), 3, 1)
    if own is not None:
        lse_BTKG = jnp.moveaxis(jax.nn.logsumexp(score_BKGTS, axis=-1), 3, 1)
        mixed_BTKGE = _joined(mixed_BTKGE, lse_BTKG, jnp.moveaxis(q_BKGTE, 3, 1), own)
    return mixed_BTKGE.astype(q_BKGTE.dtype)


def _joined(mixed_BTKGE: Array, lse_BTKG: Array, q_BTKGE: Array, own: OwnRows) -> Array:
    """Joins a result with the tokens' own rows, by the log-sum-exp of its scores."""
    k_BTKNE, v_BTKNE = (x.astype(jnp.float32) for x in own[:2])
    score_BTKGN = jnp.sum(q_BTKGE[..., None, :] * k_BTKNE[:, :, :, None], axis=-1)
    hidden, seen_BTN = jnp.finfo(jnp.float32).min, own.seen_BTN[:, :, None, None]
    score_BTKGN = jnp.where(seen_BTN, score_BTKGN * k_BTKNE.shape[-1] ** -0.5, hidden)
    share_BTKGX = jax.nn.softmax(jnp.concatenate([lse_BTKG[..., None], score_BTKGN], -1), axis=-1)
    first_BTKG1, others_BTKGN = share_BTKGX[..., :1], share_BTKGX[..., 1:]
    own_BTKGE = jnp.sum(others_BTKGN[..., None] * v_BTKNE[:, :, :, None], axis=-2)
    return first_BTKG1 * mixed_BTKGE + own_BTKGE
