"""The report of a grid: intervals, means of seeds, what it says of itself."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from infer.info import ROOT
from moa_jax.files.folders import write_json
from moa_jax.training.fingerprint import fingerprint
from tests.train.test_training import CONVERSATIONS
from tests.train.toy_grids import (
    DEMO,
    TARGET,
    changed,
    decoded_by,
    document_of,
    finish,
    toy_grid,
)
from train import grid as grids
from train.run.grid_report import (
    DRAWS,
    Tau,
    figures,
    interval,
    interval_over_seeds,
    render,
    tau_of,
)


@pytest.mark.parametrize(
    "name",
    ["matched", "matched_300", "matched_longer"]
    + ["controls", "controls_1000", "controls_tokens", "controls_rates"],
)
def test_committed_reports_are_those_of_their_json(name):
    """But for the order of files and versions, which the sorted JSON does not keep."""
    document = json.loads((ROOT / "reports" / f"{name}.json").read_text())
    shown = (ROOT / "reports" / f"{name}.md").read_text()
    *lines, versions = render(document).splitlines()
    *committed, last = shown.splitlines()
    assert sorted(lines) == sorted(committed)
    assert set(re.split("[ .,]+", versions)) == set(re.split("[ .,]+", last))


def test_intervals_are_those_of_drawn_prompts():
    tokens_P, rounds_P = np.array([10, 20, 30, 40]), np.array([10, 5, 15, 10])
    tau = Tau(100 / 40, tokens_P, rounds_P)
    chance, found = np.random.default_rng(5), []
    for _ in range(4000):
        drawn = chance.choice(4, 4)
        found.append(tokens_P[drawn].sum() / rounds_P[drawn].sum())
    expected = np.quantile(found, [0.05, 0.95])
    np.testing.assert_allclose(interval(tau), expected, rtol=0.06)
    assert interval(tau) == interval(tau) and DRAWS == 1000
    same = Tau(2.5, np.array([9, 9, 9]), np.array([3, 3, 3]))
    assert interval(same) == (3.0, 3.0)


def test_intervals_of_ratios_draw_the_same_prompts():
    tokens_P, rounds_P = np.array([10, 20, 30, 40]), np.array([10, 5, 15, 10])
    slow, fast = Tau(1.25, tokens_P, 2 * rounds_P), Tau(2.5, tokens_P, rounds_P)
    assert interval(fast, slow) == (2.0, 2.0)
    assert np.diff(interval(fast))[0] > 1
    assert interval(Tau(2.5)) is interval(fast, Tau(2.5)) is interval(Tau(2.5), fast) is None


def test_means_of_seeds_draw_the_seeds_as_well():
    tokens_P, rounds_P = np.array([20, 20]), np.array([10, 10])
    slow, fast = Tau(1.0, tokens_P, 2 * rounds_P), Tau(2.0, tokens_P, rounds_P)
    assert interval_over_seeds([slow, fast]) == (1.0, 2.0)
    assert interval_over_seeds([slow, fast], [slow, fast]) == (0.5, 2.0)
    assert interval_over_seeds([fast, fast], [slow, slow]) == (2.0, 2.0)
    assert interval_over_seeds([slow, Tau(2.0)]) is None


def test_the_report_has_the_means_of_seeds(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=(), seeds=(0, 1))
    runs = grids.runs_of(grid)
    for run, rounds in zip(runs, ([2, 2], [4, 4], [4, 4], [4, 4]), strict=True):
        finish(run, 1.5)
        write_json(Path(run.config.run.directory) / "decoded.json", decoded_by(grid, run, rounds))
    document = document_of(grid, grids.rows_of(grid, runs, TARGET), "given.py")
    text = grids.render(json.loads(json.dumps(document)))
    mean = "3.00 (2.00 to 4.00) | 1.50 (1.00 to 2.00)"
    assert text.count(f"\n| moa | 0, 1 | {mean} | {mean} |\n") == 2
    mean = "2.00 (2.00 to 2.00) | 1.00"
    assert text.count(f"\n| eagle | 0, 1 | {mean} | {mean} |\n") == 2


def test_the_report_tells_what_the_first_positions_accept(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=())
    runs = grids.runs_of(grid)
    for run in runs:
        finish(run, 1.5)
    found = decoded_by(grid, runs[0], [2, 4])
    counts = found["shapes"][0]["counts"]
    counts["tau"] = counts["tau"] | {"reached": [4, 2, 0], "accepted": [2, 1, 0]}
    write_json(Path(runs[0].config.run.directory) / "decoded.json", found)
    rows = grids.rows_of(grid, runs, TARGET)
    document = json.loads(json.dumps(document_of(grid, rows, "given.py")))
    assert "\n| moa | 0 | 0.50 0.50 - |  | " in grids.render(document)
    told = document["rows"][0]["decoded"][0]["tau"]
    assert told["accepted/reached_by_position"] == "2/4 1/2 0/0"
    assert figures(tau_of(told), None) == figures(rows[0].decoded.taus[0]["tau"], None)


def test_the_report_says_what_its_figures_rest_on(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=())
    cells = ((name, changed(config, optim_accumulate=2)) for name, config in grid.cells)
    grid = dataclasses.replace(grid, cells=tuple(cells))  # parts are not more rows
    runs = grids.runs_of(grid)
    for run, rounds in zip(runs, ([2, 4], [4, 4]), strict=True):
        finish(run, 1.5)
        write_json(Path(run.config.run.directory) / "decoded.json", decoded_by(grid, run, rounds))
    given = tmp_path / "given.py"
    given.write_text("config = ...\n")
    document = document_of(grid, grids.rows_of(grid, runs, TARGET), str(given))
    text = grids.render(json.loads(json.dumps(document)))
    moa = "2.67 (2.0 to 4.0) | 16 / 6 | 1.33 (1.00 to 2.00)"
    eagle = "2.00 (2.0 to 2.0) | 16 / 8 | 1.00"
    assert text.count(f"\n| moa | 0 | {moa} | {moa} |\n") == 2  # a chain and a tree
    assert text.count(f"\n| eagle | 0 | {eagle} | {eagle} |\n") == 2
    assert "gets 12 updates of 4 rows of 64 tokens" in text and "all rounds of 2 held-out" in text
    assert f"    python -m train.grid --config {given}\n" in text
    files = document["files"]
    assert {str(given), CONVERSATIONS, f"{DEMO}: model.safetensors"} <= set(files)
    assert files[str(given)]["bytes"] == 13 and f"| {files[str(given)]['sha256']} |" in text
    assert document["target"]["vocab_size"] == 2048
    assert {"jax", "python"} <= set(document["versions"])
    assert document["rows"][0]["settings"] == fingerprint(runs[0].config)


def test_counts_that_were_not_stored_are_a_dash(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=())
    runs = grids.runs_of(grid)
    for run, rounds in zip(runs, (None, [4, 4]), strict=True):
        finish(run, 1.5)
        write_json(Path(run.config.run.directory) / "decoded.json", decoded_by(grid, run, rounds))
    rows = grids.rows_of(grid, runs, TARGET)
    text = grids.render(document_of(grid, rows, "given.py"))
    assert "\n| moa | 0 | 2.00 | - | 1.00 | 2.00 | - | 1.00 |\n" in text
