"""What a grid found, as the document that `grid_report.render` shows."""

from __future__ import annotations

import dataclasses
import itertools
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from moa_jax.config import GridConfig
from moa_jax.pretrained import Target
from moa_jax.training.fingerprint import fingerprint
from moa_jax.version import __version__
from train.run.grid_decoding import decoding_of
from train.run.grid_files import facts, inputs_of
from train.run.grid_report import Decoded, figures, over_seeds
from train.run.grid_runs import ALIKE, GridRun, check_alike


class GridRow(NamedTuple):
    """What is known of one cell and seed, at the best of its learning rates."""

    best: GridRun
    simulated_tau: float
    tried: dict[str, float]  # simulated tau by learning rate
    decoded: Decoded | None
    report: str | None = None  # the earlier one that says so
    trained_on: str | None = None  # device and version of jax


def document_of(
    grid: GridConfig,
    rows: Sequence[GridRow],
    target: Target,
    sizes: Mapping[str, int],
    config_file: str,
) -> dict[str, Any]:
    """All that the report says, ready for JSON; `sizes` are trainable parameters by cell."""
    reference = dict(grid.cells)[grid.reference]
    base = {row.best.seed: row for row in rows if row.best.cell == grid.reference}
    there = {(row.best.cell, row.best.seed) for row in rows}
    wanted = itertools.product((name for name, _ in grid.cells), grid.seeds)
    reports = sorted({row.report for row in rows if row.report})
    done = f" --done {','.join(reports)}" if reports else ""
    others = {
        str(file): facts(file) for file in map(Path, [config_file, *reports]) if file.is_file()
    }
    return {
        "command": f"python -m train.grid --config {config_file}{done}",
        "versions": {
            "moa-jax": __version__,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
        "target": {"path": reference.target, **dataclasses.asdict(target.config)},
        "files": others | inputs_of(grid, target),
        "reference": grid.reference,
        "notes": list(grid.notes),
        "unmatched": check_alike(grid),
        "shared": {n: v for n, v in fingerprint(reference).items() if n.startswith(ALIKE)},
        "tolerance": grid.tolerance,
        **decoding_of(grid),
        "rows": [_entry(row, base.get(row.best.seed), sizes[row.best.cell]) for row in rows],
        "over_seeds": _over_seeds(rows, grid.reference),
        "missing": [f"{cell} (seed {seed})" for cell, seed in wanted if (cell, seed) not in there],
    }


def _over_seeds(rows: Sequence[GridRow], reference: str) -> list[dict[str, Any]]:
    """The means of the cells that were decoded with more than one seed."""
    by_cell: dict[str, dict[int, Decoded]] = {}
    for row in rows:
        if row.decoded:
            by_cell.setdefault(row.best.cell, {})[row.best.seed] = row.decoded

    def mean_of(cell: str, index: int, key: str) -> dict[str, Any]:
        both = by_cell[cell], by_cell.get(reference, {})
        return over_seeds(*([each.taus[index][key] for each in s.values()] for s in both))

    return [
        {
            "cell": cell,
            "seeds": sorted(seeds),
            "decoded": [
                {key: mean_of(cell, index, key) for key in taus}
                for index, taus in enumerate(next(iter(seeds.values())).taus)
            ],
        }
        for cell, seeds in by_cell.items()
        if len(seeds) > 1
    ]


def _entry(row: GridRow, base: GridRow | None, parameters: int) -> dict[str, Any]:
    decoded, known = row.decoded, base and base.decoded
    return {
        "cell": row.best.cell,
        "seed": row.best.seed,
        "report": row.report,
        "trained_on": row.trained_on,
        "parameters": parameters,
        "learning_rate": row.best.learning_rate,
        "simulated_tau": row.simulated_tau,
        "simulated_tau_by_learning_rate": row.tried,
        "settings": fingerprint(row.best.config),
        "prompts": decoded and decoded.prompts,
        "decoded": decoded
        and [
            {key: figures(tau, known and known.taus[index][key]) for key, tau in taus.items()}
            for index, taus in enumerate(decoded.taus)
        ],
    }
