"""Drafters trained alike and compared: `python -m train.grid --config configs/matched.py`.

Each cell of the grid is a run of train.distill, so the same command goes on where it was cut, and
cells, learning rates and seeds may be added later; what is finished is not done again. With
`--cells a,b` and `--learning-rates 1e-4` several processes can share the work. The report (Markdown
and JSON in the grid's directory) has what is there so far: tau of greedy decoding on held-out
prompts, with the target's own stops, and where every answer goes on to the limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from infer.cli import Parser, names, run
from infer.config_file import read_config
from moa_jax.config import DistillConfig, DraftShape, GridConfig
from moa_jax.data import batches
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.errors import InputError, first_line
from moa_jax.fingerprint import fingerprint
from moa_jax.folders import write_json, write_whole
from moa_jax.metrics import read_records
from moa_jax.pretrained import Target, describe_target, load_drafter, load_target
from moa_jax.session import Session
from moa_jax.tokenizer import load_tokenizer
from train.decoding import prompts_of
from train.distill import distill, with_vocabulary

BATCH = 16  # prompts decoded side by side; tau is that of each alone
DECODED = "decoded.json"


class Run(NamedTuple):
    """One training run of the grid."""

    cell: str
    learning_rate: float
    seed: int
    config: DistillConfig


def runs_of(grid: GridConfig) -> list[Run]:
    """All runs, the learning rates of a cell and seed one after the other."""
    return [
        _run(grid, name, config, rate, seed)
        for seed, (name, config) in itertools.product(grid.seeds, grid.cells)
        for rate in grid.learning_rates or (config.optim.learning_rate,)
    ]


def chosen_runs(runs: Sequence[Run], cells: Sequence[str], rates: Sequence[float]) -> list[Run]:
    """Those of the named cells and rates, nothing named being all, in the order of the names.

    Raises InputError for a cell or rate that no run has.
    """
    wanted = {f"{rate:g}" for rate in rates}  # as in folder names: 2e-4 is 0.0002
    for flag, asked, known in (
        ("cells", set(cells), {each.cell for each in runs}),
        ("learning-rates", wanted, {f"{each.learning_rate:g}" for each in runs}),
    ):
        if unknown := sorted(asked - known):
            raise InputError(
                f"--{flag}: the grid has no {', '.join(unknown)}, but {', '.join(sorted(known))}"
            )
    place = {name: index for index, name in enumerate(cells)}
    kept = [each for each in runs if not wanted or f"{each.learning_rate:g}" in wanted]
    kept = [each for each in kept if not cells or each.cell in place]
    return sorted(kept, key=lambda each: place.get(each.cell, 0))


def _run(grid: GridConfig, cell: str, config: DistillConfig, rate: float, seed: int) -> Run:
    folder = f"{grid.directory}/{cell}-lr{rate:g}-seed{seed}"
    config = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, learning_rate=rate),
        run=dataclasses.replace(config.run, directory=folder, seed=seed),
        output=f"{folder}/drafter",
    )
    return Run(cell, rate, seed, config)


def check_sizes(grid: GridConfig, target: Target) -> dict[str, int]:
    """Trainable parameters of each cell; InputError for one that is not matched."""
    sizes = {name: _num_trained(config, target) for name, config in grid.cells}
    wanted = sizes[grid.reference]
    for name, size in sizes.items():
        if name not in grid.unmatched and abs(size / wanted - 1) > grid.tolerance:
            raise InputError(
                f"cell {name} trains {size} parameters and {grid.reference} {wanted}, more than "
                f"{grid.tolerance:.0%} apart: change its sizes or name it in `unmatched`"
            )
    return sizes


def _num_trained(config: DistillConfig, target: Target) -> int:
    drafter = with_vocabulary(config, target).drafter
    functions = DRAFTERS[method_of(drafter)].make(drafter, target.config)
    shapes = jax.eval_shape(functions.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


# ---- training and decoding ----------------------------------------------------------------


def train(runs: Sequence[Run]) -> bool:
    """Trains what is not finished, one run after the other; False where told to stop."""
    for each in runs:
        if not _is_trained(each):
            print(f"{each.config.run.directory}: training", file=sys.stderr)
            if not distill(each.config):
                return False
            jax.clear_caches()  # or the programs of all cells pile up
    return True


def _is_trained(each: Run) -> bool:
    return (Path(each.config.output) / "config.json").is_file()


def decode(grid: GridConfig, best: Sequence[Run]) -> None:
    """Real tau of the chosen runs that were not decoded yet."""
    todo = [each for each in best if not _decoded(grid, each)]
    if not todo:
        return
    target = load_target(grid.cells[0][1].target)
    prompts = _prompts(grid, target)
    for each in todo:
        drafter = load_drafter(each.config.output, target)
        found = {"prompts": len(prompts), "settings": _settings(grid, each), "shapes": []}
        for shape in grid.shapes:
            session = Session(target, drafter, shape)
            taus = {
                key: _tau(session, prompts, grid.max_new_tokens, stops)
                for key, stops in (("tau", None), ("tau_past_end", []))
            }
            found["shapes"].append({"shape": _name_of(shape)} | taus)
        write_json(Path(each.config.run.directory) / DECODED, found)
        jax.clear_caches()


def _prompts(grid: GridConfig, target: Target) -> list[list[int]]:
    config = grid.cells[0][1].data
    tokenizer = load_tokenizer(target.folder)
    validation, _ = batches.load(config, tokenizer, target.config.vocab_size, "validation", None)
    room = target.config.max_position_embeddings - grid.max_new_tokens
    fitting = (prompt for prompt in prompts_of(validation) if len(prompt) <= room)
    return list(itertools.islice(fitting, grid.prompts))


def _tau(
    session: Session, prompts: list[list[int]], max_new_tokens: int, stops: list[int] | None
) -> float:
    """Tokens per verification over all rounds of all prompts."""
    committed = rounds = 0
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        filled = part + part[:1] * (BATCH - len(part))  # one program for all
        for result in session.generate(filled, max_new_tokens, stops)[: len(part)]:
            committed += sum(result.accept_lengths)
            rounds += result.rounds
    return committed / max(rounds, 1)


def _settings(grid: GridConfig, each: Run) -> dict[str, Any]:
    """What a decoding depends on beside the drafter's run."""
    return {
        "run": fingerprint(each.config),
        "shapes": [_name_of(shape) for shape in grid.shapes],
        "prompts": grid.prompts,
        "max_new_tokens": grid.max_new_tokens,
    }


