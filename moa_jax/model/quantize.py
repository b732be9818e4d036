"""8-bit weights: a matrix is stored as int8 or float8, with one scale per output channel.

    w_DF  ~  values_DF * scale_F        x @ w  ~  (x @ values) * scale

A product reads the 8-bit values, casts them up and scales the result. GPUs fuse the cast into the
multiplication; CPUs, and libtpu today, store the cast matrix first. Only matrices are quantized:
norm scales, biases, activations and caches keep their dtype. An embedding (V, D) has one scale per
row, which serves a lookup and, if the head is tied to the embedding, the output channels.

References: LLM.int8() (arXiv 2208.07339) for symmetric vector-wise scales.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from moa_jax.errors import InputError
from moa_jax.model import sharding
from moa_jax.model.kernels import cpu
from moa_jax.model.kernels.cpu import Panels
from moa_jax.model.sharding import ShardingOf
from moa_jax.runtime.devices import traced_platform

Array = jax.Array

Format = Literal["int8", "fp8"]
FORMATS: tuple[Format, ...] = get_args(Format)
_LARGEST = {"int8": 127.0, "fp8": 448.0}  # stored value of a channel's largest weight
_DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}

# Names of the leaves that are matrices, and the axis that a product sums over.
_SUMMED = {"kernel": 0, "lm_head": 0, "head": 0, "embed": 1, "gate_up": -1, "down": -1}

ROWS_OF_A_TPU_TILE = 32  # 8-bit rows
MOST_ROWS_OF_GROUPS = 64
MOST_TILES = 128  # maximum tiles read for a lookup; for more, copying the table costs no more


class Quantized(NamedTuple):
    """An 8-bit matrix that replaces an array in a parameter tree.

    Flax checks the shape of a parameter's first leaf, so `values` comes first.
    """

    values: Array  # int8 or float8_e4m3fn
    # One element per output channel, in the dtype of activations. Folders in eight bits may have
    # several groups of inputs per channel: the summed axis then has one element per group.
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the unquantized matrix, and so of activations and caches."""
        return self.scale.dtype

    @property
    def has_groups(self) -> bool:
        return self.scale.ndim == self.values.ndim


Matrix = Array | Quantized | Panels


def quantize(weight: Array, weights: Format, summed: int) -> Quantized:
    """Quantize a matrix to eight bits; `summed` is the axis that products sum over.

    The scale is rounded first, so that its rounding error does not add to the error of the values.
    A channel of zeros, or of values too small to divide by, gets a scale of 1. A channel with
    non-finite values gets a NaN scale. Raises InputError for float16, whose range is too small
    for scales.
    """
    if weight.dtype == jnp.float16:
        raise InputError("float16 has no room for the scales of eight bits; choose another dtype")
    largest = jnp.max(jnp.abs(weight.astype(jnp.float32)), axis=summed, keepdims=True)
    scale = largest / _LARGEST[weights]
    scale = scale.astype(weight.dtype)
    # XLA's maximum on CPUs ignores NaN. The next comment explains the barrier.
    is_finite = jnp.isfinite(lax.optimization_barrier(weight)).all(axis=summed, keepdims=True)
    scale = jnp.where(is_finite, scale, jnp.nan)
    scale = jnp.where(scale < jnp.finfo(weight.dtype).tiny, jnp.ones_like(scale), scale)
    # The barrier makes XLA cast again; a CPU would otherwise store one float32 weight for both.
    values = lax.optimization_barrier(weight).astype(jnp.float32) / scale.astype(jnp.float32)
    if weights == "int8":
        values = jnp.round(values)
    values = jnp.clip(values, -_LARGEST[weights], _LARGEST[weights]).astype(_DTYPES[weights])
    return Quantized(values, scale.squeeze(summed))


def stored_as(path: tuple[Any, ...], leaf: Array, weights: Format | None) -> Matrix:
    """A leaf of a parameter tree in a format: matrices are quantized, other leaves unchanged."""
    summed = _SUMMED.get(path[-1]) if path else None
    is_other = summed == -1 and leaf.ndim < 3  # a drafter's own array with the name of experts
    if weights is None or summed is None or is_other:
        return leaf
    return quantize(leaf, weights, summed)


