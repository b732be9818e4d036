"""Grids of drafters: matched sizes, what is finished stays, the report."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import dataclasses
import json
from pathlib import Path

import pytest

from moa_jax.config import DraftShape, Eagle3Config, EagleConfig, GridConfig, MoaConfig
from moa_jax.errors import InputError
from moa_jax.folders import write_json
from moa_jax.pretrained import describe_target
from tests.model_folders import refusal
from tests.test_training import distill_config, small_target  # noqa: F401
from train import grid as grids

MOA = MoaConfig(1, 24, 1, 24, 1, 16)


DEMO = Path("moa_jax/demo/target").absolute()


def toy_grid(folder, target=DEMO, **changes) -> GridConfig:
    base = distill_config(folder, target)
    cells = (
        ("moa", dataclasses.replace(base, drafter=MOA)),
        ("eagle", dataclasses.replace(base, drafter=EagleConfig(1, 24))),
    )
    settings = dict(
        learning_rates=(1e-3, 1e-4),
        directory=str(folder / "grid"),
        reference="eagle",
        tolerance=0.5,
        shapes=(DraftShape(3), DraftShape(3, 2, 4)),
        prompts=2,
        max_new_tokens=8,
    )
    return GridConfig(cells, **settings | changes)


def finish(run: grids.Run, tau: float) -> None:
    """What a finished run leaves, as far as the report reads it."""
    folder = Path(run.config.run.directory)
    Path(run.config.output).mkdir(parents=True)
    write_json(Path(run.config.output) / "config.json", {})
    record = {"step": 2, "kind": "eval", "simulated_tau": tau}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")


def test_every_rate_and_seed_has_a_run_of_its_own(tmp_path):
    grid = toy_grid(tmp_path, seeds=(0, 1))
    runs = grids.runs_of(grid)
    assert len({run.config.run.directory for run in runs}) == len(runs) == 8
    assert {run.config.run.seed for run in runs} == {0, 1}
    some = grids.chosen_runs(runs, ["eagle"], [1e-3])
    assert [(run.cell, run.learning_rate, run.seed) for run in some] == [
        ("eagle", 1e-3, 0),
        ("eagle", 1e-3, 1),
    ]
    assert "no walrus" in refusal(grids.chosen_runs, runs, ["walrus"], [])


def test_rates_are_numbers_however_they_are_written(tmp_path, monkeypatch):
    grid, trained = toy_grid(tmp_path), []
    monkeypatch.setattr(grids, "read_config", lambda path, kind: grid)
    monkeypatch.setattr(grids, "train", lambda runs: trained.extend(runs))
    asked = lambda rates: grids.main(["--config", "given", "--learning-rates", rates])  # noqa: E731
    for text in ("1e-4", "0.0001", "1.0e-04"):
        trained.clear()
        asked(text)
        assert [(run.cell, run.learning_rate) for run in trained] == [
            ("moa", 1e-4),
            ("eagle", 1e-4),
        ]
    assert "grid has no 0.0002, but 0.0001, 0.001" in refusal(asked, "2e-4")
    assert "--learning-rates 1e-4,fast: " in refusal(asked, "1e-4,fast")


def test_without_rates_each_cell_keeps_its_own(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=())
    (name, config), other = grid.cells
    fast = dataclasses.replace(config.optim, learning_rate=5e-3)
    cells = ((name, dataclasses.replace(config, optim=fast)), other)
    runs = grids.runs_of(dataclasses.replace(grid, cells=cells))
    assert [(run.cell, run.learning_rate) for run in runs] == [("moa", 5e-3), ("eagle", 1e-3)]
    assert [run.config.optim.learning_rate for run in runs] == [5e-3, 1e-3]
    assert runs[0].config.run.directory.endswith("/moa-lr0.005-seed0")


def test_sizes_must_match(tmp_path):
    grid = toy_grid(tmp_path)
    target = describe_target(grid.cells[0][1].target)
    sizes = grids.check_sizes(grid, target)
    assert set(sizes) == {"moa", "eagle"}
    strict = dataclasses.replace(grid, tolerance=0.0)
    assert "parameters" in refusal(grids.check_sizes, strict, target)
    grids.check_sizes(dataclasses.replace(strict, unmatched=("moa",)), target)


def test_the_best_rate_is_reported_and_what_is_missing(tmp_path):
    grid = toy_grid(tmp_path)
    runs = grids.runs_of(grid)
    for run, tau in zip(runs[:2], (1.5, 1.7), strict=True):
        finish(run, tau)
    rows = grids.rows_of(grid, runs)
    assert [(row.best.learning_rate, row.simulated_tau) for row in rows] == [(1e-4, 1.7)]
    table = grids.report(grid, rows, {"moa": 10, "eagle": 10})
    assert "| moa | 0 | 10 | 0.0001 | 1.70 |" in table
    assert "Not trained yet: eagle (seed 0)." in table


def test_a_config_that_cannot_be_compared(tmp_path):
    with pytest.raises(InputError, match="no cell"):
        toy_grid(tmp_path, reference="walrus")
    with pytest.raises(InputError, match="one seed"):
        toy_grid(tmp_path, seeds=())


@pytest.mark.slow
def test_a_grid_from_end_to_end_and_again(small_target, tmp_path, capsys, monkeypatch):
    """Two cells trained and decoded; a second call computes nothing."""
    base = distill_config(tmp_path, small_target)
    eagle3 = dataclasses.replace(base, drafter=Eagle3Config(1, 24, tapped_layers=(0, 1, 1)))
    cells = (("moa", dataclasses.replace(base, drafter=MOA)), ("eagle3", eagle3))
    grid = toy_grid(tmp_path, learning_rates=(1e-3,))
    grid = dataclasses.replace(grid, cells=cells, reference="moa", tolerance=2.0)
    monkeypatch.setattr(grids, "read_config", lambda path, kind: grid)
    grids.main(["--config", "given"])
    table = capsys.readouterr().out
    assert table.count("\n| ") == 3 and "1.00" in table
    monkeypatch.setattr(grids, "distill", None)
    monkeypatch.setattr(grids, "load_target", None)
    grids.main(["--config", "given"])
    assert capsys.readouterr().out.endswith(table[-40:])
