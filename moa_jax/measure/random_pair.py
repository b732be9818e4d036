"""A target and a drafter of given shapes with random weights, made where they live."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from moa_jax.config import TargetConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.model import convert
from moa_jax.model.layers import INIT_STDDEV
from moa_jax.model.quantise import Format, Matrix, stored_as
from moa_jax.pretrained import Generation, LoadedDrafter, Target


def random_target(
    config: TargetConfig, dtype: Any, folder: Path, seed: int = 0, weights: Format | None = None
) -> Target:
    """A target that no file holds; `folder` is only the name that is shown."""
    params = random_params(convert.target_table(config), dtype, jax.random.key(seed), weights)
    return Target(config, params, folder, Generation())


def random_drafter(
    method: str,
    config: Any,
    target: Target,
    dtype: Any,
    seed: int = 1,
    weights: Format | None = None,
) -> LoadedDrafter:
    """A drafter for `target` that no file holds; InputError for shapes that do not fit it."""
    kind = DRAFTERS[method]
    kind.make(config, target.config)
    table = kind.table(config, target.config)
    params = random_params(table, dtype, jax.random.key(seed), weights)
    return LoadedDrafter(method, config, params, (), target.folder, None)


def random_params(
    table: convert.Table, dtype: Any, key: jax.Array, weights: Format | None = None
) -> Any:
    """N(0, 0.02), norm scales 1, biases 0: one array after the other, each born as it is stored."""
    leaf = functools.partial(_leaf, jnp.dtype(dtype), weights)
    leaves = {
        path: leaf(str(path[-1]), packing.shape, jax.random.fold_in(key, index))
        for index, (path, packing) in enumerate(table.items())
    }
    return convert.nest(leaves)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _leaf(
    dtype: jnp.dtype, weights: Format | None, name: str, shape: tuple[int, ...], key: jax.Array
) -> Matrix:
    """Equal shapes share a program; rounding to `dtype` is part of it, so no wide copy is made."""
    if name == "scale":
        return jnp.ones(shape, dtype)
    if name == "bias":
        return jnp.zeros(shape, dtype)
    drawn = (INIT_STDDEV * jax.random.normal(key, shape)).astype(dtype)
    return stored_as((name,), drawn, weights)
