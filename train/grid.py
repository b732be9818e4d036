"""Drafters trained alike and compared: `python -m train.grid --config configs/matched.py`.

Each cell of the grid is trained by train.distill. The same command goes on where it was cut, and
cells, learning rates and seeds may be added later. A finished run is not done again; it is refused
where it was made with other settings or data. With `--cells a,b`, `--learning-rates 1e-4` and
`--seeds 0` several processes share the work. The report, Markdown and JSON in the grid's directory,
has what is there so far: tau of greedy decoding on held-out prompts, with the target's own stops
and with answers that all go on to the limit. With `--done report.json` the rows of earlier reports
count as done, so that a grid grows over days and machines. With `--target-cache DIR` all cells read
one cache of the target.

GRID/CELL-lrRATE-seedSEED/     the directory of a run
    drafter/                   when it is finished
    finished.json              the settings and data files that it was trained with
    decoded.json               tokens and rounds of each prompt; of the best learning rate only
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from infer.flags.config_file import read_config
from infer.flags.pair import open_drafter, open_target
from infer.program import Parser, names, run
from moa_jax.config import DistillConfig, DraftShape, GridConfig
from moa_jax.data import batches, corpora
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.session import Session
from moa_jax.decode.vocabulary import FILE as VOCABULARY
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.errors import InputError, first_line
from moa_jax.files.folders import file_hash, read_json, write_json, write_whole
from moa_jax.pretrained import Target, describe_target
from moa_jax.training.checkpoint import steps_of
from moa_jax.training.fingerprint import changes, fingerprint, listed
from moa_jax.training.metrics import read_records
from moa_jax.version import __version__
from train.distill import distill, with_vocabulary
from train.run import target_cache
from train.run.decoding import fitting_prompts
from train.run.earlier import Earlier, read_earlier
from train.run.grid_report import ENDINGS, FIRST, Decoded, Tau, figures, over_seeds, render
from train.run.settings import check_paths
from train.run.target_cache import CacheFlags

BATCH = 16  # prompts decoded side by side; tau is that of each alone
FINISHED, DECODED = "finished.json", "decoded.json"
# What matched cells share; the starts of dotted names.
ALIKE = ("target", "data", "optim.total_steps", "optim.accumulate", "horizon", "run.dtype")
HASH_LENGTH = 16  # hexadecimal digits kept of a SHA-256


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
    seeds: Sequence[float] = (),
) -> list[GridRun]:
    """The runs of the named cells, rates and seeds, in the order of the cells; no names mean all.

    Raises InputError for a cell, rate or seed that no run has.
    """
    by_rate, by_seed = set(map(rate_name, rates)), {f"{seed:g}" for seed in seeds}
    for flag, asked, known in (
        ("cells", set(cells), {each.cell for each in runs}),
        ("learning-rates", by_rate, {rate_name(each.learning_rate) for each in runs}),
        ("seeds", by_seed, {str(each.seed) for each in runs}),
    ):
        if unknown := sorted(asked - known):
            raise InputError(
                f"--{flag}: the grid has no {', '.join(unknown)}, but {', '.join(sorted(known))}"
            )
    place = {name: index for index, name in enumerate(cells)}
    kept = [each for each in runs if not by_rate or rate_name(each.learning_rate) in by_rate]
    kept = [each for each in kept if not by_seed or str(each.seed) in by_seed]
    kept = [each for each in kept if not cells or each.cell in place]
    return sorted(kept, key=lambda each: place.get(each.cell, 0))


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


# ---- training and decoding ----------------------------------------------------------------


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
        if not is_finished(each, target) and not _earlier_of(each, earlier):
            print(f"{each.config.run.directory}: training", file=sys.stderr)
            if not distill(each.config, flags):
                return False
            settings = fingerprint(with_vocabulary(each.config, target))
            content = {"settings": settings, "files": files_of(each.config)}
            write_json(Path(each.config.run.directory) / FINISHED, content)
            jax.clear_caches()  # or the programs of all cells pile up
    return True


def _earlier_of(each: GridRun, earlier: Sequence[Earlier]) -> Earlier | None:
    """The earlier row that has this run at the best of its rates, else one that has tried it."""
    rate = rate_name(each.learning_rate)
    rows = [row for row in earlier if (row.cell, row.seed) == (each.cell, each.seed)]
    rows = [row for row in rows if rate in row.simulated_tau_by_rate]
    return max(rows, key=lambda row: row.learning_rate == rate, default=None)


def is_finished(each: GridRun, target: Target) -> bool:
    """Whether a run's drafter is there; raises InputError for one of other settings or data."""
    if not (Path(each.config.output) / "config.json").is_file():
        return False
    settings, files = _left_by(each.config)
    found = changes(settings, with_vocabulary(each.config, target)) if settings else []
    now = files_of(each.config)
    found += [f"{path}: other content" for path in now if files.get(path, now[path]) != now[path]]
    if found:
        raise InputError(
            f"cell {each.cell}: {each.config.run.directory} was trained with other settings: "
            f"{listed(found)}: restore them, or name another `directory`"
        )
    return True


