"""Moves arrays between tensor files and devices, a few at a time."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moa_jax.errors import InputError
from moa_jax.files import model_folder, packed, tensor_reader
from moa_jax.model import convert, quantize
from moa_jax.model.kernels.cpu import Panels
from moa_jax.model.quantize import Format, Matrix, Quantized
from moa_jax.model.sharding import ShardingOf

Layout = Literal["list", "stacked"]


def read_params(
    reader: tensor_reader.TensorReader,
    table: convert.Table,
    dtype: Any,
    *,
    layers: Layout = "list",
    sharding: ShardingOf | None = None,
    weights: Format | None = None,
    finite: bool = False,
) -> Any:
    """Read, pack and place every array of a table; returns the parameter tree.

    The next array is read while one is placed, so the host holds at most two unplaced arrays. Each
    process reads and holds only the parts of its own devices. `weights` is the quantized format of
    matrices, for layers as a list. Raises InputError for truncated files, for finite numbers that
    overflow in `dtype`, for non-finite matrices that are to be quantized, and with `finite` for
    any number that is not finite.

    Matrices that are stored in eight bits are kept so in a list of layers, without `weights`, and
    restored to `dtype` in stacked layers.
    """
    leaves: dict[convert.Path, Matrix] = {}
    depth = 1 + max((convert.row_of(path) or 0 for path in table), default=0)
    goals = [_goal(*item, layers, depth, sharding) for item in table.items()]
    parts = [_parts_of(reader, goal, dtype) for goal in goals]
    wanted = (
        packed.Needed(
            *(part.packing, part.is_turned, _parts_here(part.packing.shape, part.each), finite),
            np.uint8 if part.is_bytes else None,
        )
        for part in itertools.chain(*parts)
    )
    with contextlib.closing(packed.read_packed(reader, wanted, dtype)) as arrays:
        for (path, packing, row, shape, where, each), read in zip(goals, parts, strict=True):
            source = f"{reader.file_of[packing.names[0]]}: {' + '.join(packing.names)}"
            placed = [_place(next(arrays), part) for part in read]
            if len(placed) > 1:
                leaf = _joined(path, Quantized(*placed), each, source, weights)
                placed = leaf if row is None else _restored(path[-1:], leaf)
            else:
                (placed,) = placed
            if row is None:
                if weights:
                    placed = _stored_as(path, placed, weights, where, source)
                leaves[path] = placed
                continue
            if row == 0:
                leaves[path] = jnp.zeros(shape, dtype, device=where)
            stack = _set_row(leaves[path], placed, np.int32(row), where)
            leaves[path] = jax.block_until_ready(stack)
    return convert.nest(leaves)


class _Goal(NamedTuple):
    """The destination of an array of a table."""

    path: convert.Path
    packing: convert.Packing
    row: int | None  # index in a stack of layers
    shape: convert.Shape  # of the stack, or of the array itself
    where: NamedSharding | None  # of the stack, or of the array itself
    each: NamedSharding | None  # of the array itself


def _goal(
    path: convert.Path,
    packing: convert.Packing,
    layers: Layout,
    depth: int,
    sharding: ShardingOf | None,
) -> _Goal:
    row = convert.row_of(path) if layers == "stacked" else None
    path = path if row is None else convert.stacked_path(path)
    shape = packing.shape if row is None else (depth, *packing.shape)
    where = each = sharding(path, shape) if sharding else None
    if where and row is not None:
        each = NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))
    return _Goal(path, packing, row, shape, where, each)


class _Part(NamedTuple):
    """An array that is read: a parameter, or the values or the scales of one in eight bits."""

    packing: convert.Packing
    dtype: Any
    each: NamedSharding | None
    is_turned: bool  # on the host
    is_bytes: bool = False


def _parts_of(reader: tensor_reader.TensorReader, goal: _Goal, dtype: Any) -> list[_Part]:
    part = _Part(goal.packing, dtype, goal.each, _is_turned_on_host(reader, goal.packing))
    if (scales := reader.quantized(goal.packing)) is None:
        return [part]
    if not quantize.is_matrix(goal.path[-1:], scales.packing.shape):
        raise InputError(
            f"{' + '.join(goal.packing.names)}: eight bits are not read here; use a folder whose "
            "config.json ignores this matrix"
        )
    if np.dtype(dtype) == np.float16:
        raise InputError("float16 has no room for the scales of eight bits; choose another dtype")
    kind, at = np.dtype(quantize.stored_dtype(scales.format)), (goal.each, goal.each)
    if goal.each is not None:
        struct = lambda shape: jax.ShapeDtypeStruct(shape, kind)
        form = Quantized(struct(goal.packing.shape), struct(scales.packing.shape))
        at = quantize.sharding_as(goal.path[-1:], form, goal.each)
    values = part._replace(dtype=kind, each=at[0], is_bytes=True)
    return [values, _Part(scales.packing, dtype, at[1], is_turned=True)]


def _parts_here(shape: convert.Shape, sharding: NamedSharding | None) -> set[packed.Box] | None:
    """The boxes of an array on this process's devices; None if all devices are local."""
    if sharding is None or sharding.is_fully_addressable:
        return None
    parts = sharding.addressable_devices_indices_map(shape).values()
    return {
        tuple(range(size)[axis] for axis, size in zip(part, shape, strict=True)) for part in parts
    }


