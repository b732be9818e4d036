"""Moves arrays between tensor files and devices, one at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moa_jax.files import folders
from moa_jax.model import convert
from moa_jax.model.sharding import ShardingOf

Layout = Literal["list", "stacked"]


def read_params(
    reader: folders.TensorReader,
    table: convert.Table,
    dtype: Any,
    *,
    layers: Layout = "list",
    sharding: ShardingOf | None = None,
) -> Any:
    """Read, pack and place every array of a table; returns the parameter tree."""
    leaves: dict[convert.Path, jax.Array] = {}
    depth = 1 + max((convert.row_of(path) or 0 for path in table), default=0)
    for path, packing in table.items():
        row = convert.row_of(path) if layers == "stacked" else None
        path = path if row is None else convert.stacked_path(path)
        shape = packing.shape if row is None else (depth, *packing.shape)
        where = sharding(path, shape) if sharding else None
        packed = convert.pack(packing, map(reader.read, packing.names), dtype)
        if row is None:
            leaves[path] = _place(packed, where)
            continue
        if row == 0:
            leaves[path] = jnp.zeros(shape, dtype, device=where)
        each = where and NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))
        leaves[path] = _set_row(leaves[path], _place(packed, each), np.int32(row), where)
    return convert.nest(leaves)


def write_params(
    folder: Path,
    table: convert.Table,
    params: Any,
    dtype: Any,
    constants: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write every array of a parameter tree under its stored names, a few at a time.

    `constants` are integer or boolean tensors to be written beside them.
    """
    constants = constants or {}
    leaves = ((packing, convert.leaf_at(params, path)) for path, packing in table.items())
    tensors = (
        named for packing, leaf in leaves for named in convert.unpack(packing, np.asarray(leaf))
    )
    shapes = convert.stored_shapes(table) | {name: a.shape for name, a in constants.items()}
    folders.write_tensors(folder, shapes, dtype, itertools.chain(tensors, constants.items()))


def _place(array: np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    """Copy a host array to its devices, and wait, so that host arrays do not pile up."""
    if sharding is None:
        return jax.device_put(array).block_until_ready()
    placed = jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
    return placed.block_until_ready()


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _set_row(
    stack: jax.Array, row: jax.Array, index: jax.Array, sharding: NamedSharding | None
) -> jax.Array:
    stack = jax.lax.dynamic_update_index_in_dim(stack, row, index, axis=0)
    return stack if sharding is None else jax.lax.with_sharding_constraint(stack, sharding)
