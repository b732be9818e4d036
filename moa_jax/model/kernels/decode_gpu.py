"""Attention over a cache as two Pallas-Triton kernels, which read only the used rows.

    kernel 1    split 0     the tree: new rows are written, X rows seen by ancestors
                            and its share of the prefix
                split i     its share of the prefix: rows that all tokens see, or with a window
                            those from the first row of each token on
    kernel 2    joins the splits of each query by their log-sum-exps

A pass of few tokens has few queries, and B x K programs would leave most of the GPU idle. The
kernel therefore splits the used rows, as in flash-decoding, by their number at run time: the cost
depends on the used rows, not on the capacity. A pass that fills the GPU by itself uses one split
and no second kernel.

The kernel takes packed heads in the layout of `layers.Attention.packed`: slicing the packed array
would add a launch per slice, and rotating the heads beforehand would store them again:

    packed_BTKXE   X:  0 .. G-1 queries | G keys | G+1 values     of the T tokens

Rotated heads are held as the two halves of E whose elements form pairs, and scores are the sum of
two products. Each element is then read once, in vectors of eight; a single array of E would be read
a second time in the order of the partners, one element at a time.

References: FlashAttention-2 (2307.08691); flash-decoding (Dao et al., 2023).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from moa_jax.model import cache
from moa_jax.model.cache import KV, AnyCache
from moa_jax.model.masks import CacheMask
from moa_jax.model.rotary import Rotation
from moa_jax.runtime.devices import compute_capability

Array = jax.Array
State = tuple[Array, Array, Array]  # of a softmax: largest score, sum, sum of values
Ref = Any  # an array in the GPU's memory, as a kernel sees it

PLATFORM = "cuda"
LOG2_E = 1.4426950408889634  # kernels compute powers of 2
NOTHING = -1e30  # the log-sum-exp of zero rows; finite, so that a difference of two is finite
PROGRAMS = 132  # streaming multiprocessors of an H100 or H200, about one program each
ROOMY = {"9.0", "10.0", "10.3"}  # compute capabilities with 227 KiB of shared memory per program
LEAST = 16  # minimum size of each axis of a Triton dot product
FIRST = 8.0  # minimum compute capability that Triton supports


class Sizes(NamedTuple):
    """Static sizes of the kernels."""

    G: int
    T: int
    E: int
    X: int  # tokens after the prefix; the last T of them are those of the pass
    is_line: bool  # whether the X tokens form a chain; otherwise an ancestor matrix is passed
    first: int  # first visible row
    window: int  # of `masks.windowed`; 0 is none
    queries: int  # per program: a power of two
    rows: int  # cache rows read at a time: a power of two
    splits: int

    @property
    def blocks(self) -> int:
        """Programs that share the G x T queries of one key-value head."""
        return pl.cdiv(self.G * self.T, self.queries)

    @property
    def writes(self) -> bool:
        """Whether the pass writes rows to the cache."""
        return self.X > 0


def sizes_of(
    heads_shape: tuple[int, ...], dtype: jnp.dtype, S: int, cache_mask: CacheMask
) -> Sizes:
    """Chooses the grid for heads (B, T, K, G or G + 2, E) over S rows."""
    B, T, K, G, E = heads_shape
    X = cache_mask.tree_size
    G -= 2 if X else 0
    most = _most_numbers(dtype)
    queries = min(max(LEAST, pl.next_power_of_2(G * T)), max(LEAST, most // E))
    rows = max(LEAST, min(128 if queries <= 64 else 64, most // 2 // E))
    programs = B * K * pl.cdiv(G * T, queries)
    wanted = PROGRAMS * (2 if queries <= 64 else 1)
    first, window = cache_mask.first, cache_mask.window
    splits = max(1, min(wanted // programs, pl.cdiv(_visible(S, window), 2 * rows)))
    is_line = cache_mask.ancestor_BTX is None
    return Sizes(G, T, E, X, is_line, first, window, queries, rows, splits)


def _visible(S: int, window: int) -> int:
    """Maximum number of prefix rows that a token sees."""
    return min(S, window or S)


def _most_numbers(dtype: jnp.dtype) -> int:
    """Maximum elements of the queries of one program; keys and values may each have half of that.

    The elements are held in shared memory, which is 99 KiB per program on most GPUs. Products of
    float32, which use no tensor cores, are unrolled: larger ones take minutes to compile.
    """
    if dtype.itemsize > 2:
        return 4 * 1024
    is_here = jax.default_backend() == "gpu"  # otherwise compiles ahead of time for an H200
    is_roomy = not is_here or jax.local_devices()[0].compute_capability in ROOMY
    return 32 * 1024 if is_roomy else 8 * 1024


def lacks(device: jax.Device) -> str:
    """The reason why a device cannot run the kernels, or an empty string."""
    if compute_capability(device) >= FIRST:
        return ""
    return f"Triton needs an NVIDIA GPU of compute capability {FIRST}, {device.device_kind} is none"


def is_possible(heads: Array, past: KV) -> bool:
    """Whether the kernels support these heads and caches: same dtype, and E is 32, 64, 128, ..."""
    E = heads.shape[-1]
    is_power = E >= 2 * LEAST and E == pl.next_power_of_2(E)
    return is_power and heads.dtype == past.k_BKSE.dtype


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
    B, T, K, _, E = packed_BTKXE.shape
    kv, slot_B = cache.parts_of(past)
    sizes = sizes_of(packed_BTKXE.shape, packed_BTKXE.dtype, kv.k_BKSE.shape[2], cache_mask)
    G, splits, angles = sizes.G, sizes.splits, (turn.cos_BTE, turn.sin_BTE)
    operands = [cache_mask.length_B, slot_B, packed_BTKXE, *angles, *kv]
    if not sizes.is_line:
        operands.append(cache_mask.tree_mask(T).astype(jnp.int8))
    if sizes.window:
        operands.append(jnp.broadcast_to(cache_mask.first_BT(T), (B, T)).astype(jnp.int32))
    mixed = jax.ShapeDtypeStruct((B, T, K, G, E), packed_BTKXE.dtype)
    partial = (
        jax.ShapeDtypeStruct((B, K, splits, G * T, E), jnp.float32),
        jax.ShapeDtypeStruct((B, K, splits, G * T), jnp.float32),
    )
    results = [mixed] if splits == 1 else list(partial)
    caches = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in kv] if sizes.writes else []
    found = pl.pallas_call(
        functools.partial(_attend_kernel, sizes),
        grid=(splits, K * sizes.blocks, B),
        out_shape=[*results, *caches],
        input_output_aliases={5 + i: len(results) + i for i in range(len(caches))},
        name="attend_rows",
        interpret=interpret,
        cost_estimate=_cost(sizes, (packed_BTKXE, *angles), kv, results),
        compiler_params=triton.CompilerParams(
            num_warps=8 if sizes.queries > 64 else 4, num_stages=2
        ),
    )(*operands)
    if caches:
        past = cache.with_arrays(past, KV(*found[-2:]))
    if splits > 1:
        return _join(sizes, cache_mask.length_B, found[:2], mixed, interpret), past
    return found[0], past


def _join(
    sizes: Sizes,
    length_B: Array,
    partial: Sequence[Array],
    mixed: jax.ShapeDtypeStruct,
    interpret: bool,
) -> Array:
    """Combines the splits' partial results by their log-sum-exps."""
    B, T, K, G, _ = mixed.shape
    return pl.pallas_call(
        functools.partial(_join_kernel, sizes),
        grid=(K * G, pl.cdiv(T, _tokens(T)), B),
        out_shape=mixed,
        name="join_splits",
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=0,  # of products
            bytes_accessed=sum(map(_num_bytes, (*partial, mixed))),
            transcendentals=partial[1].size,
        ),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
    )(length_B, *partial)