def write_params(
    folder: Path,
    table: convert.Table,
    params: Any,
    dtype: Any,
    constants: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write every array of a parameter tree under its stored names, a few at a time.

    `constants` are integer or boolean tensors that are written in addition.
    """
    constants = constants or {}
    leaves = ((packing, convert.leaf_at(params, path)) for path, packing in table.items())
    tensors = (named for packing, leaf in leaves for named in convert.unpack(packing, _whole(leaf)))
    shapes = convert.stored_shapes(table) | {name: a.shape for name, a in constants.items()}
    model_folder.write_tensors(folder, shapes, dtype, itertools.chain(tensors, constants.items()))


def _whole(leaf: Any) -> np.ndarray:
    """A matrix as stored, with panels joined; raises InputError for weights of eight bits."""
    if isinstance(leaf, Quantized):
        raise InputError("weights of eight bits cannot be saved; load them without `weights`")
    return np.asarray(leaf.whole() if isinstance(leaf, Panels) else leaf)


# Bytes below which the host transposes an array, which avoids compiling a program. None stands for
# 16 MiB with an accelerator, and for no limit on CPU.
TURNED_ON_HOST: int | None = None


def _is_turned_on_host(reader: tensor_reader.TensorReader, packing: convert.Packing) -> bool:
    most = TURNED_ON_HOST
    if most is None and jax.default_backend() != "cpu":
        most = 16 * 1024**2
    return most is None or sum(map(reader.num_bytes, packing.names)) < most


def _place(array: np.ndarray, part: _Part) -> jax.Array:
    """Put an array onto its devices, transpose it there if needed, and wait for the result."""
    dtype, sharding = part.dtype, part.each
    array = array.view(dtype) if part.is_bytes else array
    if part.is_turned or not part.packing.turns:
        return jax.block_until_ready(_put(array, sharding))
    last_first = sharding and NamedSharding(
        sharding.mesh, PartitionSpec(*sharding.spec[1:], sharding.spec[0])
    )
    return jax.block_until_ready(_turn(_put(array, last_first), np.dtype(dtype), sharding))


def _put(array: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _turn(joined: jax.Array, dtype: np.dtype, sharding: NamedSharding | None) -> jax.Array:
    """Move the last axis to the front, then cast: the transfer uses the narrower dtype."""
    turned = jnp.moveaxis(joined, -1, 0).astype(dtype)
    return turned if sharding is None else jax.lax.with_sharding_constraint(turned, sharding)


def _joined(
    path: convert.Path,
    read: Quantized,
    sharding: NamedSharding | None,
    source: str,
    weights: Format | None,
) -> Quantized:
    """A matrix as its folder stores it in eight bits; InputError for damaged scales."""
    if weights:
        raise InputError(f"{source} is stored in eight bits already; leave out --weights {weights}")
    if not bool(jnp.isfinite(read.scale).all()):
        raise InputError(f"{source} has scales that are not finite; fetch the model again")
    return _without_single_group(path[-1:], read, sharding)


@functools.partial(jax.jit, static_argnums=(0, 2), donate_argnums=1)
def _without_single_group(
    path: convert.Path, read: Quantized, sharding: NamedSharding | None
) -> Quantized:
    return quantize.placed_as(path, quantize.without_single_group(path, read), sharding)


_restored = jax.jit(quantize.restored, static_argnums=0)


def _stored_as(
    path: convert.Path,
    placed: jax.Array,
    weights: Format,
    sharding: NamedSharding | None,
    source: str,
) -> Matrix:
    """A placed array in the format `weights`; waits for the result, so arrays do not pile up."""
    leaf = jax.block_until_ready(_quantized(path[-1:], placed, weights, sharding))
    if isinstance(leaf, Quantized) and not bool(jnp.isfinite(leaf.scale).all()):
        raise InputError(
            f"{source} holds values that are not finite, so {weights} has no scale for them; fetch "
            "the model again"
        )
    return leaf


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _quantized(
    path: convert.Path, placed: jax.Array, weights: Format, sharding: NamedSharding | None
) -> Matrix:
    leaf = quantize.stored_as(path, placed, weights)
    return quantize.placed_as(path, leaf, sharding)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _set_row(
    stack: jax.Array, row: jax.Array, index: jax.Array, sharding: NamedSharding | None
) -> jax.Array:
    stack = jax.lax.dynamic_update_index_in_dim(stack, row, index, axis=0)
    return stack if sharding is None else jax.lax.with_sharding_constraint(stack, sharding)
