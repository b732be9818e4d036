"""Drafters trained alike and compared: `python -m train.grid --config configs/matched.py`.

Each cell of the grid is trained by train.distill. The same command goes on where it was cut, and
cells, learning rates and seeds may be added later. A finished run is not done again; it is refused
where it was made with other settings or data. With `--cells a,b`, `--learning-rates 1e-4` and
`--seeds 0` several processes share the work. The report, Markdown and JSON in the grid's directory,
has what is there so far: tau of greedy decoding on held-out prompts, none of them twice or trained
on, with the target's own stops and with answers that all go on to the limit. With `--done
report.json` the rows of earlier reports count as done, so that a grid grows over days and machines;
where those were decoded with other prompts, their learning rates do. With `--target-cache DIR` all
cells read one cache of the target.

GRID/CELL-lrRATE-seedSEED/     the directory of a run
    drafter/                   when it is finished
    finished.json              the settings and data files that it was trained with, and on what
    decoded.json               tokens and rounds of each prompt; of the best learning rate only
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from infer.flags.config_file import read_config
from infer.program import Parser, names, run
from moa_jax.config import DistillConfig, GridConfig
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.errors import InputError, first_line
from moa_jax.files.folders import read_json, write_json, write_whole
from moa_jax.pretrained import Target, describe_target
from moa_jax.training.checkpoint import steps_of
from moa_jax.training.fingerprint import changes, fingerprint, listed
from moa_jax.training.metrics import read_records
from train.distill import distill, with_vocabulary
from train.run import target_cache
from train.run.earlier import Earlier, read_earlier
from train.run.grid_decoding import decode, decoded_of, decoding_of, prompts_of
from train.run.grid_document import GridRow, document_of
from train.run.grid_files import files_of, inputs_of
from train.run.grid_report import render
from train.run.grid_runs import GridRun, check_alike, chosen_runs, rate_name, runs_of
from train.run.settings import expanded
from train.run.target_cache import CacheFlags

Number = TypeVar("Number", int, float)

FINISHED = "finished.json"


def check_sizes(grid: GridConfig, target: Target) -> dict[str, int]:
    """Trainable parameters of each cell; InputError for one that is not matched."""
    sizes: dict[str, int] = {}
    for name, config in grid.cells:
        drafter = with_vocabulary(config, target).drafter
        functions = DRAFTERS[method_of(drafter)].make(drafter, target.config)
        shapes = jax.eval_shape(functions.init, jax.random.key(0))
        sizes[name] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    wanted = sizes[grid.reference]
    for name, size in sizes.items():
        if name not in grid.unmatched and abs(size / wanted - 1) > grid.tolerance:
            raise InputError(
                f"cell {name} trains {size} parameters and {grid.reference} {wanted}, more than "
                f"{grid.tolerance:.0%} apart: change its sizes or name it in `unmatched`"
            )
    return sizes


def train(
    runs: Sequence[GridRun],
    target: Target,
    earlier: Sequence[Earlier] = (),
    flags: CacheFlags | None = None,
) -> bool:
    """Train what is not finished, one run after the other; False where a signal stopped it."""
    configs = [(each.cell, each.config) for each in runs]
    flags = flags and target_cache.shared(flags, configs, target.config)
    for each in runs:
        if not is_done(each, target, earlier):
            print(f"{each.config.run.directory}: training", file=sys.stderr)
            if not distill(each.config, flags):
                return False
            settings = fingerprint(with_vocabulary(each.config, target))
            device = f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}"
            content = {"settings": settings, "files": files_of(each.config), "trained_on": device}
            write_json(Path(each.config.run.directory) / FINISHED, content)
            jax.clear_caches()  # or the programs of all cells pile up
    return True


def is_done(each: GridRun, target: Target, earlier: Sequence[Earlier]) -> bool:
    """Whether a run need not be trained; raises InputError as `is_finished`.

    The best of all rates is to be, where no report has decoded it: its drafter must answer.
    """
    if is_finished(each, target):
        return True
    row = _earlier_of(each, earlier)
    if row is None or row.decoded:
        return row is not None
    tried: dict[str, float] = {}
    for other in _earlier_rows_of(each, earlier):
        tried |= other.simulated_tau_by_rate
    return max(tried, key=tried.get) != rate_name(each.learning_rate)


def _earlier_of(each: GridRun, earlier: Sequence[Earlier]) -> Earlier | None:
    """The earlier row that has this run at the best of its rates, else one that has tried it.

    Of several that have it so, one that was decoded.
    """
    rate = rate_name(each.learning_rate)
    rows = [r for r in _earlier_rows_of(each, earlier) if rate in r.simulated_tau_by_rate]
    better = lambda row: (row.learning_rate == rate, row.decoded is not None)
    return max(rows, key=better, default=None)


def _earlier_rows_of(each: GridRun, earlier: Sequence[Earlier]) -> list[Earlier]:
    """Those of a run's cell and seed."""
    return [row for row in earlier if (row.cell, row.seed) == (each.cell, each.seed)]


def is_finished(each: GridRun, target: Target) -> bool:
    """Whether a run's drafter is there; raises InputError for one of other settings or data."""
    if not (Path(each.config.output) / "config.json").is_file():
        return False
    left = _left_by(each.config)
    settings, files = left.get("settings", {}), left.get("files", {})
    found = changes(settings, with_vocabulary(each.config, target)) if settings else []
    now = files_of(each.config)
    found += [f"{path}: other content" for path in now if files.get(path, now[path]) != now[path]]
    if found:
        raise InputError(
            f"cell {each.cell}: {each.config.run.directory} was trained with other settings: "
            f"{listed(found)}: restore them, or name another `directory`"
        )
    return True