def _attend_kernel(sizes: Sizes, *refs: Ref) -> None:
    """Attends to the prefix, then in split 0 to the tree; a split without rows does nothing."""
    program = _Program(sizes, refs)
    split = program.split
    share, start, used = _share(sizes, program.length)
    begin = start + split * share

    @pl.when((split == 0) | (begin < used))
    def _() -> None:
        state = program.nothing()
        state = lax.fori_loop(begin, jnp.minimum(begin + share, used), program.see_prefix, state)
        if sizes.writes:
            blocks = jnp.int32(pl.cdiv(sizes.X, _nodes(sizes.X)))
            turns = jnp.where(split == 0, blocks, jnp.int32(0))
            state = lax.fori_loop(jnp.int32(0), turns, program.see_tree, state)
        program.store(*state)


class _Program:
    """One program of kernel 1: some queries of one key-value head over one split of the rows."""

    def __init__(self, sizes: Sizes, refs: Sequence[Ref]) -> None:
        """Loads the queries of this program's tokens and heads as two halves of E, (Q, H) each."""
        self.sizes = sizes
        length_ref, slot_ref, self.packed_ref, cos_ref, sin_ref, *rest = refs
        self.k_ref, self.v_ref, *rest = rest
        self.ancestor_ref, first_ref, self.results, self.written = _sorted(sizes, rest)
        self.split, self.b = pl.program_id(0), pl.program_id(2)
        self.k, self.block = pl.program_id(1) // sizes.blocks, pl.program_id(1) % sizes.blocks
        self.e_1E = jnp.arange(sizes.E)[None, :]
        h_1H = jnp.arange(sizes.E // 2)[None, :]
        self.halves_2 = (h_1H, h_1H + sizes.E // 2)
        self.index_Q = self.block * sizes.queries + jnp.arange(sizes.queries)
        self.there_Q1 = (self.index_Q < sizes.G * sizes.T)[:, None]
        self.token_Q1 = (self.index_Q % sizes.T)[:, None]
        self.length, self.slot = length_ref[self.b], slot_ref[self.b]
        heads = (self.packed_ref, cos_ref, sin_ref)
        self.load = functools.partial(_load_turned, heads, self.b, self.k)
        if sizes.window:  # the first row of each query
            at = first_ref.at[self.b, self.token_Q1]
            self.first_Q1 = triton.load(at, mask=self.there_Q1, other=0)
        self.q_2QH = self.load(self.token_Q1, (self.index_Q // sizes.T)[:, None], self.there_Q1)

    def nothing(self) -> State:
        """The softmax of no rows."""
        queries = self.sizes.queries
        return (
            jnp.full(queries, NOTHING, jnp.float32),
            jnp.zeros(queries, jnp.float32),
            jnp.zeros((queries, self.sizes.E), jnp.float32),
        )

    def see_prefix(self, index: Array, state: State) -> State:
        """The next block of prefix rows; masks rows beyond `length` and before a window."""
        sizes = self.sizes
        row_R = index * sizes.rows + jnp.arange(sizes.rows)
        seen_R = row_R < self.length
        if sizes.first:
            seen_R &= row_R >= sizes.first
        take = lambda ref, e: triton.load(
            ref.at[self.slot, self.k, self._row_of(row_R[:, None]), e],
            mask=seen_R[:, None],
            other=0.0,
        )
        k_2RH = [take(self.k_ref, half) for half in self.halves_2]
        seen_QR = seen_R[None, :]
        if sizes.window:
            seen_QR &= row_R[None, :] >= self.first_Q1
        return self._see(state, k_2RH, take(self.v_ref, self.e_1E), seen_QR)

    def see_tree(self, index: Array, state: State) -> State:
        """The next rows after the prefix: reads rows of earlier passes and writes the new rows."""
        T, X, e_1E = self.sizes.T, self.sizes.X, self.e_1E
        node_R = index * _nodes(X) + jnp.arange(_nodes(X))
        # No row is written beyond the end of a cache that is too small.
        is_row_R = self._row_of(self.length + node_R) < self.k_ref.shape[2]
        new_R1 = ((node_R >= X - T) & (node_R < X) & is_row_R)[:, None]
        old_R1 = ((node_R < X - T) & is_row_R)[:, None]
        token_R1 = node_R[:, None] - (X - T)

        def joined(cache_ref: Ref, written_ref: Ref, e: Array, new: Array) -> Array:
            """Writes the new rows and returns them joined with the rows of earlier passes."""
            here = (self.slot, self.k, self._row_of(self.length + node_R[:, None]), e)
            old = triton.load(cache_ref.at[here], mask=old_R1, other=0.0)
            at = written_ref.at[here]
            triton.store(at, new, mask=new_R1 & (self.block == 0) & (e >= 0))
            return jnp.where(new_R1, new, old)

        new_2RH = self.load(token_R1, self.sizes.G, new_R1)
        halves = zip(self.halves_2, new_2RH, strict=True)
        k_2RH = [joined(self.k_ref, self.written[0], *each) for each in halves]
        at = (self.b, token_R1, self.k, self.sizes.G + 1, e_1E)
        new_RE = triton.load(self.packed_ref.at[at], mask=new_R1 & (e_1E >= 0), other=0.0)
        v_RE = joined(self.v_ref, self.written[1], e_1E, new_RE)
        return self._see(state, k_2RH, v_RE, self._ancestors(node_R[None, :]))

    def store(self, best_Q: Array, total_Q: Array, mixed_QE: Array) -> None:
        """Writes the result and, if there are several splits, the log-sum-exp."""
        sizes, index_Q, e_1E = self.sizes, self.index_Q, self.e_1E
        mixed_ref, *lse_refs = self.results
        mixed_QE = mixed_QE / jnp.where(total_Q > 0, total_Q, 1.0)[:, None]
        mask_QE = self.there_Q1 & (e_1E >= 0)
        if not lse_refs:
            at = (self.b, self.token_Q1, self.k, (index_Q // sizes.T)[:, None], e_1E)
            triton.store(mixed_ref.at[at], mixed_QE.astype(mixed_ref.dtype), mask=mask_QE)
            return
        at = (self.b, self.k, self.split)
        triton.store(mixed_ref.at[(*at, index_Q[:, None], e_1E)], mixed_QE, mask=mask_QE)
        lse_Q = jnp.where(total_Q > 0, best_Q + jnp.log2(total_Q), NOTHING)
        triton.store(lse_refs[0].at[(*at, index_Q)], lse_Q, mask=index_Q < sizes.G * sizes.T)

    def _row_of(self, position: Array) -> Array:
        """The cache row of a position; a layer with a window has a ring."""
        return position % self.k_ref.shape[2] if self.sizes.window else position

    def _ancestors(self, node_1R: Array) -> Array:
        """The mask of rows after the prefix that each query sees."""
        T, X = self.sizes.T, self.sizes.X
        if self.sizes.is_line:
            seen_QR = node_1R <= self.token_Q1 + (X - T)
            if self.sizes.window:
                seen_QR &= self.length + node_1R >= self.first_Q1
        else:
            at = (self.b if self.ancestor_ref.shape[0] > 1 else 0, self.token_Q1, node_1R)
            known_QR = triton.load(
                self.ancestor_ref.at[at], mask=self.there_Q1 & (node_1R < X), other=0
            )
            seen_QR = known_QR.astype(jnp.int32) > 0
        if self.sizes.first:
            seen_QR &= self.length + node_1R >= self.sizes.first
        return seen_QR

    def _see(self, state: State, k_2RH: Sequence[Array], v_RE: Array, seen_QR: Array) -> State:
        """Updates the online softmax with R more rows."""
        best_Q, total_Q, mixed_QE = state
        is_single = self.packed_ref.dtype == jnp.float32
        dot = functools.partial(triton.dot, precision=lax.Precision.HIGHEST if is_single else None)
        halves = zip(self.q_2QH, k_2RH, strict=True)
        low_QR, high_QR = (dot(q_QH, k_RH, trans_b=True) for q_QH, k_RH in halves)
        score_QR = (low_QR + high_QR) * (self.sizes.E**-0.5 * LOG2_E)
        score_QR = jnp.where(seen_QR, score_QR, NOTHING)
        higher_Q = jnp.maximum(best_Q, jnp.max(score_QR, axis=1))
        weight_QR = jnp.where(seen_QR, jnp.exp2(score_QR - higher_Q[:, None]), 0.0)
        fade_Q = jnp.exp2(best_Q - higher_Q)
        mixed_QE = mixed_QE * fade_Q[:, None] + dot(weight_QR.astype(v_RE.dtype), v_RE)
        return higher_Q, total_Q * fade_Q + jnp.sum(weight_QR, axis=1), mixed_QE


def _load_turned(
    refs: Sequence[Ref], b: Array, k: Array, token_R1: Array, head: Array | int, there_R1: Array
) -> tuple[Array, Array]:
    """Loads packed heads as two halves (R, H), rotated like `rotary.rotate`; masked rows are 0."""
    packed_ref, cos_ref, sin_ref = refs
    H = packed_ref.shape[4] // 2
    h_1H = jnp.arange(H)[None, :]
    take = functools.partial(triton.load, mask=there_R1 & (h_1H >= 0), other=0.0)
    halves = [take(packed_ref.at[b, token_R1, k, head, e]) for e in (h_1H, h_1H + H)]
    low_RH, high_RH = (half.astype(jnp.float32) for half in halves)
    cos_RH, sin_RH = (take(ref.at[b, token_R1, h_1H]) for ref in (cos_ref, sin_ref))
    turned = (low_RH * cos_RH - high_RH * sin_RH, high_RH * cos_RH + low_RH * sin_RH)
    return tuple(half.astype(packed_ref.dtype) for half in turned)


def _join_kernel(
    sizes: Sizes, length_ref: Ref, mixed_ref: Ref, lse_ref: Ref, joined_ref: Ref
) -> None:
    """One program: joins all splits with rows, for some tokens of one query head."""
    head, b = pl.program_id(0), pl.program_id(2)
    k, g = head // sizes.G, head % sizes.G
    e_1E = jnp.arange(sizes.E)[None, :]
    token_T = pl.program_id(1) * _tokens(sizes.T) + jnp.arange(_tokens(sizes.T))
    there_T = token_T < sizes.T
    index_T = g * sizes.T + token_T
    mask_TE = there_T[:, None] & (e_1E >= 0)
    share, start, used = _share(sizes, length_ref[b])

    def join(split: Array, state: State) -> State:
        best_T, total_T, joined_TE = state
        lse_T = triton.load(lse_ref.at[b, k, split, index_T], mask=there_T, other=NOTHING)
        at = (b, k, split, index_T[:, None], e_1E)
        mixed_TE = triton.load(mixed_ref.at[at], mask=mask_TE, other=0.0)
        higher_T = jnp.maximum(best_T, lse_T)
        fade_T, weight_T = jnp.exp2(best_T - higher_T), jnp.exp2(lse_T - higher_T)
        joined_TE = joined_TE * fade_T[:, None] + weight_T[:, None] * mixed_TE
        return higher_T, total_T * fade_T + weight_T, joined_TE

    state = (
        jnp.full(token_T.shape, NOTHING, jnp.float32),
        jnp.zeros(token_T.shape, jnp.float32),
        jnp.zeros((token_T.shape[0], sizes.E), jnp.float32),
    )
    _, total_T, joined_TE = lax.fori_loop(
        jnp.int32(0), jnp.maximum(pl.cdiv(used - start, share), 1), join, state
    )
    joined_TE = (joined_TE / total_T[:, None]).astype(joined_ref.dtype)
    triton.store(joined_ref.at[b, token_T[:, None], k, g, e_1E], joined_TE, mask=mask_TE)


def _share(sizes: Sizes, length: Array) -> tuple[Array, Array, Array]:
    """The number of prefix blocks per split, the first block in a window, and the used blocks."""
    used, start = pl.cdiv(length, sizes.rows), jnp.int32(0)
    if sizes.window:  # of the root; the windows of its descendants start later
        start = jnp.maximum(length + 1 - sizes.window, 0) // sizes.rows
    return jnp.maximum(pl.cdiv(used - start, sizes.splits), 1), start, used


def _sorted(
    sizes: Sizes, refs: Sequence[Ref]
) -> tuple[Ref | None, Ref | None, Sequence[Ref], Sequence[Ref]]:
    """Separates `refs`: the ancestor matrix, first rows, the results, and the written caches."""
    num_results = 1 if sizes.splits == 1 else 2
    ancestor_ref, refs = (None, refs) if sizes.is_line else (refs[0], refs[1:])
    first_ref, refs = (refs[0], refs[1:]) if sizes.window else (None, refs)
    return ancestor_ref, first_ref, refs[:num_results], refs[num_results:]


def _tokens(T: int) -> int:
    """Tokens per program of the join kernel."""
    return min(pl.next_power_of_2(T), 64)


def _nodes(X: int) -> int:
    """Number of rows after the prefix that are read at a time."""
    return min(max(LEAST, pl.next_power_of_2(X)), 64)


def _num_bytes(array: Array | jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize


def _cost(
    sizes: Sizes, heads: Sequence[Array], past: KV, results: Sequence[jax.ShapeDtypeStruct]
) -> pl.CostEstimate:
    """Cost of full caches; each block of queries reads the whole cache of its sequence."""
    _, K, S, E = past.k_BKSE.shape
    B = heads[0].shape[0]
    visible = _visible(S, sizes.window)
    pairs = B * K * sizes.G * sizes.T * (visible + sizes.X)
    moved = sizes.blocks * B * sum(map(_num_bytes, past)) // past.k_BKSE.shape[0] * visible // S
    return pl.CostEstimate(
        flops=4 * pairs * E,
        bytes_accessed=moved + sum(map(_num_bytes, (*heads, *results))),
        transcendentals=pairs,
    )


def keep_path(
    caches: tuple[AnyCache, ...],
    path_BD: Array,
    length_B: Array,
    *,
    is_ring: Sequence[bool],
    interpret: bool = False,
) -> tuple[AnyCache, ...]:
    """Moves rows length + path to rows length, length + 1, ... of all caches, in one launch."""
    kvs, (slot_B, *_) = zip(*map(cache.parts_of, caches), strict=True)
    arrays = jax.tree.leaves(kvs)
    (B, _), (_, K, _, E) = path_BD.shape, arrays[0].shape
    moved = 2 * len(arrays) * B * K * path_BD.shape[1] * E * arrays[0].dtype.itemsize
    found = pl.pallas_call(
        functools.partial(_keep_kernel, path_BD.shape[1], E, is_ring, interpret),
        grid=(K, B, len(arrays)),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays],
        input_output_aliases={3 + i: i for i in range(len(arrays))},
        name="keep_path",
        interpret=interpret,
        cost_estimate=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
    )(length_B, slot_B, path_BD, *arrays)
    kvs = jax.tree.unflatten(jax.tree.structure(kvs), found)
    return tuple(map(cache.with_arrays, caches, kvs))


def _keep_kernel(
    D: int,
    E: int,
    is_ring: Sequence[bool],
    interpret: bool,
    length_ref: Ref,
    slot_ref: Ref,
    path_ref: Ref,
    *refs: Ref,
) -> None:
    """One program: one key-value head of one array. All rows are read before any is written."""
    k, b = pl.program_id(0), pl.program_id(1)
    level_D = jnp.arange(pl.next_power_of_2(D))
    there_D, e_1E = level_D < D, jnp.arange(E)[None, :]
    length, slot = length_ref[b], slot_ref[b]
    node_D = triton.load(path_ref.at[b, level_D], mask=there_D, other=0)

    def move(wraps: bool, old_ref: Ref, kept_ref: Ref) -> None:
        S, old_D, kept_D = old_ref.shape[2], length + node_D, length + level_D
        if wraps:
            old_D, kept_D = old_D % S, kept_D % S
        mask_DE = (there_D & (kept_D < S))[:, None] & (e_1E >= 0)
        rows_DE = triton.load(old_ref.at[slot, k, old_D[:, None], e_1E], mask=mask_DE, other=0.0)
        if not interpret:
            triton.debug_barrier()  # one thread's new row may be another thread's old row
        triton.store(kept_ref.at[slot, k, kept_D[:, None], e_1E], rows_DE, mask=mask_DE)

    half = len(refs) // 2
    for index, pair in enumerate(zip(refs[:half], refs[half:], strict=True)):
        part = functools.partial(move, is_ring[index // 2], *pair)
        pl.when(pl.program_id(2) == index)(part)
