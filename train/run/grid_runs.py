"""The runs of a grid, the sizes of its drafters, and the files that the runs read."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from moa_jax.config import DistillConfig, GridConfig
from moa_jax.data import sources
from moa_jax.decode.draft_vocabulary import FILE as VOCABULARY
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.errors import InputError
from moa_jax.files.model_folder import file_hash, json_hash
from moa_jax.files.paths import size_and_time
from moa_jax.pretrained import Target
from train.distill import with_vocabulary

HASH_LENGTH = 16  # hexadecimal digits kept of a SHA-256


class GridRun(NamedTuple):
    """One training run of the grid."""

    cell: str
    seed: int
    learning_rate: float
    config: DistillConfig

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return Path(self.config.run.directory)


def runs_of(grid: GridConfig) -> list[GridRun]:
    """All runs of a grid, ordered by seed, cell and learning rate."""
    runs = []
    for seed, (cell, config) in itertools.product(grid.seeds, grid.cells):
        for rate in grid.learning_rates or (config.optim.learning_rate,):
            folder = f"{grid.directory}/{cell}-lr{rate:g}-seed{seed}"
            optim = dataclasses.replace(config.optim, learning_rate=rate)
            run = dataclasses.replace(config.run, directory=folder, seed=seed)
            output = f"{folder}/drafter"
            changed = dataclasses.replace(config, optim=optim, run=run, output=output)
            runs.append(GridRun(cell, seed, rate, changed))
    return runs


def chosen_runs(runs: Sequence[GridRun], patterns: Sequence[str]) -> list[GridRun]:
    """The runs whose folder name matches a pattern, such as `moa-*-seed0`; all without patterns.

    Raises InputError for a pattern that no run matches.
    """
    names = [run.folder.name for run in runs]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise InputError(f"--runs {pattern} matches no run; the runs are {', '.join(names)}")
    matches = lambda run: any(fnmatch.fnmatch(run.folder.name, each) for each in patterns)
    return [run for run in runs if not patterns or matches(run)]


def sizes_of(grid: GridConfig, target: Target) -> dict[str, int]:
    """The number of trainable parameters per cell."""
    sizes = {}
    for name, config in grid.cells:
        drafter = with_vocabulary(config, target).drafter
        functions = DRAFTERS[method_of(drafter)].make(drafter, target.config)
        leaves = jax.tree.leaves(jax.eval_shape(functions.init, jax.random.key(0)))
        sizes[name] = sum(math.prod(leaf.shape) for leaf in leaves)
    return sizes


def files_of(config: DistillConfig) -> dict[str, Any]:
    """Size and hash of the local data that a run reads, by name; missing files are left out."""
    found = {}
    for path in (*config.data.train, *config.data.validation):
        with contextlib.suppress(InputError):  # a report needs no data
            if files := sources.files_of(path):
                found[path] = _facts(files)
    if config.vocabulary:
        files = Path(config.vocabulary), Path(config.vocabulary, VOCABULARY)
        found |= {str(file): _facts([file]) for file in files if file.is_file()}
    return found


def _facts(files: Sequence[Path]) -> dict[str, Any]:
    """Bytes and shortened hash of a file; for several, the sum and the hash of their hashes."""
    stats = [size_and_time(file) for file in files]
    hashes = [_hash(file, *stat) for file, stat in zip(files, stats, strict=True)]
    short = (hashes[0] if len(hashes) == 1 else json_hash(hashes))[:HASH_LENGTH]
    return {"bytes": sum(size for size, _ in stats), "sha256": short}


@functools.cache
def _hash(file: Path, size: int, changed: float) -> str:
    """The hash of a file; cached until the file changes, since all runs hash the same files."""
    return file_hash(file)


def other_files(known: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per file of `now` that has other content in `known`."""
    return [f"{name}: other content" for name in now if known.get(name, now[name]) != now[name]]