def is_matrix(path: tuple[Any, ...], scales: tuple[int, ...]) -> bool:
    """Whether products take a leaf in eight bits; routers and tables with groups are not."""
    return path[-1] in _SUMMED and (path[-1] != "embed" or scales[-1] == 1)


def stored_dtype(weights: Format) -> Any:
    """The dtype of the values of a format."""
    return _DTYPES[weights]


def without_single_group(path: tuple[Any, ...], leaf: Quantized) -> Quantized:
    """A leaf whose scales have an axis of groups of inputs, which is dropped if its size is 1."""
    summed = _SUMMED[path[-1]]
    is_single = leaf.scale.shape[summed] == 1
    return leaf._replace(scale=leaf.scale.squeeze(summed)) if is_single else leaf


def restored(path: tuple[Any, ...], leaf: Quantized) -> Array:
    """The array of a quantized leaf, in the dtype of its scales."""
    summed = _SUMMED[path[-1]]
    scale = leaf.scale if leaf.has_groups else jnp.expand_dims(leaf.scale, summed)
    scale = jnp.repeat(scale, leaf.shape[summed] // scale.shape[summed], axis=summed)
    wide = leaf.values.astype(jnp.float32) * scale.astype(jnp.float32)
    return wide.astype(leaf.dtype)


def sharding_as(path: tuple[Any, ...], leaf: Matrix, where: NamedSharding) -> Any:
    """The sharding of a leaf, quantized or not, whose array has the sharding `where`.

    Groups of inputs are split like the inputs if the mesh divides their number.
    """
    if not isinstance(leaf, Quantized):
        return where
    axes, summed = [*where.spec], _SUMMED[path[-1]] % len(where.spec)
    if not leaf.has_groups:
        del axes[summed]
    elif axes[summed] and leaf.scale.shape[summed] % where.mesh.shape[axes[summed]]:
        axes[summed] = None
    return Quantized(where, NamedSharding(where.mesh, PartitionSpec(*axes)))


def quantize_params(params: Any, weights: Format) -> Any:
    """Quantizes the matrices of a parameter tree whose layers are a list."""

    def of(path: tuple[Any, ...], leaf: Array) -> Matrix:
        return stored_as(tuple(getattr(key, "key", None) for key in path), leaf, weights)

    return jax.tree.map_with_path(of, params)


def placed_as(path: tuple[Any, ...], leaf: Matrix, where: NamedSharding | None) -> Matrix:
    """Constrains a leaf to the sharding `where` within a program; unchanged if `where` is None."""
    if where is None:
        return leaf
    return lax.with_sharding_constraint(leaf, sharding_as(path, leaf, where))


def shardings_of(params: Any, sharding_of: ShardingOf) -> Any:
    """The shardings of a parameter tree, from its shapes; matrices may be quantized."""

    def at(path: tuple[Any, ...], leaf: Matrix) -> Any:
        steps = tuple(getattr(step, "key", getattr(step, "idx", None)) for step in path)
        return sharding_as(steps, leaf, sharding_of(steps, leaf.shape))

    is_matrix = lambda leaf: isinstance(leaf, Quantized)
    return jax.tree.map_with_path(at, params, is_leaf=is_matrix)


def in_panels(params: Any) -> Any:
    """Converts the kernels of a parameter tree, whose layers are a list, to panels if possible."""

    def of(path: tuple[Any, ...], leaf: Matrix) -> Matrix:
        is_kernel = _SUMMED.get(getattr(path[-1], "key", None)) == 0
        return cpu.cut(leaf) if is_kernel else leaf

    is_matrix = lambda leaf: isinstance(leaf, Quantized | Panels)
    return jax.tree.map_with_path(of, params, is_leaf=is_matrix)


def format_of(params: Any) -> Format | None:
    """The format of a parameter tree's matrices; None if the matrices are plain arrays."""
    stored = {leaf.dtype for leaf in jax.tree.leaves(params)}
    return next((name for name in FORMATS if jnp.dtype(_DTYPES[name]) in stored), None)


def matrices(params: Any) -> list[Matrix]:
    """The leaves of a parameter tree; a matrix of any form counts as one leaf."""
    return jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Quantized | Panels))


