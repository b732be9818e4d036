"""Trains drafters and compares them: `python -m train.grid --config configs/matched.py`.

train.distill trains every cell of the grid. The same command resumes an interrupted grid; cells,
learning rates and seeds may be added later. A finished run is not trained again; a run that was
trained with other settings or data is refused. `--runs 'moa-*,*-seed0'` divides the work among
processes. GRID/report.md covers the finished runs: tau of greedy decoding on distinct held-out
prompts that no cell was trained on, with the target's own stop tokens and with answers that all
reach the limit. Folders of runs that another machine finished may be copied into GRID. With
`--target-cache DIR` all cells read one cache of the target.

GRID/CELL-lrRATE-seedSEED/     the directory of a run
    drafter/                   the drafter of a finished run
    finished.json              settings, data files and simulated tau; for the best learning rate
                               also tokens and rounds per prompt
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from infer.cli.flags.config_file import read_config
from infer.cli.program import Parser, names, run
from moa_jax.config import GridConfig, TargetConfig
from moa_jax.errors import InputError
from moa_jax.files.model_folder import read_json, write_json, write_whole
from moa_jax.pretrained import describe_target
from moa_jax.training.fingerprint import changes, fingerprint, listed
from moa_jax.training.metrics import read_records
from train.distill import distill
from train.run import target_cache
from train.run.grid_decoding import decode, decoding_of, prompts_of
from train.run.grid_report import Row, render
from train.run.grid_runs import GridRun, chosen_runs, files_of, other_files, runs_of, sizes_of
from train.run.settings import expanded
from train.run.target_cache import CacheFlags

FINISHED = "finished.json"


def train(
    runs: Sequence[GridRun], target_cfg: TargetConfig, flags: CacheFlags | None = None
) -> bool:
    """Trains the unfinished runs; returns False if a signal stopped training."""
    configs = [(each.cell, each.config) for each in runs]
    flags = flags and target_cache.shared(flags, configs, target_cfg)
    for each in runs:
        if not is_finished(each):
            print(f"{each.folder}: training", file=sys.stderr)
            if not distill(each.config, flags):
                return False
            records = read_records(each.folder / "metrics.jsonl")
            taus = [record["simulated_tau"] for record in records if "simulated_tau" in record]
            finish(each, simulated_tau=taus[-1], files=files_of(each.config))
            jax.clear_caches()  # else the compiled programs of all cells accumulate
    return True


def is_finished(each: GridRun) -> bool:
    """Whether a run was trained to its end, by this version."""
    path = each.folder / FINISHED
    return path.is_file() and "decoding" in read_json(path)


def finish(each: GridRun, **facts: Any) -> None:
    """Writes the facts of a trained run to its folder."""
    settings = fingerprint(each.config)
    named = {"cell": each.cell, "seed": each.seed, "learning_rate": each.learning_rate}
    each.folder.mkdir(parents=True, exist_ok=True)
    empty = {"decoding": None, "decoded": None}
    write_json(each.folder / FINISHED, named | empty | {"settings": settings} | facts)


def rows_of(grid: GridConfig) -> list[Row]:
    """One row per cell and seed with a finished run, at the rate of the best simulated tau.

    Raises InputError for a run that was trained with other settings or data.
    """
    rows = []
    for _, group in itertools.groupby(runs_of(grid), lambda each: each[:2]):
        if done := [_row(grid, each) for each in group if is_finished(each)]:
            best = max(done, key=lambda row: row["simulated_tau"] or 0)  # null: the run diverged
            taus = {f"{row['learning_rate']:g}": row["simulated_tau"] for row in done}
            rows.append(best | {"simulated_tau_by_learning_rate": taus})
    return rows


def _row(grid: GridConfig, each: GridRun) -> Row:
    row = read_json(each.folder / FINISHED)
    found = changes(row["settings"], each.config)
    if found := found + other_files(row.pop("files"), files_of(each.config)):
        raise InputError(
            f"cell {each.cell}: {each.folder} was trained with other settings: {listed(found)}; "
            "restore them, or name another `directory`"
        )
    return row if row.pop("decoding") == decoding_of(grid) else row | {"decoded": None}


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    grid = expanded(read_config(args.config, GridConfig))
    target = describe_target(grid.cells[0][1].target)
    mine = chosen_runs(runs_of(grid), args.runs)
    sizes = sizes_of(grid, target)  # raises for a vocabulary that is absent
    rows_of(grid)  # raises for other settings before training starts
    if not args.report:
        if not all(map(is_finished, mine)):
            prompts_of(grid, target)  # raises without prompts before training starts
        if not train(mine, target.config, target_cache.flags_of(args)):
            return
        todo = [row for row in rows_of(grid) if not row["decoded"]]
        keys = [(row["cell"], row["seed"], row["learning_rate"]) for row in todo]
        chosen = [each for each in mine if each[:3] in keys]
        absent = [each for each in chosen if not Path(each.config.output).is_dir()]
        for each in absent:
            print(f"{each.folder} is not decoded: it has no drafter; copy it here", file=sys.stderr)
        for each, shapes in decode(grid, [each for each in chosen if each not in absent]):
            left = read_json(each.folder / FINISHED)
            decoded = {"decoding": decoding_of(grid), "decoded": shapes}
            write_json(each.folder / FINISHED, left | decoded)
    text = render(grid, rows_of(grid), target, sizes)
    Path(grid.directory).mkdir(parents=True, exist_ok=True)
    write_whole(Path(grid.directory, "report.md"), text + "\n")
    print(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.grid", __doc__)
    add = parser.add_argument
    add("--config", required=True, help="a Python file that defines a GridConfig")
    help_ = "train the runs whose folders match, such as 'moa-*,*-seed0'; default: all"
    add("--runs", type=names, default="", metavar="PATTERNS", help=help_)
    add("--report", action="store_true", help="only report the finished runs")
    target_cache.add_flags(parser)
    return parser


if __name__ == "__main__":
    run(main)
