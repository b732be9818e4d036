"""The report of a grid: intervals, means of seeds, what it says of itself."""

import dataclasses
import json

import numpy as np
import pytest

from infer.info import ROOT
from moa_jax.training.fingerprint import fingerprint
from tests.train.test_training import CONVERSATIONS
from tests.train.toy_grids import (
    DEMO,
    changed,
    decoded_by,
    document_of,
    finish,
    toy_grid,
)
from train import grid as grids
from train.run.grid_decoding import joined
from train.run.grid_report import DRAWS, figures, render


@pytest.mark.parametrize("name", ["matched"])
def test_committed_reports_are_those_of_their_json(name):
    document = json.loads((ROOT / "reports" / f"{name}.json").read_text())
    assert (ROOT / "reports" / f"{name}.md").read_text() == render(document) + "\n"


def counted(tokens: list[int], rounds: list[int]) -> dict[str, str]:
    return {"tokens/rounds_by_prompt": joined(tokens, rounds)}


def interval(*seeds: dict, bases: tuple = ()) -> tuple[float, float]:
    return figures(seeds, bases)["of_reference_interval" if bases else "interval"]


def test_intervals_are_those_of_drawn_prompts():
    tokens_P, rounds_P = np.array([10, 20, 30, 40]), np.array([10, 5, 15, 10])
    tau = counted(tokens_P, rounds_P)
    chance, found = np.random.default_rng(5), []
    for _ in range(4000):
        drawn = chance.choice(4, 4)
        found.append(tokens_P[drawn].sum() / rounds_P[drawn].sum())
    expected = np.quantile(found, [0.05, 0.95])
    np.testing.assert_allclose(interval(tau), expected, rtol=0.06)
    assert interval(tau) == interval(tau) and DRAWS == 1000
    assert figures([tau], [])["tau"] == 2.5
    same = counted([9, 9, 9], [3, 3, 3])
    assert interval(same) == (3.0, 3.0)


def test_intervals_of_ratios_draw_the_same_prompts():
    tokens_P, rounds_P = np.array([10, 20, 30, 40]), np.array([10, 5, 15, 10])
    slow, fast = counted(tokens_P, 2 * rounds_P), counted(tokens_P, rounds_P)
    assert interval(fast, bases=(slow,)) == (2.0, 2.0)
    assert np.diff(interval(fast))[0] > 1


def test_means_of_seeds_draw_the_seeds_as_well():
    slow, fast = counted([20, 20], [20, 20]), counted([20, 20], [10, 10])
    assert interval(slow, fast) == (1.0, 2.0)
    assert interval(slow, fast, bases=(fast, slow)) == (0.5, 2.0)
    assert interval(fast, fast, bases=(slow, slow)) == (2.0, 2.0)


def test_the_report_has_the_means_of_seeds(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=(), seeds=(0, 1))
    for run, rounds in zip(grids.runs_of(grid), ([2, 2], [4, 4], [4, 4], [4, 4]), strict=True):
        finish(run, 1.5, **decoded_by(grid, rounds))
    document = document_of(grid, grids.rows_of(grid), "given.py")
    text = grids.render(json.loads(json.dumps(document)))
    mean = "3.00 (2.00 to 4.00) | 1.50 (1.00 to 2.00) | "
    assert text.count(f"\n| moa | 0, 1 | {mean} | {mean} |\n") == 2
    mean = "2.00 (2.00 to 2.00) | 1.00 | "
    assert text.count(f"\n| eagle | 0, 1 | {mean} | {mean} |\n") == 2


def test_the_report_tells_what_the_first_positions_accept(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=())
    for run in grids.runs_of(grid):
        finish(run, 1.5, **decoded_by(grid, [2, 4], "2/4 1/2 0/0"))
    document = document_of(grid, grids.rows_of(grid), "given.py")
    assert "| 0.50 0.50 - | " in grids.render(json.loads(json.dumps(document)))
    told = document["rows"][0]["decoded"][0]["tau"]
    assert told["accepted/reached_by_position"] == "2/4 1/2 0/0"


def test_the_report_says_what_its_figures_rest_on(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=())
    cells = ((name, changed(config, optim_accumulate=2)) for name, config in grid.cells)
    grid = dataclasses.replace(grid, cells=tuple(cells))  # parts are not more rows
    runs = grids.runs_of(grid)
    for run, rounds in zip(runs, ([2, 4], [4, 4]), strict=True):
        finish(run, 1.5, **decoded_by(grid, rounds))
    given = tmp_path / "given.py"
    given.write_text("config = ...\n")
    document = document_of(grid, grids.rows_of(grid), str(given))
    text = grids.render(json.loads(json.dumps(document)))
    moa = "2.67 (2.00 to 4.00) | 1.33 (1.00 to 2.00) | "
    eagle = "2.00 (2.00 to 2.00) | 1.00 | "
    assert text.count(f"\n| moa | 0 | {moa} | {moa} |\n") == 2  # a chain and a tree
    assert text.count(f"\n| eagle | 0 | {eagle} | {eagle} |\n") == 2
    told = document["rows"][0]["decoded"][0]["tau"]
    assert (told["tokens"], told["rounds"]) == (16, 6)
    assert "12 updates of 4 rows of 64 tokens" in text and "all rounds of up to 2 held-out" in text
    assert f"    python -m train.grid --config {given}\n" in text
    files = document["files"]
    assert {str(given), CONVERSATIONS, f"{DEMO}: model.safetensors"} <= set(files)
    assert files[str(given)]["bytes"] == 13 and f"| {files[str(given)]['sha256']} |" in text
    assert "jax" in document["versions"]
    assert document["rows"][0]["settings"] == fingerprint(runs[0].config)