# ---- products -----------------------------------------------------------------------------


def matmul(x: Array, kernel: Matrix, dtype: Any) -> Array:
    """x (..., D) @ kernel (D, *outputs), multiplied as one matrix, in `dtype`.

    With a quantized kernel the sums are float32 until they are scaled. On a mesh the output axes
    are not joined: the mesh may split the second of two, and XLA would gather them to join.
    """
    if isinstance(kernel, Quantized) and kernel.has_groups:
        return _by_groups(x, kernel, dtype)
    inputs, *outputs = kernel.shape
    is_master = (
        kernel.dtype != x.dtype and not sharding.on_decode_mesh()
    )  # higher precision, in training
    apart = (sharding.cuts_outputs() or traced_platform() == "tpu") and not is_master
    multiply = functools.partial(jnp.tensordot, axes=1) if apart else jnp.matmul
    joined = lambda array, *before: array if apart else array.reshape(*before, -1)
    if isinstance(kernel, Quantized):
        values_DF = joined(kernel.values, inputs).astype(x.dtype)
        y = multiply(x, values_DF, preferred_element_type=jnp.float32)
        y = (y * joined(kernel.scale).astype(jnp.float32)).astype(dtype)
    elif isinstance(kernel, Panels):
        y = cpu.multiply(x, kernel).astype(dtype)
    elif x.dtype == jnp.bfloat16 and traced_platform() == "cpu" and not apart:
        y = cpu.multiply_bfloat16(x, joined(kernel, inputs)).astype(dtype)
    elif is_master:
        y = _by_master(x, joined(kernel, inputs), dtype)
    else:
        y = multiply(x, joined(kernel.astype(x.dtype), inputs), preferred_element_type=dtype)
    return y.reshape(*x.shape[:-1], *outputs)


