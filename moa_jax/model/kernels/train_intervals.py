"""Blockwise attention in which each query sees an interval of keys, forward and backward.

Scores stay on chip: a program holds the scores of one block of queries with one block of keys.
Blocks that no query of a program sees are neither read nor computed.

    keys       0    R   2R   3R             attend_forward, attend_dq: a program takes a row of
    queries 0  x    .    .    .             blocks, between bounds of its own
            Q  x    x    .    .
           2Q  .    x    x    .             attend_dkv: a program takes a column of blocks
           3Q  .    .    x    x

GPUs (Pallas-Triton) and TPUs (Pallas) run the same kernels; a TPU holds all keys and values of a
head in VMEM. Scalars per query, such as its first key, are stored as rows (1, Q), since the last
axis of an array should fill a TPU's registers. Kernels whose scores are (queries, keys) transpose
these rows to columns.

References: FlashAttention-2 (2307.08691).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu, triton

from moa_jax.model import sharding
from moa_jax.model.cache import KV
from moa_jax.model.masks import IntervalMask
from moa_jax.runtime.devices import traced_platform

Array = jax.Array
Ref = Any  # an array in the chip's memory, as a kernel sees it

NOTHING = -1e30  # the log-sum-exp of zero keys; finite, so that a difference of two is finite
BLOCK = 128  # the number of rows must be a multiple
MOST_BYTES = 4 << 20  # of one head's keys on a TPU, which double-buffers keys and values
VMEM = 64 << 20  # bytes that a program on a TPU may use


class How(NamedTuple):
    """Platform and block sizes of the kernels."""

    platform: str  # gpu, tpu
    queries: int
    keys: int
    is_interpreted: bool = False

    @classmethod
    def on(cls, platform: str, T: int) -> How:
        """Block sizes for T queries and T keys; T is a multiple of BLOCK."""
        size = 64 if platform == "gpu" else next(n for n in (512, 256, 128) if T % n == 0)
        return cls(platform, size, size)


class AttentionInputs(NamedTuple):
    """Queries, keys, values and intervals; query head h reads key-value head h // (H // K)."""

    q_BHTE: Array
    k_BKTE: Array
    v_BKTE: Array
    first_BT: Array
    last_BT: Array


class Bounds(NamedTuple):
    """The range of blocks of each program, `begin` inclusive to `end` exclusive; may be empty."""

    begin_BN: Array
    end_BN: Array


def is_possible(q_BKGTE: Array, kv: KV) -> bool:
    """Whether the kernels support these heads."""
    T, E = q_BKGTE.shape[3:]
    fits = traced_platform() != "tpu" or T * E * kv.k_BKSE.dtype.itemsize <= MOST_BYTES
    return fits and T % BLOCK == 0 and E in (64, 128, 256) and q_BKGTE.dtype == kv.k_BKSE.dtype


def attend(q_BKGTE: Array, kv: KV, seen: IntervalMask, how: How | None = None) -> Array:
    """Attention over the visible rows, (B, T, K, G, E); on a mesh each device computes its heads.

    The result is zero for a token that sees nothing.
    """
    how = how or How.on(traced_platform(), q_BKGTE.shape[3])
    part = functools.partial(_attend_parts, how)
    if not jax.sharding.get_abstract_mesh().empty:
        heads, rows = sharding.traced_spec("rows", "kv_heads"), sharding.traced_spec(None, "rows")
        mixed = sharding.traced_spec("rows", None, "kv_heads")
        part = jax.shard_map(part, in_specs=(heads, heads, rows), out_specs=mixed, check_vma=False)
    return part(q_BKGTE, kv, seen)