def _decoded(grid: GridConfig, each: Run) -> dict[str, Any] | None:
    path = Path(each.config.run.directory) / DECODED
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if found["settings"] == _settings(grid, each) else None


def _name_of(shape: DraftShape) -> str:
    if shape.is_chain:
        return f"chain {shape.depth}"
    return f"tree {shape.depth}/{shape.breadth}/{shape.num_drafted}"


# ---- report -------------------------------------------------------------------------------


class Row(NamedTuple):
    """What is known of one cell and seed; of several learning rates the best."""

    best: Run
    simulated_tau: float
    tried: dict[str, float]  # simulated tau by learning rate
    decoded: dict[str, Any] | None


def rows_of(grid: GridConfig, runs: Sequence[Run]) -> list[Row]:
    """One row a cell and seed of which at least one run is finished."""
    found = []
    key = lambda each: (each.cell, each.seed)  # noqa: E731
    for _, group in itertools.groupby(runs, key):
        rated = [(_simulated_tau(each), each) for each in group if _is_trained(each)]
        if rated:
            tau, best = max(rated, key=lambda pair: pair[0])
            tried = {f"{each.learning_rate:g}": tau for tau, each in rated}
            found.append(Row(best, tau, tried, _decoded(grid, best)))
    return found


def _simulated_tau(each: Run) -> float:
    """That of the run's last evaluation."""
    records = read_records(Path(each.config.run.directory) / "metrics.jsonl")
    return [record for record in records if "simulated_tau" in record][-1]["simulated_tau"]


def report(grid: GridConfig, rows: Sequence[Row], sizes: dict[str, int]) -> str:
    """The table in Markdown; what is missing of the grid is said below it."""
    shapes = [_name_of(shape) for shape in grid.shapes]
    columns = ["cell", "seed", "parameters", "learning rate", "simulated tau"]
    for shape in shapes:
        columns += [f"tau, {shape}", "of reference", "past end", "of reference"]
    base = {row.best.seed: row for row in rows if row.best.cell == grid.reference}
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join(["---"] * len(columns)) + " |"]
    for row in rows:
        cells = [row.best.cell, row.best.seed, f"{sizes[row.best.cell]:,}"]
        cells += [f"{row.best.learning_rate:g}", f"{row.simulated_tau:.2f}"]
        cells += _taus(row, base.get(row.best.seed), len(shapes))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    there = {(row.best.cell, row.best.seed) for row in rows}
    wanted = itertools.product((name for name, _ in grid.cells), grid.seeds)
    missing = [f"{cell} (seed {seed})" for cell, seed in wanted if (cell, seed) not in there]
    if missing:
        lines += ["", f"Not trained yet: {', '.join(missing)}."]
    return "\n".join(lines)


def _taus(row: Row, base: Row | None, count: int) -> Iterator[str]:
    for index in range(count):
        for key in ("tau", "tau_past_end"):
            if row.decoded is None:
                yield from ("", "")
                continue
            tau = row.decoded["shapes"][index][key]
            yield f"{tau:.2f}"
            known = base and base.decoded
            yield f"{tau / base.decoded['shapes'][index][key]:.2f}" if known else ""


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    grid = read_config(args.config, GridConfig)
    sizes = check_sizes(grid, describe_target(grid.cells[0][1].target))
    runs = runs_of(grid)
    mine = chosen_runs(runs, names(args.cells), _rates(args.learning_rates))
    if not args.report:
        if not train(mine):
            return
        cells = {each.cell for each in mine}
        decode(grid, [row.best for row in rows_of(grid, runs) if row.best.cell in cells])
    rows = rows_of(grid, runs)
    table = report(grid, rows, sizes)
    Path(grid.directory).mkdir(parents=True, exist_ok=True)
    write_whole(Path(grid.directory, "report.md"), table + "\n")
    write_json(Path(grid.directory, "report.json"), {"rows": [_json(row) for row in rows]})
    print(table)


def _json(row: Row) -> dict[str, Any]:
    shapes = row.decoded and row.decoded["shapes"]
    return {
        "cell": row.best.cell,
        "seed": row.best.seed,
        "learning_rate": row.best.learning_rate,
        "simulated_tau": row.simulated_tau,
        "simulated_tau_by_learning_rate": row.tried,
        "shapes": shapes,
    }


def _rates(text: str) -> list[float]:
    try:
        return [float(name) for name in names(text)]
    except ValueError as error:
        raise InputError(
            f"--learning-rates {text}: {first_line(error)}: give numbers with commas between them"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.grid", __doc__)
    parser.add_argument("--config", required=True, help="a Python file that defines a GridConfig")
    parser.add_argument("--cells", default="", help="names with commas; default: all")
    parser.add_argument("--learning-rates", default="", help="with commas; default: all")
    parser.add_argument("--report", action="store_true", help="only say what is there")
    return parser


if __name__ == "__main__":
    run(main)