def _left_by(config: DistillConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a finished run, and facts of its files; empty where nothing is known.

    Runs of earlier versions left no file of their own, but settings in their checkpoints.
    """
    folder = Path(config.run.directory)
    if (folder / FINISHED).is_file():
        found = read_json(folder / FINISHED)
        return found.get("settings", {}), found.get("files", {})
    for step in steps_of(config)[-1:]:
        meta = folder / "checkpoints" / str(step) / "meta" / "metadata"
        return (read_json(meta).get("config", {}) if meta.is_file() else {}), {}
    return {}, {}


def files_of(config: DistillConfig) -> dict[str, Any]:
    """Facts of the local data files that a run reads, where they are at hand."""
    found = {}
    for path in (*config.data.train, *config.data.validation):
        with contextlib.suppress(InputError):  # a report needs no data
            if files := corpora.files_of(path):
                found[path] = facts(*files)
    if config.vocabulary:
        files = Path(config.vocabulary), Path(config.vocabulary, VOCABULARY)
        found |= {str(file): facts(file) for file in files if file.is_file()}
    return found


def facts(*files: Path) -> dict[str, Any]:
    """Bytes and shortened hash of a file; of several the sum, and the hash of their hashes."""
    stats = [file.stat() for file in files]
    pairs = zip(files, stats, strict=True)
    hashes = [_hash(file, stat.st_size, stat.st_mtime_ns) for file, stat in pairs]
    many = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return {
        "bytes": sum(stat.st_size for stat in stats),
        "sha256": (hashes[0] if len(hashes) == 1 else many)[:HASH_LENGTH],
    }


@functools.cache
def _hash(file: Path, size: int, changed_ns: int) -> str:
    """The hash of a file, read once unless it changes, though every run of the grid asks."""
    return file_hash(file) or ""


def decode(grid: GridConfig, todo: Sequence[GridRun]) -> None:
    """Decode with the runs that have no real tau yet, and store it beside them."""
    if not todo:
        return
    target = open_target(grid.cells[0][1].target)
    prompts = _prompts(grid, target)
    for each in todo:
        drafter = open_drafter(each.config.output, target)
        found = {"prompts": len(prompts), "settings": _settings(grid, each), "shapes": []}
        for shape in grid.shapes:
            session = Session(target, drafter, shape)
            entry: dict[str, Any] = {"shape": _name_of(shape), "counts": {}}
            for key, stops in ENDINGS.items():
                counts = _counts(session, prompts, grid.max_new_tokens, stops)
                entry["counts"][key] = counts
                entry[key] = sum(counts["tokens"]) / max(sum(counts["rounds"]), 1)
            found["shapes"].append(entry)
        write_json(Path(each.config.run.directory) / DECODED, found)
        jax.clear_caches()


def _prompts(grid: GridConfig, target: Target) -> list[list[int]]:
    config = dict(grid.cells)[grid.reference].data
    tokenizer = load_tokenizer(target.folder)
    validation, _ = batches.load(config, tokenizer, target.config.vocab_size, "validation", None)
    return fitting_prompts(validation, target, grid.max_new_tokens, grid.prompts)


def _counts(
    session: Session, prompts: list[list[int]], max_new_tokens: int, stops: list[int] | None
) -> dict[str, list[int]]:
    """Tokens after the first one, and rounds, of each prompt; what the first positions accepted."""
    found = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        filled = part + part[:1] * (BATCH - len(part))  # one program for all
        found += session.generate(filled, max_new_tokens, stops)[: len(part)]
    whole = [length for result in found for length in result.accept_lengths[:-1]]
    at_least = [sum(length >= least for length in whole) for least in range(1, FIRST + 2)]
    return {
        "tokens": [sum(result.accept_lengths) for result in found],
        "rounds": [result.rounds for result in found],
        "reached": at_least[:-1],
        "accepted": at_least[1:],
    }


def _settings(grid: GridConfig, each: GridRun) -> dict[str, Any]:
    """What a decoding depends on beside the drafter's run."""
    return {
        "run": fingerprint(each.config),
        **decoding_of(grid),
    }


def decoding_of(grid: GridConfig) -> dict[str, Any]:
    """How every drafter of a grid decodes."""
    return {
        "shapes": [_name_of(shape) for shape in grid.shapes],
        "prompts": grid.prompts,
        "max_new_tokens": grid.max_new_tokens,
    }


def _decoded(grid: GridConfig, each: GridRun) -> Decoded | None:
    """What was decoded with these settings; None also for a damaged file, to be made again."""
    try:
        found = read_json(Path(each.config.run.directory) / DECODED)
        taus = [{key: _tau(shape, key) for key in ENDINGS} for shape in found["shapes"]]
        same = found["settings"] == _settings(grid, each) and len(taus) == len(grid.shapes)
        return Decoded(int(found["prompts"]), taus) if same else None
    except (InputError, KeyError, TypeError, ValueError):
        return None


def _tau(shape: dict[str, Any], key: str) -> Tau:
    counts = shape["counts"][key] if "counts" in shape else {}
    by_prompt = (np.array(counts[name], int) for name in ("tokens", "rounds") if counts)
    by_position = (tuple(counts.get(name, ())) for name in ("reached", "accepted") if counts)
    return Tau(float(shape[key]), *by_prompt, *by_position)


def _name_of(shape: DraftShape) -> str:
    if shape.is_chain:
        return f"chain {shape.depth}"
    return f"tree {shape.depth}/{shape.breadth}/{shape.num_drafted}"


# ---- report -------------------------------------------------------------------------------


class GridRow(NamedTuple):
    """What is known of one cell and seed, at the best of its learning rates."""

    best: GridRun
    simulated_tau: float
    tried: dict[str, float]  # simulated tau by learning rate
    decoded: Decoded | None
    report: str | None = None  # the earlier one that says so


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
            decoded = best.earlier.decoded if best.earlier else _decoded(grid, best.each)
            report = best.earlier and best.earlier.report
            found.append(GridRow(best.each, best.simulated_tau, tried, decoded, report))
    return found


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


def document_of(
    grid: GridConfig, rows: Sequence[GridRow], target: Target, config_file: str
) -> dict[str, Any]:
    """All that the report says, ready for JSON."""
    reference = dict(grid.cells)[grid.reference]
    base = {row.best.seed: row for row in rows if row.best.cell == grid.reference}
    sizes = check_sizes(grid, target)
    there = {(row.best.cell, row.best.seed) for row in rows}
    wanted = itertools.product((name for name, _ in grid.cells), grid.seeds)
    reports = sorted({row.report for row in rows if row.report})
    others = {
        str(file): facts(file) for file in map(Path, [config_file, *reports]) if file.is_file()
    }
    return {
        "command": f"python -m train.grid --config {config_file}",
        "versions": {
            "moa-jax": __version__,
            "python": platform.python_version(),
            "jax": jax.__version__,
            "numpy": np.__version__,
        },
        "target": {"path": reference.target, **dataclasses.asdict(target.config)},
        "files": others | inputs_of(grid, target),
        "reference": grid.reference,
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


def inputs_of(grid: GridConfig, target: Target) -> dict[str, Any]:
    """Facts of the files that all drafters come from: the target's and the data's."""
    name = grid.cells[0][1].target
    model = sorted([*target.folder.glob("*.json"), *target.folder.glob("*.safetensors")])
    found = {f"{name}: {file.name}": facts(file) for file in model}
    return functools.reduce(dict.__or__, (files_of(config) for _, config in grid.cells), found)


def _entry(row: GridRow, base: GridRow | None, parameters: int) -> dict[str, Any]:
    decoded, known = row.decoded, base and base.decoded
    return {
        "cell": row.best.cell,
        "seed": row.best.seed,
        "report": row.report,
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


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    grid = read_config(args.config, GridConfig)
    check_paths(grid)
    if args.reference:
        grid = dataclasses.replace(grid, reference=args.reference)
    check_alike(grid)
    target = describe_target(grid.cells[0][1].target)
    check_sizes(grid, target)
    runs = runs_of(grid)
    rates = _numbers("learning-rates", args.learning_rates)
    mine = chosen_runs(runs, names(args.cells), rates, _numbers("seeds", args.seeds))
    earlier = _earlier_rows(names(args.done), grid, runs, target)
    rows = rows_of(grid, runs, target, earlier)  # refuses before anything is trained
    if not args.report:
        if not train(mine, target, earlier, target_cache.flags_of(args)):
            return
        cells, rows = {each.cell for each in mine}, rows_of(grid, runs, target, earlier)
        decode(grid, [row.best for row in rows if row.best.cell in cells and not row.decoded])
        rows = rows_of(grid, runs, target, earlier)
    document = document_of(grid, rows, target, args.config)
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


def _numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(name) for name in names(text)]
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
