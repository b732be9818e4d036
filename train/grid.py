"""Trains drafters and compares them: `python -m train.grid --config configs/matched.py`.

train.distill trains every cell of the grid. The same command resumes an interrupted grid; cells,
learning rates and seeds may be added later. A finished run is not trained again; a run that was
trained with other settings or data is refused. `--runs 'moa-*,*-seed0'` divides the work among
processes. Folders of runs that another machine finished may be copied into GRID. With
`--target-cache DIR` all cells read one cache of the target.

GRID/report.md covers the finished runs: tau on distinct held-out prompts that no cell was trained
on and on the grid's question sets, for each draft shape and temperature. The counts of each set,
shape and temperature are stored at once, and are not decoded again.

GRID/CELL-lrRATE-seedSEED/     the directory of a run
    drafter/                   the drafter of a finished run
    finished.json              settings, data files and simulated_tau; for the best learning rate
                               also tokens and rounds per prompt, by decoding
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from infer.bench.suites import load_suite
from infer.cli.flags.config_file import read_config
from infer.cli.flags.pair import open_drafter, open_target
from infer.cli.program import TRY_AGAIN, Parser, names, run
from moa_jax.config import DistillConfig, GridConfig, Sampling, TargetConfig
from moa_jax.data import batches, chat, sources
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.draft_vocabulary import FILE as VOCABULARY
from moa_jax.decode.draft_vocabulary import vocabulary_beside
from moa_jax.decode.limits import CacheLimits
from moa_jax.decode.session import Result, Session
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.errors import InputError
from moa_jax.files.model_folder import file_hash, json_hash
from moa_jax.files.paths import size_and_time
from moa_jax.files.whole_files import read_json, write_json, write_whole
from moa_jax.pretrained import Target, describe_target
from moa_jax.training.fingerprint import changes, fingerprint, listed
from moa_jax.training.flops import model_flops_per_token
from moa_jax.training.metrics import read_records
from train.distill import distill, with_vocabulary
from train.run import target_cache
from train.run.decoding import conversations, fitting_prompts
from train.run.grid_report import HELD_OUT, DecodedCounts, Decoding, Row, decodings_of, render
from train.run.settings import expanded
from train.run.target_cache import CacheFlags

HASH_LENGTH = 16  # hexadecimal digits kept of a SHA-256
BATCH = 16  # prompts decoded together; the batch does not change tau


class GridRun(NamedTuple):
    """One training run of the grid."""

    cell: str
    seed: int
    learning_rate: float
    config: DistillConfig
    has_weights: bool = True  # False: nothing is trained, and `config.output` names the kind

    @property
    def folder(self) -> Path:
        """The folder of the run's files."""
        return Path(self.config.run.directory)

    @property
    def finished(self) -> Path:
        """The file with the facts of a finished run."""
        return self.folder / "finished.json"


def runs_of(grid: GridConfig) -> list[GridRun]:
    """All runs of a grid, ordered by seed, cell and learning rate; untrained drafters last."""
    runs = []
    for seed, (cell, config) in itertools.product(grid.seeds, grid.cells):
        for rate in grid.learning_rates or (config.optim.learning_rate,):
            folder = f"{grid.directory}/{cell}-lr{rate:g}-seed{seed}"
            optim = dataclasses.replace(config.optim, learning_rate=rate)
            own = dataclasses.replace(config.run, directory=folder, seed=seed)
            changed = dataclasses.replace(config, optim=optim, run=own, output=f"{folder}/drafter")
            runs.append(GridRun(cell, seed, rate, changed))
    _, config = grid.cells[0]
    for kind in grid.untrained:
        own = dataclasses.replace(config.run, directory=f"{grid.directory}/{kind}")
        changed = dataclasses.replace(config, run=own, output=kind)
        runs.append(GridRun(kind, own.seed, 0.0, changed, has_weights=False))
    return runs


def chosen_runs(runs: Sequence[GridRun], patterns: Sequence[str]) -> list[GridRun]:
    """The runs whose folder name matches a pattern, such as `moa-*-seed0`; all without patterns.

    Raises InputError for a pattern that no run matches.
    """
    known = [each.folder.name for each in runs]
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise InputError(f"--runs {pattern} matches no run; the runs are {', '.join(known)}")
    matches = lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    return [each for each in runs if not patterns or matches(each.folder.name)]


def sizes_of(grid: GridConfig, target: Target) -> dict[str, int]:
    """The number of trainable parameters per cell with weights."""
    sizes = {}
    for name, config in grid.cells:
        drafter = with_vocabulary(config, target).drafter
        functions = DRAFTERS[method_of(drafter)].make(drafter, target.config)
        shapes = jax.eval_shape(functions.init, jax.random.key(0))
        sizes[name] = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    return sizes


