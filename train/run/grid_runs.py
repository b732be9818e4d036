"""The runs of a grid, which of them are asked for, and what all of them must share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from moa_jax.config import DistillConfig, GridConfig
from moa_jax.errors import InputError
from moa_jax.training.fingerprint import changes, fingerprint, listed

# What matched cells share; the starts of dotted names.
ALIKE = ("target", "data", "optim.total_steps", "optim.accumulate", "horizon", "run.dtype")


class GridRun(NamedTuple):
    """One training run of the grid."""

    cell: str
    learning_rate: float
    seed: int
    config: DistillConfig


def runs_of(grid: GridConfig) -> list[GridRun]:
    """All runs, the learning rates of a cell and seed one after the other."""
    runs = []
    for seed, (cell, config) in itertools.product(grid.seeds, grid.cells):
        for rate in grid.learning_rates or (config.optim.learning_rate,):
            folder = f"{grid.directory}/{cell}-lr{rate_name(rate)}-seed{seed}"
            changed = dataclasses.replace(
                config,
                optim=dataclasses.replace(config.optim, learning_rate=rate),
                run=dataclasses.replace(config.run, directory=folder, seed=seed),
                output=f"{folder}/drafter",
            )
            runs.append(GridRun(cell, rate, seed, changed))
    return runs


def rate_name(rate: float) -> str:
    """A learning rate as in the names of folders: 2e-4 is 0.0002."""
    return f"{rate:g}"


def chosen_runs(
    runs: Sequence[GridRun],
    cells: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int] = (),
) -> list[GridRun]:
    """The runs of the named cells, rates and seeds, in the order of the cells; no names mean all.

    Raises InputError for a cell, rate or seed that no run has, and where no run has all of them.
    """
    asked = {
        "cells": list(cells),
        "learning-rates": list(map(rate_name, rates)),
        "seeds": list(map(str, seeds)),
    }
    kept = list(runs)
    for flag, wanted in asked.items():
        known = {_named(each)[flag] for each in runs}
        if unknown := sorted(set(wanted) - known):
            raise InputError(
                f"--{flag}: the grid has no {', '.join(unknown)}, but {', '.join(sorted(known))}"
            )
        kept = [each for each in kept if not wanted or _named(each)[flag] in wanted]
    if not kept:
        given = " ".join(f"--{flag} {','.join(wanted)}" for flag, wanted in asked.items() if wanted)
        raise InputError(f"{given}: no run of the grid is of all these: leave one of them out")
    place = {name: index for index, name in enumerate(cells)}
    return sorted(kept, key=lambda each: place.get(each.cell, 0))


def _named(each: GridRun) -> dict[str, str]:
    """What the flags that choose runs call this one."""
    rate = rate_name(each.learning_rate)
    return {"cells": each.cell, "learning-rates": rate, "seeds": str(each.seed)}


def check_alike(grid: GridConfig) -> dict[str, list[str]]:
    """How cells that need not match differ from the reference in target, data and updates.

    Raises InputError for such a difference of a matched cell, and for another target of any.
    """
    reference = fingerprint(dict(grid.cells)[grid.reference])
    found = {}
    for name, config in grid.cells:
        different = [each for each in changes(reference, config) if each.startswith(ALIKE)]
        free = name in grid.unmatched and not any(each.startswith("target") for each in different)
        if different and not free:
            raise InputError(
                f"cell {name} is not trained like {grid.reference}: {listed(different)}: set them "
                "alike or name it in `unmatched` (the target is that of all)"
            )
        if name in grid.unmatched:
            found[name] = different
    return found
