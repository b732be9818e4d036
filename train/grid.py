"""Trains drafters alike and compares them: `python -m train.grid --config configs/matched.py`.

train.distill trains every cell of the grid. The same command resumes an interrupted grid; cells,
learning rates and seeds may be added later. A finished run is not trained again; a run that was
trained with other settings or data is refused. `--cells a,b`, `--learning-rates 1e-4` and
`--seeds 0` divide the work among processes. The report, Markdown and JSON in the grid's directory,
covers the finished runs: tau of greedy decoding on distinct held-out prompts that no cell was
trained on, with the target's own stop tokens and with answers that all reach the limit. With
`--done report.json` the decoded rows of other reports count as done, so that a grid grows over days
and machines. With `--target-cache DIR` all cells read one cache of the target.

GRID/CELL-lrRATE-seedSEED/     the directory of a run
    drafter/                   the drafter of a finished run
    finished.json              settings, data files, device and simulated tau; for the best learning
                               rate also tokens and rounds per prompt
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from infer.cli.flags.config_file import read_config
from infer.cli.program import Parser, names, run
from moa_jax.config import GridConfig, TargetConfig
from moa_jax.errors import InputError, first_line
from moa_jax.files.model_folder import read_json, write_json, write_whole
from moa_jax.pretrained import Target, describe_target
from moa_jax.training.fingerprint import changes, fingerprint, listed
from moa_jax.training.metrics import read_records
from train.distill import distill
from train.run import target_cache
from train.run.grid_decoding import decode, decoding_of, prompts_of
from train.run.grid_report import Row, document_of, render
from train.run.grid_runs import (
    GridRun,
    check_matched,
    chosen_runs,
    files_of,
    inputs_of,
    other_files,
    runs_of,
)
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
            device = f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}"
            finish(each, simulated_tau=taus[-1], files=files_of(each.config), trained_on=device)
            jax.clear_caches()  # else the compiled programs of all cells accumulate
    return True


def is_finished(each: GridRun) -> bool:
    """Whether a run was trained, here or for a report of --done.

    A file of an early version has no tau: such a run resumes from its last checkpoint.
    """
    path = each.folder / FINISHED
    return path.is_file() and "simulated_tau" in read_json(path)


def finish(each: GridRun, **facts: Any) -> None:
    """Writes the facts of a trained run to its folder."""
    settings = fingerprint(each.config)
    named = {"cell": each.cell, "seed": each.seed, "learning_rate": each.learning_rate}
    each.folder.mkdir(parents=True, exist_ok=True)
    empty = {"report": None, "decoding": None, "decoded": None}
    write_json(each.folder / FINISHED, named | empty | {"settings": settings} | facts)


def add_rows(path: str, grid: GridConfig, target: Target) -> None:
    """Adds the decoded rows of another grid's report as finished runs of this grid.

    Raises InputError for rows that were trained or decoded with other settings or files, and for
    a file that is not a report of this version.
    """
    document, known = read_json(Path(path)), {each[:3]: each for each in runs_of(grid)}
    key = lambda row: (row["cell"], row["seed"], row["learning_rate"])
    now = decoding_of(grid)
    try:
        rows = [row for row in document["rows"] if row["decoded"] and key(row) in known]
        found = [f"{n}: {document[n]} -> {v}" for n, v in now.items() if document[n] != v]
        found += other_files(document["files"], inputs_of(grid, target))
        for row in rows:
            different = changes(row["settings"], known[key(row)].config)
            found += [f"cell {row['cell']}: {line}" for line in different]
        if rows and found:
            raise InputError(
                f"{path} is of another grid: {listed(found)}; restore them, or leave it out"
            )
        for row in rows:
            shared = {"files": document["files"], "trained_on": row["trained_on"], "report": path}
            for rate, tau in row["simulated_tau_by_learning_rate"].items():
                each = known.get((row["cell"], row["seed"], float(rate)))
                if each and not is_finished(each):
                    is_best = each.learning_rate == row["learning_rate"]
                    decoded = {"decoding": now, "decoded": row["decoded"]} if is_best else {}
                    finish(each, simulated_tau=tau, **shared, **decoded)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not a report of this version of train.grid ({first_line(error)}); name "
            "its report.json"
        ) from error


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
    if args.reference:
        grid = dataclasses.replace(grid, reference=args.reference)
    target = describe_target(grid.cells[0][1].target)
    sizes = check_matched(grid, target)
    mine = chosen_runs(runs_of(grid), args.cells, args.learning_rates, args.seeds)
    for path in args.done:
        add_rows(path, grid, target)
    rows_of(grid)  # raises for other settings before training starts
    if not args.report:
        if not all(map(is_finished, mine)):
            prompts_of(grid, target)  # raises without prompts before training starts
        if not train(mine, target.config, target_cache.flags_of(args)):
            return
        todo = [row for row in rows_of(grid) if not (row["decoded"] or row["report"])]
        keys = [(row["cell"], row["seed"], row["learning_rate"]) for row in todo]
        for each, shapes in decode(grid, [each for each in mine if each[:3] in keys]):
            left = read_json(each.folder / FINISHED)
            decoded = {"decoding": decoding_of(grid), "decoded": shapes}
            write_json(each.folder / FINISHED, left | decoded)
    document = document_of(grid, rows_of(grid), target, sizes, args.config)
    text = render(document)
    Path(grid.directory).mkdir(parents=True, exist_ok=True)
    write_whole(Path(grid.directory, "report.md"), text + "\n")
    write_json(Path(grid.directory, "report.json"), document)
    print(text)


def numbers(text: str) -> list[float]:
    """Type of a flag that takes numbers with commas between them."""
    try:
        return [int(name) if name.isdecimal() else float(name) for name in names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers such as 1,2"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.grid", __doc__)
    add, some = parser.add_argument, {"default": "", "metavar": "A,B"}
    add("--config", required=True, help="a Python file that defines a GridConfig")
    add("--cells", type=names, **some, help="train these; default: all")
    add("--learning-rates", type=numbers, **some, help="train these; default: all")
    add("--seeds", type=numbers, **some, help="train these; default: all")
    add("--reference", help="the cell to compare with; default: the config's")
    add("--done", type=names, **some, help="report.json of other grids, whose rows are done")
    add("--report", action="store_true", help="only say what is there")
    target_cache.add_flags(parser)
    return parser


if __name__ == "__main__":
    run(main)
