"""A target and a drafter of given shapes with random weights, made where they live."""

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
from moa_jax.model.quantise import Format, Matrix, placed_as, stored_as
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
    """A target that no file holds; `folder` is only the name that is shown.

    Raises InputError for a mesh as `load_target` does.
    """
    table, sharding = convert.target_table(config), None
    if mesh is not None:
        check_mesh(config, mesh)
        sharding = cut_for_decoding(table, mesh, "target")
    params = random_params(table, dtype, jax.random.key(seed), weights, sharding)
    return Target(config, params, folder, SpecialIds())


def random_drafter(
    method: str,
    config: Any,
    target: Target,
    dtype: Any,
    seed: int = 1,
    weights: Format | None = None,
) -> LoadedDrafter:
    """A drafter for `target` that no file holds, on the same mesh if that lies on one.

    Raises InputError for shapes that do not fit it.
    """
    kind = DRAFTERS[method]
    kind.make(config, target.config)
    table = kind.table(config, target.config)
    mesh = mesh_of(target.params)
    sharding = None if mesh is None else cut_for_decoding(table, mesh, "drafter")
    params = random_params(table, dtype, jax.random.key(seed), weights, sharding)
    return LoadedDrafter(method, config, params, (), target.folder, None)


def random_params(
    table: convert.Table,
    dtype: Any,
    key: jax.Array,
    weights: Format | None = None,
    sharding: ShardingOf | None = None,
) -> Any:
    """N(0, 0.02), norm scales 1, biases 0: one array after the other, each born as it is stored."""
    leaf = functools.partial(_leaf, jnp.dtype(dtype), weights)
    leaves = {}
    for index, (path, packing) in enumerate(table.items()):
        where = sharding and sharding(path, packing.shape)
        own_key = jax.random.fold_in(key, index)
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
    """Equal shapes share a program; rounding to `dtype` is part of it, so no wide copy is made."""
    if name in ("scale", "bias"):
        leaf = jnp.full(shape, name == "scale", dtype)
    else:
        drawn = (INIT_STDDEV * jax.random.normal(key, shape)).astype(dtype)
        leaf = stored_as((name,), drawn, weights)
    return placed_as((name,), leaf, sharding)
