"""Rows of earlier reports: which count as done, and which are trained again."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from infer.info import ROOT
from moa_jax.config import GridConfig
from moa_jax.files.model_folder import write_json
from tests.model_folders import refusal
from tests.train.test_training import CONVERSATIONS
from tests.train.toy_grids import (
    DEMO,
    TARGET,
    changed,
    decoded_by,
    document_of,
    finish,
    toy_grid,
    with_cell,
)
from train import grid as grids


@pytest.fixture
def earlier(tmp_path) -> tuple[GridConfig, Path, dict]:
    """A grid of which one machine has done seed 0 at two rates: its report."""
    data = tmp_path / "data.jsonl"
    shutil.copy(CONVERSATIONS, data)
    grid = toy_grid(tmp_path)
    cells = ((name, changed(config, data_train=(str(data),))) for name, config in grid.cells)
    grid = dataclasses.replace(grid, cells=tuple(cells))
    runs = grids.runs_of(grid)
    for run, tau, rounds in zip(runs, (1.5, 1.7, 1.8, 1.6), ([], [2, 4], [4, 4], []), strict=True):
        finish(run, tau, **decoded_by(grid, rounds) if rounds else {})
    document = document_of(grid, grids.rows_of(grid), "given.py")
    path = tmp_path / "report.json"
    write_json(path, document)
    return dataclasses.replace(grid, directory=str(tmp_path / "elsewhere")), path, document


def done_for(grid: GridConfig, path: Path) -> list[dict]:
    grids.add_rows(str(path), grid, TARGET)
    return grids.rows_of(grid)


def trained_for(grid: GridConfig, monkeypatch) -> list[str]:
    """The runs that a grid still trains."""
    trained = []

    def distilled(config, flags):
        trained.append(Path(config.run.directory).name)
        Path(config.run.directory).mkdir(parents=True)
        log = Path(config.run.directory, "metrics.jsonl")
        log.write_text('{"step": 2, "simulated_tau": 1.4}\n')
        return True

    monkeypatch.setattr(grids, "distill", distilled)
    assert grids.train(grids.runs_of(grid), TARGET.config)
    return trained


def test_rows_of_an_earlier_report_count_as_done(earlier, monkeypatch):
    grid, path, document = earlier
    grid = dataclasses.replace(grid, seeds=(0, 1))
    grown = document_of(grid, done_for(grid, path), "given.py")
    told = [row | {"report": None} for row in grown["rows"]]
    assert json.loads(json.dumps(told)) == json.loads(json.dumps(document["rows"]))
    assert grown["missing"] == ["moa (seed 1)", "eagle (seed 1)"]
    assert f"| TPU v9 | {path} |" in grids.render(grown)
    assert document["rows"][0]["decoded"][0]["tau"]["tokens/rounds_by_prompt"] == "8/2 8/4"
    assert trained_for(grid, monkeypatch) == [
        f"{cell}-lr{rate}-seed1" for cell in ("moa", "eagle") for rate in ("0.001", "0.0001")
    ]


def test_rates_may_be_added_to_those_of_an_earlier_report(earlier, monkeypatch):
    """The best of all counts; a report whose best rate the grid does not have says nothing."""
    grid, path, _ = earlier
    more = dataclasses.replace(grid, learning_rates=(1e-3, 1e-4, 1e-2))
    moa, *_ = done_for(more, path)
    tried = {"0.001": 1.5, "0.0001": 1.7}
    assert moa["simulated_tau_by_learning_rate"] == tried and moa["report"] == str(path)
    assert trained_for(more, monkeypatch) == ["moa-lr0.01-seed0", "eagle-lr0.01-seed0"]
    finish(grids.runs_of(more)[2], 1.9)
    moa, *_ = grids.rows_of(more)
    assert (moa["learning_rate"], moa["simulated_tau"], moa["report"]) == (1e-2, 1.9, None)
    assert moa["simulated_tau_by_learning_rate"] == tried | {"0.01": 1.9} and not moa["decoded"]
    fewer = dataclasses.replace(grid, learning_rates=(1e-3,), directory=f"{grid.directory}/fewer")
    assert [row["cell"] for row in done_for(fewer, path)] == ["eagle"]


def test_a_run_of_this_grid_stays_what_it_is(earlier):
    grid, path, _ = earlier
    finish(grids.runs_of(grid)[1], 1.4)
    moa, *_ = done_for(grid, path)
    assert moa["simulated_tau_by_learning_rate"] == {"0.001": 1.5, "0.0001": 1.4}


def test_an_earlier_report_of_something_else_is_refused(earlier, tmp_path):
    grid, path, document = earlier
    said = refusal(done_for, with_cell(grid, optim_total_steps=13), path)
    assert said.startswith(f"{path} is of another grid: cell moa: optim.total_steps: 12 -> 13")
    other = dataclasses.replace(grid, prompts=3, max_new_tokens=9, shapes=grid.shapes[:1])
    said = refusal(done_for, other, path)
    assert "prompts: 2 -> 3" in said and "max_new_tokens: 8 -> 9" in said and "shapes: " in said
    shutil.copy(ROOT / "tests" / "data" / "questions.jsonl", tmp_path / "data.jsonl")
    assert "data.jsonl: other content" in refusal(done_for, grid, path)
    (tmp_path / "data.jsonl").unlink()  # a report needs no data
    model = f"{DEMO}: model.safetensors"
    files = document["files"] | {model: document["files"][model] | {"sha256": "0" * 16}}
    write_json(path, document | {"files": files})
    assert f"{model}: other content" in refusal(done_for, grid, path)
    assert not grids.rows_of(grid)  # nothing of a refused report was taken
    write_json(path, document)
    assert len(done_for(grid, path)) == 2


def test_what_is_no_report_is_refused(earlier):
    grid, path, document = earlier
    former = {name: value for name, value in document.items() if name != "prompts_are"}
    for content in ({}, document | {"rows": [1]}, document | {"rows": [{"cell": "moa"}]}, former):
        write_json(path, content)
        assert f"{path} is not a report of this version" in refusal(done_for, grid, path)
    path.write_text('{"rows"')
    assert "report.json is not valid JSON" in refusal(done_for, grid, path)
    path.unlink()
    assert "report.json is missing" in refusal(done_for, grid, path)
