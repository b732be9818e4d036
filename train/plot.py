"""Plots curves of training runs: `python -m train.plot runs/tiny runs/other`.

Plots loss, KL to the target, `simulated_tau`, agreement by future position, learning rate, tokens
per second, model FLOP utilisation and goodput over steps, from metrics.jsonl and speed.jsonl of
every run, and `decoded_tau` for runs that decode prompts. Runs may be unfinished. The picture is
`curves.png` in the first run's folder, or the file of --output.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from infer.bench.drawing import check_plots, save_figure
from infer.cli.program import Parser, local_path, run
from moa_jax.errors import InputError
from moa_jax.files.paths import is_stored, place
from moa_jax.training.metrics import Record, read_records

Points = list[tuple[int, Any]]  # a number, or a list with a number per position


class Curve(NamedTuple):
    """One curve of a panel: a field of one kind of record, over steps."""

    kind: str
    name: str
    style: dict[str, Any]
    label: str  # legend text after the run's name


NOISY = {"alpha": 0.5, "linewidth": 1.0}  # values of single batches
MARKED = {"marker": "o", "markersize": 3.0}
DECODED = {"marker": "x", "linestyle": "--"}
# Title and curves per panel.
PANELS = (
    ("loss", (Curve("train", "loss", NOISY, ""), Curve("eval", "loss", MARKED, "validation"))),
    ("KL", (Curve("train", "kl", NOISY, ""), Curve("eval", "kl", MARKED, "validation"))),
    (
        "tau",
        (
            Curve("eval", "simulated_tau", MARKED, "simulated_tau"),
            Curve("decode", "decoded_tau", DECODED, "decoded_tau"),
        ),
    ),
    ("agreement by position", (Curve("eval", "agreement", MARKED, "position"),)),
    ("learning rate", (Curve("train", "learning_rate", {}, ""),)),
    ("tokens/s", (Curve("speed", "tokens_per_s", MARKED, ""),)),
    ("model FLOP utilisation", (Curve("speed", "mfu", MARKED, ""),)),
    ("goodput", (Curve("speed", "goodput", MARKED, ""),)),
)


def points(records: list[Record], kind: str, name: str) -> Points:
    """(step, value) of all records of a kind with a finite value of the field `name`."""
    found = [(r["step"], r.get(name)) for r in records if r["kind"] == kind]
    return [(step, value) for step, value in found if value is not None]


def draw(runs: dict[str, list[Record]], path: Path) -> None:
    """Plots `runs` (records by run name) to `path`: one panel per figure, one colour per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(20, 6.5), layout="constrained")
    panels = figure.subplots(2, 4).flat
    for panel, (title, curves) in zip(panels, PANELS, strict=True):
        for index, (run_name, records) in enumerate(runs.items()):
            for curve in curves:
                if found := points(records, curve.kind, curve.name):
                    label = ", ".join(filter(None, (run_name, curve.label)))
                    plot_curve(panel, found, label, {"color": f"C{index}", **curve.style})
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.set_visible(bool(panel.lines))
        if panel.lines:
            panel.legend(fontsize=7)
    save_figure(figure, path)


def plot_curve(panel: Any, found: Points, label: str, style: dict[str, Any]) -> None:
    """Plots one line, or for values that are lists a line per position, the later the paler."""
    steps, values = zip(*found, strict=True)
    if not isinstance(values[0], list):
        panel.plot(steps, values, label=label, **style)
        return
    for index, column in enumerate(zip(*values, strict=True)):
        alpha = 1 - 0.8 * index / len(values[0])
        panel.plot(steps, column, label=f"{label} {index + 1}", **style | {"alpha": alpha})


def plot(args: argparse.Namespace) -> None:
    """Reads the records of the runs and plots them."""
    runs: dict[str, list[Record]] = {}
    for folder in map(place, args.runs):
        files = [folder / f"{name}.jsonl" for name in ("metrics", "speed")]
        runs[str(folder)] = [record for file in files for record in read_records(file)]
        if not runs[str(folder)]:
            raise InputError(f"{folder}: has no metrics.jsonl of a run; name a run.directory")
    output = args.output or _beside(place(args.runs[0]))
    check_plots(output, "--output")
    draw(runs, output)
    print(output)


def _beside(folder: Path) -> Path:
    if is_stored(folder):
        raise InputError(f"{folder} is a store; give --output, a picture to write")
    return folder / "curves.png"


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run.directory of a run")
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="FILE",
        help="a picture: .png, .svg or .pdf; default: curves.png in the first run's folder",
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    plot(_parser().parse_args(arguments))


if __name__ == "__main__":
    run(main)
