"""A target and a drafter with random weights, initialised directly on their devices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from moa_jax.config import TargetConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.model import convert
from moa_jax.model.layers import INIT_STDDEV
from moa_jax.model.quantize import Format, Matrix, placed_as, stored_as
from moa_jax.model.sharding import ShardingOf, mesh_of
from moa_jax.pretrained import LoadedDrafter, SpecialIds, Target, check_mesh, cut_for_decoding


def random_target(
    config: TargetConfig,
    dtype: Any,
    folder: Path,
    seed: int = 0,
    weights: Format | None = None,
    mesh: Mesh | None = None,
) -> Target:
    """A target with random weights; `folder` is only a name for messages.

    Raises InputError for a mesh as `load_target` does.
    """
    if mesh is not None:
        check_mesh(config, mesh)
    table = convert.target_table(config)
    params = random_params(table, dtype, seed, weights, _sharding(table, mesh, "target"))
    return Target(config, params, folder, SpecialIds())


def random_drafter(
    method: str,
    config: Any,
    target: Target,
    dtype: Any,
    seed: int = 1,
    weights: Format | None = None,
) -> LoadedDrafter:
    """A drafter for `target` with random weights, on the target's mesh, if any.

    Raises InputError for shapes that do not fit the target.
    """
    kind = DRAFTERS[method]
    kind.make(config, target.config)
    table = kind.table(config, target.config)
    sharding = _sharding(table, mesh_of(target.params), "drafter")
    params = random_params(table, dtype, seed, weights, sharding)
    return LoadedDrafter(method, config, params, (), target.folder, None)


def _sharding(table: convert.Table, mesh: Mesh | None, part: str) -> ShardingOf | None:
    return None if mesh is None else cut_for_decoding(table, mesh, part)


def random_params(
    table: convert.Table,
    dtype: Any,
    seed: int,
    weights: Format | None,
    sharding: ShardingOf | None,
) -> Any:
    """N(0, 0.02), norm scales 1, biases 0; creates one array at a time in its final format."""
    leaf = functools.partial(_leaf, jnp.dtype(dtype), weights)
    leaves = {}
    for index, (path, packing) in enumerate(table.items()):
        where = sharding and sharding(path, packing.shape)
        own_key = jax.random.fold_in(jax.random.key(seed), index)
        leaves[path] = leaf(str(path[-1]), packing.shape, where, own_key)
    return convert.nest(leaves)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _leaf(
    dtype: jnp.dtype,
    weights: Format | None,
    name: str,
    shape: tuple[int, ...],
    sharding: NamedSharding | None,
    key: jax.Array,
) -> Matrix:
    """Equal shapes share a program; the program rounds to `dtype`, so no wide copy is stored."""
    if name in ("scale", "bias"):
        leaf = jnp.full(shape, name == "scale", dtype)
    else:
        drawn = (INIT_STDDEV * jax.random.normal(key, shape)).astype(dtype)
        leaf = stored_as((name,), drawn, weights)
    return placed_as((name,), leaf, sharding)