def _attend_parts(how: How, q_BKGTE: Array, kv: KV, seen: IntervalMask) -> Array:
    """Attends to each part separately and joins the results by their log-sum-exps."""
    B, K, G, T, E = q_BKGTE.shape
    k_parts, v_parts = (jnp.split(x, x.shape[2] // T, axis=2) for x in kv)
    parts = list(zip(k_parts, v_parts, seen.first_PBT, seen.last_PBT, strict=True))
    whole = len(parts) - len(seen.offsets)
    q_BHTE = q_BKGTE.reshape(B, K * G, T, E)
    dtype = q_BKGTE.dtype if len(parts) == 1 else jnp.float32
    found = [attend_blocks(AttentionInputs(q_BHTE, *part), how, dtype) for part in parts[:whole]]
    for far, part in zip(seen.offsets, parts[whole:], strict=True):
        found.append(_attend_one(AttentionInputs(q_BHTE, *part), far))
    mixed_BHTE, _ = found[0]
    if len(found) > 1:
        mixed_PBHTE, lse_PBHT = (jnp.stack(each) for each in zip(*found, strict=True))
        share_PBHT = jax.nn.softmax(lse_PBHT, axis=0)
        mixed_BHTE = jnp.sum(share_PBHT[..., None] * mixed_PBHTE, axis=0).astype(q_BKGTE.dtype)
    return jnp.moveaxis(mixed_BHTE.reshape(q_BKGTE.shape), 3, 1)


def _attend_one(given: AttentionInputs, far: int) -> tuple[Array, Array]:
    """Computes `attend_blocks` for tokens that see one row, `far` rows before their own, or none.

    A single score per token needs no kernel.
    """
    G = given.q_BHTE.shape[1] // given.k_BKTE.shape[1]
    of_head = lambda x: jnp.repeat(jnp.roll(x, far, axis=2), G, axis=1)
    k_BHTE, v_BHTE = (of_head(x).astype(jnp.float32) for x in given[1:3])
    score_BHT = jnp.sum(given.q_BHTE * k_BHTE, axis=-1) * k_BHTE.shape[-1] ** -0.5
    seen_B1T = (given.first_BT <= given.last_BT)[:, None]
    return jnp.where(seen_B1T[..., None], v_BHTE, 0.0), jnp.where(seen_B1T, score_BHT, NOTHING)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attend_blocks(given: AttentionInputs, how: How, dtype: Any) -> tuple[Array, Array]:
    """Each query's attention to its keys from first to last, and the log-sum-exps of its scores.

    Returns (B, H, T, E) of `dtype` and (B, H, T) in float32. A query whose last key precedes its
    first key sees nothing: its results are zeros and NOTHING.
    """
    B, H, T, E = given.q_BHTE.shape
    specs = _Specs(how.queries, H // given.k_BKTE.shape[1], given)
    mixed_BHTE, lse_BH1T = _call(
        _forward_kernel,
        how,
        _of_queries(given, how),
        [(given.q_BHTE, specs.block), *specs.keys_values, *specs.intervals],
        [((B, H, T, E), dtype, specs.block), ((B, H, 1, T), jnp.float32, specs.number)],
        products=2,
    )
    return mixed_BHTE, lse_BH1T[:, :, 0]


def _attend_forward(
    given: AttentionInputs, how: How, dtype: Any
) -> tuple[tuple[Array, Array], Any]:
    found = attend_blocks(given, how, dtype)
    return found, (given, found)


def _attend_backward(
    how: How, _: Any, kept: Any, towards: tuple[Array, Array]
) -> tuple[AttentionInputs]:
    """Gradients of queries, keys and values; the latter two are summed over a group's queries."""
    given, (mixed_BHTE, lse_BHT) = kept
    (B, H, T, E), K = given.q_BHTE.shape, given.k_BKTE.shape[1]
    dtype, (towards_BHTE, towards_lse_BHT) = given.q_BHTE.dtype, towards
    delta_BHT = jnp.sum(mixed_BHTE.astype(jnp.float32) * towards_BHTE, axis=-1) - towards_lse_BHT
    towards_BHTE = towards_BHTE.astype(dtype)
    numbers = [lse_BHT[:, :, None], delta_BHT[:, :, None]]

    specs = _Specs(how.queries, H // K, given)
    of_queries = [(x, specs.block) for x in (given.q_BHTE, towards_BHTE)]
    of_queries += [(x, specs.number) for x in numbers]
    (dq_BHTE,) = _call(
        _dq_kernel,
        how,
        _of_queries(given, how),
        [*of_queries, *specs.keys_values, *specs.intervals],
        [((B, H, T, E), dtype, specs.block)],
        products=3,
    )
    specs = _Specs(T, 1, given)
    G, R = H // K, how.keys
    of_head = pl.BlockSpec((None, None, R, E), lambda b, h, i, *_: (b, h, i, 0))
    of_group = pl.BlockSpec((None, None, R, E), lambda b, h, i, *_: (b, h // G, i, 0))
    of_queries = [(x, specs.rows) for x in (given.q_BHTE, towards_BHTE)]
    of_queries += [(x, specs.number) for x in numbers]
    gradients = _call(
        _dkv_kernel,
        how,
        _of_keys(given, how),
        [*of_queries, (given.k_BKTE, of_group), (given.v_BKTE, of_group), *specs.intervals],
        [((B, H, T, E), jnp.float32, of_head)] * 2,
        products=4,
    )
    dk_BKTE, dv_BKTE = (x.reshape(B, K, G, T, E).sum(axis=2).astype(dtype) for x in gradients)
    return (AttentionInputs(dq_BHTE, dk_BKTE, dv_BKTE, None, None),)  # type: ignore[arg-type]


attend_blocks.defvjp(_attend_forward, _attend_backward)


# ---- which blocks -------------------------------------------------------------------------


def _of_queries(given: AttentionInputs, how: How) -> Bounds:
    """For each block of queries, the range of key blocks that any of its queries sees."""
    B, T = given.first_BT.shape
    first_BNQ, last_BNQ = (x.reshape(B, -1, how.queries) for x in given[3:])
    there_BNQ = first_BNQ <= last_BNQ
    begin_BN = jnp.where(there_BNQ, first_BNQ // how.keys, T // how.keys).min(axis=-1)
    return Bounds(begin_BN, jnp.where(there_BNQ, last_BNQ // how.keys + 1, 0).max(axis=-1))


def _of_keys(given: AttentionInputs, how: How) -> Bounds:
    """For each block of keys, the range of query blocks that see it."""
    begin_BN, end_BN = _of_queries(given, how)
    block_N, block_M1 = jnp.arange(begin_BN.shape[1]), jnp.arange(given.k_BKTE.shape[2] // how.keys)
    block_M1 = block_M1[:, None]
    seen_BMN = (begin_BN[:, None] <= block_M1) & (block_M1 < end_BN[:, None])
    begin_BM = jnp.where(seen_BMN, block_N, block_N.size).min(axis=-1)
    return Bounds(begin_BM, jnp.where(seen_BMN, block_N + 1, 0).max(axis=-1))


# ---- calls --------------------------------------------------------------------------------

Operand = tuple[Array, pl.BlockSpec]
OutputSpec = tuple[tuple[int, ...], Any, pl.BlockSpec]  # shape, dtype, block


class _Specs:
    """Inputs of one program of a grid (B, H, blocks): `queries` of a head, and the head's keys."""

    def __init__(self, queries: int, G: int, given: AttentionInputs) -> None:
        T, E = given.q_BHTE.shape[2:]
        at = lambda shape, index: pl.BlockSpec((None, None, *shape), index)
        self.block = at((queries, E), lambda b, h, i, *_: (b, h, i, 0))
        self.rows = at((T, E), lambda b, h, i, *_: (b, h // G, 0, 0))
        whole = queries == T
        self.number = at((1, queries), lambda b, h, i, *_: (b, h, 0, 0 if whole else i))
        interval = at((1, queries), lambda b, h, i, *_: (b, 0, 0, 0 if whole else i))
        self.intervals: list[Operand] = [(x[:, None, None], interval) for x in given[3:]]
        self.keys_values: list[Operand] = [(x, self.rows) for x in given[1:3]]


def _call(
    kernel: Callable[..., None],
    how: How,
    bounds: Bounds,
    operands: Sequence[Operand],
    results: Sequence[OutputSpec],
    products: int,
) -> list[Array]:
    """Runs a kernel for each head and each block of `bounds`."""
    arrays, in_specs = zip(*operands, strict=True)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in results]
    B, H, T, E = shapes[0].shape
    pairs = B * H * T * (T + max(how.queries, how.keys)) // 2  # upper bound: no future keys
    cost = pl.CostEstimate(
        flops=2 * products * pairs * E,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *shapes)),
        transcendentals=pairs,
    )
    grid, out_specs = (B, H, bounds.begin_BN.shape[1]), [spec for *_, spec in results]
    if how.platform == "tpu":
        scalars = dict(num_scalar_prefetch=2, grid=grid, in_specs=in_specs, out_specs=out_specs)
        where: dict[str, Any] = dict(grid_spec=tpu.PrefetchScalarGridSpec(**scalars))
        params: Any = tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        )
    else:
        scalars = [pl.BlockSpec(x.shape, lambda *_: (0, 0)) for x in bounds]
        where = dict(grid=grid, in_specs=[*scalars, *in_specs], out_specs=out_specs)
        params = triton.CompilerParams(num_warps=4, num_stages=2)
    return pl.pallas_call(
        functools.partial(kernel, how),
        out_shape=shapes,
        name="attend_" + kernel.__name__.strip("_").removesuffix("_kernel"),
        interpret=how.is_interpreted,
        cost_estimate=cost,
        compiler_params=params,
        **where,
    )(*bounds, *arrays)


# ---- kernels ------------------------------------------------------------------------------


def _forward_kernel(
    how: How,
    begin_ref: Ref,
    end_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    first_ref: Ref,
    last_ref: Ref,
    mixed_ref: Ref,
    lse_ref: Ref,
) -> None:
    """Online softmax over the keys of a block of queries."""
    q_QE, first_Q1, last_Q1 = q_ref[...], first_ref[...].T, last_ref[...].T
    Q, E = q_QE.shape

    def see(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best_Q1, total_Q1, sum_QE = state
        rows, key_1R = _rows(index, how.keys), index * how.keys + _iota((1, how.keys))
        seen_QR = (key_1R >= first_Q1) & (key_1R <= last_Q1)
        score_QR = _dot(q_QE, k_ref[rows, :], 1, 1) * E**-0.5
        score_QR = jnp.where(seen_QR, score_QR, NOTHING)
        higher_Q1 = jnp.maximum(best_Q1, jnp.max(score_QR, axis=1, keepdims=True))
        weight_QR = jnp.where(seen_QR, jnp.exp(score_QR - higher_Q1), 0.0)
        fade_Q1 = jnp.exp(best_Q1 - higher_Q1)
        total_Q1 = fade_Q1 * total_Q1 + jnp.sum(weight_QR, axis=1, keepdims=True)
        v_RE = v_ref[rows, :]
        return higher_Q1, total_Q1, fade_Q1 * sum_QE + _dot(weight_QR.astype(v_RE.dtype), v_RE)

    zeros = lambda width: jnp.zeros((Q, width), jnp.float32)
    start = (zeros(1) + NOTHING, zeros(1), zeros(E))
    best_Q1, total_Q1, sum_QE = lax.fori_loop(*_bounds(begin_ref, end_ref), see, start)
    divisor_Q1 = jnp.where(total_Q1 > 0, total_Q1, 1.0)
    mixed_ref[...] = (sum_QE / divisor_Q1).astype(mixed_ref.dtype)
    lse_ref[...] = jnp.where(total_Q1 > 0, best_Q1 + jnp.log(divisor_Q1), NOTHING).T


def _dq_kernel(
    how: How,
    begin_ref: Ref,
    end_ref: Ref,
    q_ref: Ref,
    towards_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    first_ref: Ref,
    last_ref: Ref,
    dq_ref: Ref,
) -> None:
    """The gradient of a block of queries, from all keys that they see."""
    q_QE, towards_QE = q_ref[...], towards_ref[...]
    numbers = (lse_ref, delta_ref, first_ref, last_ref)
    lse_Q1, delta_Q1, first_Q1, last_Q1 = (ref[...].T for ref in numbers)

    def see(index: Array, dq_QE: Array) -> Array:
        rows, key_1R = _rows(index, how.keys), index * how.keys + _iota((1, how.keys))
        seen_QR, k_RE = (key_1R >= first_Q1) & (key_1R <= last_Q1), k_ref[rows, :]
        pairs = (q_QE, k_RE), (towards_QE, v_ref[rows, :])
        _, of_score_QR = _towards_scores(*pairs, seen_QR, lse_Q1, delta_Q1)
        return dq_QE + _dot(of_score_QR.astype(k_RE.dtype), k_RE)

    dq_QE = jnp.zeros(q_QE.shape, jnp.float32)
    dq_QE = lax.fori_loop(*_bounds(begin_ref, end_ref), see, dq_QE)
    dq_ref[...] = (dq_QE * q_QE.shape[1] ** -0.5).astype(dq_ref.dtype)


def _dkv_kernel(
    how: How,
    begin_ref: Ref,
    end_ref: Ref,
    q_ref: Ref,
    towards_ref: Ref,
    lse_ref: Ref,
    delta_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    first_ref: Ref,
    last_ref: Ref,
    dk_ref: Ref,
    dv_ref: Ref,
) -> None:
    """The gradients of a block of keys and values, from all queries that see them."""
    k_RE, v_RE = k_ref[...], v_ref[...]
    R, E = k_RE.shape
    key_R1 = pl.program_id(2) * R + _iota((R, 1))

    def see(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        dk_RE, dv_RE = state
        rows = _rows(index, how.queries)
        q_QE, towards_QE = q_ref[rows, :], towards_ref[rows, :]
        numbers = (lse_ref, delta_ref, first_ref, last_ref)
        lse_1Q, delta_1Q, first_1Q, last_1Q = (ref[:, rows] for ref in numbers)
        seen_RQ = (key_R1 >= first_1Q) & (key_R1 <= last_1Q)
        pairs = (k_RE, q_QE), (v_RE, towards_QE)
        weight_RQ, of_score_RQ = _towards_scores(*pairs, seen_RQ, lse_1Q, delta_1Q)
        return (
            dk_RE + _dot(of_score_RQ.astype(q_QE.dtype), q_QE),
            dv_RE + _dot(weight_RQ.astype(q_QE.dtype), towards_QE),
        )

    zeros = jnp.zeros((R, E), jnp.float32)
    dk_RE, dv_RE = lax.fori_loop(*_bounds(begin_ref, end_ref), see, (zeros, zeros))
    dk_ref[...], dv_ref[...] = dk_RE * E**-0.5, dv_RE


def _towards_scores(
    scored: tuple[Array, Array], gained: tuple[Array, Array], seen: Array, lse: Array, delta: Array
) -> tuple[Array, Array]:
    """The recomputed weights of a block, and the gradient with respect to its scores.

    The scores are the product of the pair `scored`, the gradient with respect to the weights the
    product of the pair `gained`. The queries may be on either axis of the block.
    """
    score = _dot(*scored, 1, 1) * scored[0].shape[1] ** -0.5
    weight = jnp.where(seen, jnp.exp(score - lse), 0.0)
    return weight, weight * (_dot(*gained, 1, 1) - delta)


def _bounds(begin_ref: Ref, end_ref: Ref) -> tuple[Array, Array]:
    at = (pl.program_id(0), pl.program_id(2))
    return begin_ref[at], end_ref[at]


def _rows(index: Array, size: int) -> pl.Slice:
    return pl.ds(pl.multiple_of(index * size, size), size)


def _iota(shape: tuple[int, int]) -> Array:
    return lax.broadcasted_iota(jnp.int32, shape, 0 if shape[1] == 1 else 1)


def _dot(a: Array, b: Array, of_a: int = 1, of_b: int = 0) -> Array:
    """The float32 product over one axis per operand, in full precision for float32 operands."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((of_a,), (of_b,)), ((), ()))
    return lax.dot_general(a, b, axes, precision, jnp.float32)
