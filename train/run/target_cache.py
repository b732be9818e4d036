"""The flags of a target cache, and the cache that a run reads, built if missing."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from infer.cli.program import above_zero, local_path, progress
from moa_jax.config import DistillConfig, TargetConfig
from moa_jax.data.batches import Batches, Mixture
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.drafters.api import TapSpec
from moa_jax.errors import InputError
from moa_jax.files.model_folder import WEIGHTS_AND_CONFIG, find_folder, folder_hash
from moa_jax.model import attention, sharding
from moa_jax.pretrained import Target
from moa_jax.runtime.precision import matmul_precision
from moa_jax.training.distillation import abstract_frozen, make_keep
from moa_jax.training.fingerprint import changes, fingerprint, listed
from moa_jax.training.flops import abstract_batch
from moa_jax.training.target_cache import (
    Parts,
    TargetCache,
    part_names,
    rows_hash,
    union,
)

ReadParts = Callable[[np.ndarray], Parts]  # row numbers (B,) -> parts, (B, ...) each
MOST_GB = 20.0
# Prefixes of the lines of `changes` for settings that decide the content of a cache.
DECISIVE = ("target:", "run.dtype:") + tuple(
    f"data.{name}:"
    for name in "train weights sources answers max_length row_length pack longest_first".split()
)


class CacheFlags(NamedTuple):
    """The folder of a target cache, its size limit in GB, and the activations to keep."""

    folder: Path
    most_gb: float
    taps: TapSpec = TapSpec()  # in addition to the taps of the run's own drafter
    dtype: str | None = None  # of the files; None: that of the run


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --target-cache, and --target-cache-dtype and --target-cache-gb for its size."""
    group = parser.add_argument_group("target cache")
    group.add_argument(
        "--target-cache",
        type=local_path,
        metavar="DIR",
        help="keep what drafters read of the target there, for later epochs and drafters",
    )
    group.add_argument(
        "--target-cache-dtype",
        choices=("float32", "bfloat16"),
        help="round the cache's numbers to this dtype; default: run.dtype",
    )
    group.add_argument(
        "--target-cache-gb",
        type=above_zero,
        default=MOST_GB,
        metavar="N",
        help="refuse a cache that would take more",
    )


def flags_of(args: argparse.Namespace) -> CacheFlags | None:
    """The settings of the cache flags; None without --target-cache."""
    folder = args.target_cache
    if folder is None:
        return None
    return CacheFlags(folder, args.target_cache_gb, dtype=args.target_cache_dtype)


def shared(
    flags: CacheFlags,
    cells: Sequence[tuple[str, DistillConfig]],
    target_cfg: TargetConfig,
    later: Sequence[DistillConfig] = (),
) -> CacheFlags:
    """Settings of one cache for the drafters of all cells, and of `later` ones of the same rows.

    Raises InputError for cells with other rows, another target or another dtype.
    """
    name, first = cells[0]
    differences = lambda config: [
        line for line in changes(fingerprint(first), config) if line.startswith(DECISIVE)
    ]
    for cell, config in cells:
        if different := differences(config):
            raise InputError(
                f"--target-cache: cell {cell} does not read the rows of {name}: "
                f"{listed(different)}; train it apart, by --runs, with a cache of its own"
            )
    readers = [config for _, config in cells]
    readers += [config for config in later if not differences(config)]
    return flags._replace(taps=union([taps_of(config, target_cfg) for config in readers]))


def taps_of(config: DistillConfig, target_cfg: TargetConfig) -> TapSpec:
    """The activations that the drafter of a run reads of its target."""
    return DRAFTERS[method_of(config.drafter)].make(config.drafter, target_cfg, config).taps


def open_cache(
    flags: CacheFlags, config: DistillConfig, described: Target, source: Batches | Mixture
) -> TargetCache:
    """The cache for these rows, possibly incomplete; prints the size of the cache on stderr.

    Raises InputError for a cache that was made from other inputs or is damaged, for a cache above
    the limit or without room on the disk, and for several processes.
    """
    if jax.process_count() > 1:
        raise InputError("--target-cache needs one process; leave it out")
    row_length, computed, stored = config.data.row_length, config.run.dtype, flags.dtype
    made_from = {
        # Without the tokenizer, since the hash of the rows covers its tokens.
        "target": folder_hash(find_folder(config.target), WEIGHTS_AND_CONFIG),
        "data": rows_hash(source),
        "rows": source.num_rows,
        "row_length": row_length,
        "dtype": computed if stored in (None, computed) else f"{stored} from {computed}",
    }
    keep = _keep(flags, config, described.config)
    one = jax.eval_shape(keep, abstract_frozen(described.config), abstract_batch(1, row_length))
    kinds = {n: jax.ShapeDtypeStruct(kept.shape[1:], kept.dtype) for n, kept in one.items()}
    cache = TargetCache(flags.folder, made_from, kinds)
    print(cache.described(), file=sys.stderr)
    cache.check_room(flags.most_gb)
    return cache


def build_cache(
    cache: TargetCache,
    flags: CacheFlags,
    config: DistillConfig,
    target: Target,
    source: Batches | Mixture,
    mesh: Mesh,
) -> ReadParts:
    """Adds the missing parts, and returns a reader of the parts that the run's drafter needs."""
    where = sharding.rows(mesh)
    program = jax.jit(_keep(flags, config, target.config), out_shardings=where)
    at_once = config.data.rows_per_batch // config.optim.accumulate  # as in training

    def keep(number_B: np.ndarray) -> Parts:
        read = lambda rows: source.take(number_B[rows])
        batch = sharding.place_rows(read, where, (at_once,))
        with matmul_precision(config.run.dtype):
            return jax.device_get(program(target.params, batch))

    cache.build(keep, at_once, progress)
    return functools.partial(cache.parts, part_names(taps_of(config, target.config)))


def _keep(flags: CacheFlags, config: DistillConfig, target_cfg: TargetConfig) -> Callable[..., Any]:
    taps = union([flags.taps, taps_of(config, target_cfg)])
    stored = jnp.dtype(flags.dtype or config.run.dtype)
    keep = make_keep(target_cfg, taps, jnp.dtype(config.run.dtype), stored)
    return attention.computed(config.run.attention)(keep)