def flops_of(grid: GridConfig, target: Target, cells: Collection[str]) -> dict[str, float]:
    """The FLOPs of a training run per cell of `cells` with weights, with the target's pass."""
    found = {}
    for name, config in (pair for pair in grid.cells if pair[0] in cells):
        tokens = config.data.rows_per_batch * config.data.row_length * config.optim.total_steps
        per_token = model_flops_per_token(with_vocabulary(config, target), target.config)
        found[name] = per_token * tokens
    return found


def files_of(config: DistillConfig) -> dict[str, Any]:
    """Size and hash of the local data that a run reads, by name; missing files are left out."""
    found = {}
    for path in (*config.data.train, *config.data.validation):
        with contextlib.suppress(InputError):  # a report needs no data
            found[path] = sources.files_of(path)
    if config.vocabulary:
        files = Path(config.vocabulary), Path(config.vocabulary, VOCABULARY)
        found |= {str(file): [file] for file in files if file.is_file()}
    return {name: _facts(files) for name, files in found.items() if files}


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


# ---- training -----------------------------------------------------------------------------


def train(
    runs: Sequence[GridRun],
    target_cfg: TargetConfig,
    flags: CacheFlags | None = None,
    later: Sequence[DistillConfig] = (),
) -> bool:
    """Trains the unfinished runs; returns False if a signal stopped training.

    A cache also has what drafters of the configs in `later` read.
    """
    configs = [(each.cell, each.config) for each in runs if each.has_weights]
    if flags and configs:
        flags = target_cache.shared(flags, configs, target_cfg, later)
    for each in runs:
        if not is_finished(each) and not each.has_weights:
            finish(each, simulated_tau=None, files={})
        elif not is_finished(each):
            print(f"{each.folder}: training", file=sys.stderr)
            if not distill(each.config, flags):
                return False
            records = read_records(each.folder / "metrics.jsonl")
            taus = [record["simulated_tau"] for record in records if "simulated_tau" in record]
            finish(each, simulated_tau=taus[-1], files=files_of(each.config))
            jax.clear_caches()  # else the compiled programs of all cells accumulate
    return True


def is_finished(each: GridRun) -> bool:
    """Whether a run was trained to its end, by this version or the previous version."""
    return each.finished.is_file() and not {"decoding", "decodings"}.isdisjoint(
        read_json(each.finished)
    )


def finish(each: GridRun, **facts: Any) -> None:
    """Writes the facts of a trained run to its folder."""
    named = {"cell": each.cell, "seed": each.seed, "learning_rate": each.learning_rate}
    known = {"settings": fingerprint(each.config), "decodings": {}}
    each.folder.mkdir(parents=True, exist_ok=True)
    write_json(each.finished, named | known | facts)


def rows_of(grid: GridConfig) -> list[Row]:
    """One row per cell and seed with a finished run, at the rate of the best `simulated_tau`.

    Raises InputError for a run that was trained with other settings or data.
    """
    rows = []
    for _, group in itertools.groupby(runs_of(grid), lambda each: each[:2]):
        if done := [_row(grid, each) for each in group if is_finished(each)]:
            best = max(done, key=lambda row: row["simulated_tau"] or 0)  # null: the run diverged
            taus = {row["learning_rate"]: row["simulated_tau"] for row in done}
            rows.append(best | {"taus": taus})
    return rows


def _row(grid: GridConfig, each: GridRun) -> Row:
    row, now = read_json(each.finished) | {"run": each}, files_of(each.config)
    before = now | row.pop("files")
    other = [f"{name}: other content" for name in now if before[name] != now[name]]
    if found := changes(row["settings"], each.config) + other:
        raise InputError(
            f"cell {each.cell}: {each.folder} was trained with other settings: {listed(found)}; "
            "restore them, or name another `directory`"
        )
    return {"decodings": {}} | row  # files of earlier versions have other keys


# ---- real tau -----------------------------------------------------------------------------


def missing(grid: GridConfig, row: Row) -> list[Decoding]:
    """The decodings of the grid that a run lacks."""
    return [each for each in decodings_of(grid, row["cell"]) if each.name not in row["decodings"]]


def decode(grid: GridConfig, rows: Sequence[Row]) -> None:
    """Does the missing decodings of each run, and adds each one's counts to the run's facts."""
    absent = [row for row in rows if row["run"].has_weights and not _drafter_of(row).is_dir()]
    for row in absent:
        print(
            f"{row['run'].folder} is not decoded: it has no drafter; copy it here", file=sys.stderr
        )
    if len(absent) == len(rows):
        return
    target = open_target(grid.cells[0][1].target)
    prompts = {HELD_OUT: prompts_of(grid, target)}
    prompts |= {name: questions_of(grid, target, name) for name in grid.sets}
    for row in (row for row in rows if row not in absent):
        file, drafter = row["run"].finished, open_drafter(row["run"].config.output, target)
        own = {"vocabulary": vocabulary_beside(target, drafter)}
        for shape, parts in itertools.groupby(missing(grid, row), lambda each: each.shape):
            session = Session(target, drafter, shape, **own)
            for each in parts:
                print(f"{row['run'].folder}: {each.name}", file=sys.stderr)
                counts = _counts(session, prompts[each.prompts_of], each)
                facts = read_json(file)
                facts["decodings"] = facts.get("decodings", {}) | {each.name: counts}
                write_json(file, facts)
            jax.clear_caches()