def _left_by(config: DistillConfig) -> dict[str, Any]:
    """What a finished run says of itself; empty where nothing is known.

    Runs of earlier versions left no file of their own, but settings in their checkpoints.
    """
    folder = Path(config.run.directory)
    if (folder / FINISHED).is_file():
        return read_json(folder / FINISHED)
    for step in steps_of(config)[-1:]:
        meta = folder / "checkpoints" / str(step) / "meta" / "metadata"
        return {"settings": read_json(meta).get("config", {})} if meta.is_file() else {}
    return {}


# ---- what is there ------------------------------------------------------------------------


class _Rated(NamedTuple):
    """A run that is done, here or for an earlier report."""

    each: GridRun
    simulated_tau: float
    earlier: Earlier | None

    @property
    def can_count(self) -> bool:
        """Whether its drafter is here, or was decoded."""
        return self.earlier is None or self.earlier.learning_rate == rate_name(
            self.each.learning_rate
        )


def rows_of(
    grid: GridConfig, runs: Sequence[GridRun], target: Target, earlier: Sequence[Earlier] = ()
) -> list[GridRow]:
    """One row a cell and seed of which at least one run is finished."""
    found = []
    for _, group in itertools.groupby(runs, lambda each: (each.cell, each.seed)):
        if rated := list(_rated(group, target, earlier)):
            known = [one for one in rated if one.can_count]
            best = max(known, key=lambda one: one.simulated_tau)
            tried = {rate_name(one.each.learning_rate): one.simulated_tau for one in rated}
            decoded = best.earlier.decoded if best.earlier else decoded_of(grid, best.each)
            report = best.earlier and best.earlier.report
            device = _device_of(best)
            found.append(GridRow(best.each, best.simulated_tau, tried, decoded, report, device))
    return found


def _device_of(rated: _Rated) -> str | None:
    """What a run was trained on, where that is known."""
    if rated.earlier:
        return rated.earlier.trained_on
    return _left_by(rated.each.config).get("trained_on")


def _rated(runs: Iterable[GridRun], target: Target, earlier: Sequence[Earlier]) -> Iterator[_Rated]:
    for each in runs:
        if is_finished(each, target):
            yield _Rated(each, _simulated_tau(each), None)
        elif row := _earlier_of(each, earlier):
            tau = row.simulated_tau_by_rate[rate_name(each.learning_rate)]
            yield _Rated(each, tau, row)


def _simulated_tau(each: GridRun) -> float:
    """That of the run's last evaluation; InputError for a run without."""
    folder = Path(each.config.run.directory)
    records = read_records(folder / "metrics.jsonl")
    taus = [record["simulated_tau"] for record in records if "simulated_tau" in record]
    if not taus or taus[-1] is None:
        raise InputError(
            f"{folder}: metrics.jsonl holds no simulated tau of its last evaluation: remove the "
            "folder to train this run again"
        )
    return taus[-1]


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    grid = expanded(read_config(args.config, GridConfig))
    if args.reference:
        grid = dataclasses.replace(grid, reference=args.reference)
    check_alike(grid)
    target = describe_target(grid.cells[0][1].target)
    sizes = check_sizes(grid, target)
    runs = runs_of(grid)
    rates = _numbers("learning-rates", args.learning_rates, float)
    mine = chosen_runs(runs, names(args.cells), rates, _numbers("seeds", args.seeds, int))
    earlier = _earlier_rows(names(args.done), grid, runs, target)
    rows = rows_of(grid, runs, target, earlier)  # refuses before anything is trained
    if not args.report:
        if not all(is_done(each, target, earlier) for each in mine):
            prompts_of(grid, target)  # so does this
        if not train(mine, target, earlier, target_cache.flags_of(args)):
            return
        rows = rows_of(grid, runs, target, earlier)
        best = [row.best for row in rows if not row.decoded and not row.report]
        asked = {(each.cell, each.seed) for each in mine}
        decode(grid, [each for each in best if (each.cell, each.seed) in asked])
        rows = rows_of(grid, runs, target, earlier)
    document = document_of(grid, rows, target, sizes, args.config)
    text = render(document)
    Path(grid.directory).mkdir(parents=True, exist_ok=True)
    write_whole(Path(grid.directory, "report.md"), text + "\n")
    write_json(Path(grid.directory, "report.json"), document)
    print(text)


def _earlier_rows(
    paths: Sequence[str], grid: GridConfig, runs: Sequence[GridRun], target: Target
) -> list[Earlier]:
    configs = {(each.cell, each.seed, rate_name(each.learning_rate)): each.config for each in runs}
    files, decoding = inputs_of(grid, target) if paths else {}, decoding_of(grid)
    return [row for path in paths for row in read_earlier(path, configs, files, decoding)]


def _numbers(flag: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        return [kind(name) for name in names(text)]
    except ValueError as error:
        raise InputError(
            f"--{flag} {text}: {first_line(error)}: give numbers with commas between them"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.grid", __doc__)
    parser.add_argument("--config", required=True, help="a Python file that defines a GridConfig")
    parser.add_argument("--cells", default="", help="names with commas; default: all")
    parser.add_argument("--learning-rates", default="", help="with commas; default: all")
    parser.add_argument("--seeds", default="", help="with commas; default: all")
    parser.add_argument("--reference", help="the cell to compare with; default: the config's")
    parser.add_argument(
        "--done",
        default="",
        metavar="REPORTS",
        help="report.json of earlier grids, with commas: their rows are not trained again",
    )
    parser.add_argument("--report", action="store_true", help="only say what is there")
    target_cache.add_flags(parser)
    return parser


if __name__ == "__main__":
    run(main)