def _by_groups(x: Array, kernel: Quantized, dtype: Any) -> Array:
    """A product with several groups of inputs: the sums of each group are scaled, then added.

    The sums of many rows would be larger than the matrix, which is then restored instead.
    """
    *before, inputs = x.shape
    groups, *outputs = kernel.scale.shape
    if x.size > MOST_ROWS_OF_GROUPS * inputs:
        return matmul(x, restored(("kernel",), kernel), dtype)
    x_XGI = x.reshape(-1, groups, inputs // groups)
    X = len(x_XGI)
    # XLA compiles products of a single row to sums, before which a GPU stores wide matrices.
    x_XGI = jnp.pad(x_XGI, ((0, X == 1), (0, 0), (0, 0)))
    values = kernel.values.reshape(groups, -1, *outputs).astype(x.dtype)
    axes = (((2,), (1,)), ((1,), (0,)))
    y = lax.dot_general(x_XGI, values, axes, preferred_element_type=jnp.float32)
    y = (y * kernel.scale[:, None].astype(jnp.float32)).sum(0)[:X]  # (X, *outputs)
    return y.reshape(*before, *outputs).astype(dtype)


def _cast_and_multiply(x: Array, kernel_DF: Array, dtype: Any) -> Array:
    return jnp.matmul(x, kernel_DF.astype(x.dtype), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _by_master(x: Array, kernel_DF: Array, dtype: Any) -> Array:
    """A product with a weight that training stores in a higher precision than activations.

    The weight's gradient is summed in the weight's dtype, over tokens and over devices; the
    gradient of a plain cast would sum parts in the activations' dtype.
    """
    return _cast_and_multiply(x, kernel_DF, dtype)


def _by_master_forward(x: Array, kernel_DF: Array, dtype: Any) -> tuple[Array, Any]:
    return _cast_and_multiply(x, kernel_DF, dtype), (x, kernel_DF)


def _by_master_backward(dtype: Any, kept: Any, towards: Array) -> tuple[Array, Array]:
    x, kernel_DF = kept
    towards_x = jax.linear_transpose(lambda x: _cast_and_multiply(x, kernel_DF, dtype), x)
    D, F = kernel_DF.shape
    given = (x.reshape(-1, D), towards.reshape(-1, F))
    of_kernel_DF = jnp.einsum("XD,XF->DF", *given, preferred_element_type=kernel_DF.dtype)
    return *towards_x(towards), of_kernel_DF


_by_master.defvjp(_by_master_forward, _by_master_backward)


def matmul_rows(x: Array, table_VD: Matrix, dtype: Any) -> Array:
    """The products of x (..., D) with every row of a table, (..., V) in `dtype`."""
    quantized = isinstance(table_VD, Quantized)
    values_VD = (table_VD.values if quantized else table_VD).astype(x.dtype)
    y = jnp.einsum("...D,VD->...V", x, values_VD, preferred_element_type=dtype)
    return y * table_VD.scale.astype(dtype) if quantized else y


def lookup(table_VD: Matrix, ids: Array) -> Array:
    """Rows (..., D) of a table; a table that is split over a decoding mesh is not gathered."""
    if not sharding.on_decode_mesh():
        return _rows(table_VD, ids)
    mesh = jax.sharding.get_abstract_mesh()
    table = sharding.dividing(("table", None), table_VD.shape, mesh)
    if table[0] is None:
        return _rows(table_VD, ids)
    if isinstance(table_VD, Quantized):
        table = Quantized(table, PartitionSpec(*table[:1]))
    at = sharding.dividing(("rows",), ids.shape, mesh)
    part = jax.shard_map(_rows_together, in_specs=(table, at), out_specs=at, check_vma=False)
    return part(table_VD, ids)


def _rows_together(part_VD: Matrix, ids: Array) -> Array:
    """Rows of a table that is split over devices; each device sends the rows it holds to all."""
    count = part_VD.shape[0]
    place = ids - lax.axis_index("tensor") * count
    is_here = (place >= 0) & (place < count)
    found = _rows(part_VD, jnp.where(is_here, place, 0))
    return lax.psum(jnp.where(is_here[..., None], found, 0), "tensor")


def _rows(table_VD: Matrix, ids: Array) -> Array:
    if isinstance(table_VD, Quantized):
        scale = table_VD.scale[ids][..., None]
        return _few_rows(table_VD.values, ids).astype(scale.dtype) * scale
    return table_VD[ids]


def _few_rows(values_VD: Array, ids: Array) -> Array:
    """Rows of 8-bit values; few ids on a TPU are read from the tiles that contain them.

    A TPU tile has 32 rows of 8-bit values, and XLA copies a whole table to slice one row.
    """
    count, width = values_VD.shape
    is_tiled = traced_platform() == "tpu" and count % ROWS_OF_A_TPU_TILE == 0
    if not is_tiled or ids.size > MOST_TILES:
        return values_VD[ids]
    tiles = values_VD.reshape(-1, ROWS_OF_A_TPU_TILE, width)[ids // ROWS_OF_A_TPU_TILE]
    is_wanted = jnp.arange(ROWS_OF_A_TPU_TILE) == (ids % ROWS_OF_A_TPU_TILE)[..., None]
    return jnp.where(is_wanted[..., None], tiles, 0).sum(-2, dtype=values_VD.dtype)


# ---- parts --------------------------------------------------------------------------------


def columns(kernel_DV: Matrix, ids_U: Array) -> Matrix:
    """Some output channels of a kernel, (D, U)."""
    if isinstance(kernel_DV, Quantized):
        return Quantized(kernel_DV.values[:, ids_U], kernel_DV.scale[..., ids_U])
    if isinstance(kernel_DV, Panels):
        return kernel_DV.whole()[:, ids_U]
    return kernel_DV[:, ids_U]


def transposed(table_VD: Matrix) -> Matrix:
    """A table (V, D) as the kernel (D, V) of a head."""
    if isinstance(table_VD, Quantized):
        return table_VD._replace(values=jnp.asarray(table_VD.values.T))
    return jnp.asarray(table_VD.T)