def _drafter_of(row: Row) -> Path:
    return Path(row["run"].config.output)


def questions_of(grid: GridConfig, target: Target, name: str) -> list[list[int]]:
    """The first questions of a set, as prompts that leave room for an answer.

    Raises InputError for an unknown set, and for a set without enough such questions.
    """
    tokenizer = load_tokenizer(target.folder)
    room = CacheLimits(target.config.max_position_embeddings)
    found = (
        chat.prompt_ids(tokenizer, each.messages(), each.kwargs()) for each in load_suite(name)
    )
    fitting = (each for each in found if room.max_new_tokens(len(each)) >= grid.max_new_tokens)
    prompts = list(itertools.islice(fitting, grid.questions))
    if len(prompts) < grid.questions:
        raise InputError(
            f"set {name} has {len(prompts)} questions that leave max_new_tokens "
            f"{grid.max_new_tokens} positions free, and `questions` is {grid.questions}; lower it"
        )
    return prompts


def prompts_of(grid: GridConfig, target: Target) -> list[list[int]]:
    """The prompts that all drafters answer, from the validation data of the reference cell.

    Prompts that occur in the training data of any cell are left out. `target` needs no weights.
    Raises InputError if no prompt is left.
    """
    tokenizer = load_tokenizer(target.folder)
    load = lambda data, split: batches.load(data, tokenizer, target.config.vocab_size, split)[0]
    validation = load(dict(grid.cells)[grid.reference].data, "validation")
    left = dict.fromkeys(map(tuple, fitting_prompts(validation, target, grid.max_new_tokens)))
    for data in dict.fromkeys(config.data for _, config in grid.cells):
        rows = load(data, "train")
        for prompt in itertools.chain.from_iterable(conversations(rows, range(rows.num_rows))):
            left.pop(prompt, None)
    if not left:
        raise InputError(
            f"no prompt of the validation data leaves max_new_tokens {grid.max_new_tokens} of the "
            f"target's {target.config.max_position_embeddings} positions free, or the training "
            "data has them all; lower it, or give other data"
        )
    return list(map(list, itertools.islice(left, grid.prompts)))


def _counts(session: Session, prompts: list[list[int]], asked: Decoding) -> DecodedCounts:
    """Tokens after the first token, and rounds, per prompt; rounds by tokens committed.

    Prompts of similar lengths are decoded together. `committed` leaves out the last round of each
    answer, which a stop or the limit truncates.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, Result] = {}
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        part += part[:1] * (BATCH - len(part))  # one batch size, so one program per cache size
        drawn = [Sampling(asked.temperature, seed=index) for index in part]
        rows, stops = [prompts[index] for index in part], [] if asked.past_end else None
        found |= zip(part, session.generate(rows, asked.max_new_tokens, stops, drawn), strict=True)
    results = [found[index] for index in range(len(prompts))]
    lengths = [length for each in results for length in each.accept_lengths[:-1]]
    return {
        "tokens": [sum(each.accept_lengths) for each in results],
        "rounds": [each.rounds for each in results],
        "committed": np.bincount(lengths, minlength=session.shape.levels + 1)[1:].tolist(),
    }


# ---- program ------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int | None:
    args = _parser().parse_args(arguments)
    grid = expanded(read_config(args.config, GridConfig))
    target = describe_target(grid.cells[0][1].target)
    mine = chosen_runs(runs_of(grid), args.runs)
    sizes = sizes_of(grid, target)  # raises for a vocabulary that is absent
    rows_of(grid)  # raises for other settings before training starts
    if not args.report:
        if not all(map(is_finished, mine)):
            prompts_of(grid, target)  # raises without prompts before training starts
        cells = [config for _, config in grid.cells]
        if not train(mine, target.config, target_cache.flags_of(args), cells):
            return TRY_AGAIN
        if args.train_only:
            return None
        decode(grid, [row for row in rows_of(grid) if row["run"] in mine and missing(grid, row)])
    rows = rows_of(grid)
    flops = flops_of(grid, target, {row["cell"] for row in rows})
    text = render(grid, rows, target, sizes, flops)
    Path(grid.directory).mkdir(parents=True, exist_ok=True)
    write_whole(Path(grid.directory, "report.md"), text + "\n")
    print(text)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.grid", __doc__)
    add = parser.add_argument
    add("--config", required=True, help="a Python file that defines a GridConfig")
    help_ = "train the runs whose folders match, such as 'moa-*,*-seed0'; default: all"
    add("--runs", type=names, default="", metavar="PATTERNS", help=help_)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--train-only", action="store_true", help="neither decode nor report")
    group.add_argument("--report", action="store_true", help="only report the finished runs")
    target_cache.add_flags(parser)
    return parser


if __name__ == "__main__":
    run(main)
