"""The runs of a grid, checks that its cells are matched, and the files that they read."""

from __future__ import annotations

import contextlib
import dataclasses
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
from moa_jax.training.fingerprint import changes, fingerprint, listed
from train.distill import with_vocabulary

# Prefixes of the dotted names of settings that matched cells must share.
ALIKE = ("target", "data", "optim.total_steps", "optim.accumulate", "horizon", "run.dtype")
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


def chosen_runs(
    runs: Sequence[GridRun],
    cells: Sequence[str] = (),
    rates: Sequence[float] = (),
    seeds: Sequence[int] = (),
) -> list[GridRun]:
    """The runs of these cells, rates and seeds; an empty list selects all.

    Raises InputError for a cell, rate or seed that no run has, and if no run matches all three.
    """
    chosen = {"cell": cells, "learning_rate": rates, "seed": seeds}
    for field, values in chosen.items():
        known = {getattr(run, field) for run in runs}
        if unknown := set(values) - known:
            names, others = (", ".join(map(str, sorted(each))) for each in (unknown, known))
            flag = f"--{field}s".replace("_", "-")
            raise InputError(f"{flag}: the grid has no {names}, but {others}")
    is_chosen = lambda run: all(getattr(run, f) in v for f, v in chosen.items() if v)
    kept = list(filter(is_chosen, runs))
    if not kept:
        raise InputError("no run of the grid has all that the flags name; leave one of them out")
    return kept


def check_matched(grid: GridConfig, target: Target) -> dict[str, int]:
    """The number of trainable parameters per cell.

    Raises InputError for a cell outside `unmatched` that differs from the reference in size or in
    the settings of `ALIKE`, such as data and updates, and for any cell with another target.
    """
    reference, sizes = fingerprint(dict(grid.cells)[grid.reference]), {}
    for name, config in grid.cells:
        different = [line for line in changes(reference, config) if line.startswith(ALIKE)]
        free = name in grid.unmatched and not any(line.startswith("target") for line in different)
        if different and not free:
            raise InputError(
                f"cell {name} is not trained like {grid.reference}: {listed(different)}; set them "
                "alike or name it in `unmatched` (all cells have the same target)"
            )
        drafter = with_vocabulary(config, target).drafter
        functions = DRAFTERS[method_of(drafter)].make(drafter, target.config)
        leaves = jax.tree.leaves(jax.eval_shape(functions.init, jax.random.key(0)))
        sizes[name] = sum(math.prod(leaf.shape) for leaf in leaves)
    wanted = sizes[grid.reference]
    for name in sizes.keys() - grid.unmatched:
        if abs(sizes[name] / wanted - 1) > grid.tolerance:
            raise InputError(
                f"cell {name} trains {sizes[name]} parameters and {grid.reference} {wanted}, more "
                f"than {grid.tolerance:.0%} apart; change its sizes or name it in `unmatched`"
            )
    return sizes


def inputs_of(grid: GridConfig, target: Target) -> dict[str, Any]:
    """`facts` of the target's files and of the data files of all cells, by name."""
    name, found = grid.cells[0][1].target, {}
    for pattern in ("*.json", "*.safetensors", "*.gguf"):
        found |= {f"{name}: {file.name}": facts(file) for file in target.folder.glob(pattern)}
    return functools.reduce(dict.__or__, (files_of(config) for _, config in grid.cells), found)


def files_of(config: DistillConfig) -> dict[str, Any]:
    """`facts` of the local data files that a run reads, by name; missing files are left out."""
    found = {}
    for path in (*config.data.train, *config.data.validation):
        with contextlib.suppress(InputError):  # a report needs no data
            if files := sources.files_of(path):
                found[path] = facts(*files)
    if config.vocabulary:
        files = Path(config.vocabulary), Path(config.vocabulary, VOCABULARY)
        found |= {str(file): facts(file) for file in files if file.is_file()}
    return found


def facts(*files: Path) -> dict[str, Any]:
    """Bytes and shortened hash of a file; for several, the sum and the hash of their hashes."""
    stats = [size_and_time(file) for file in files]
    hashes = [_hash(file, *stat) for file, stat in zip(files, stats, strict=True)]
    short = (hashes[0] if len(hashes) == 1 else json_hash(hashes))[:HASH_LENGTH]
    return {"bytes": sum(size for size, _ in stats), "sha256": short}


def other_files(known: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """One line per file of `now` that has other content in `known`."""
    return [f"{name}: other content" for name in now if known.get(name, now[name]) != now[name]]


@functools.cache
def _hash(file: Path, size: int, changed: float) -> str:
    """The hash of a file; cached until the file changes, since all runs hash the same files."""
    return file_hash(file)
