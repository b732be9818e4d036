"""Rows of earlier reports: which count as done, and which are trained again."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from infer.flags.config_file import read_config
from infer.info import ROOT
from moa_jax.config import DraftShape, GridConfig
from moa_jax.files.folders import write_json
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
from train.run import grid_decoding
from train.run.grid_report import (
    FORMER_PROMPTS,
)


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
        finish(run, tau)
        if rounds:
            decoded = Path(run.config.run.directory) / "decoded.json"
            write_json(decoded, decoded_by(grid, run, rounds))
    document = document_of(grid, grids.rows_of(grid, runs, TARGET), "given.py")
    path = tmp_path / "report.json"
    write_json(path, document)
    return dataclasses.replace(grid, directory=str(tmp_path / "elsewhere")), path, document


def done_for(grid: GridConfig, path: Path) -> list:
    return grids._earlier_rows([str(path)], grid, grids.runs_of(grid), TARGET)


def trained_for(grid: GridConfig, rows: list, monkeypatch) -> list[str]:
    """The runs that a grid still trains."""
    trained = []
    monkeypatch.setattr(grids, "distill", lambda config, flags: trained.append(config) or True)
    monkeypatch.setattr(grids, "write_json", lambda *given: None)
    assert grids.train(grids.runs_of(grid), TARGET, rows)
    return [Path(config.run.directory).name for config in trained]


def test_rows_of_an_earlier_report_count_as_done(earlier, monkeypatch):
    grid, path, document = earlier
    grid = dataclasses.replace(grid, seeds=(0, 1))
    done = done_for(grid, path)
    assert trained_for(grid, done, monkeypatch) == [
        f"{cell}-lr{rate}-seed1" for cell in ("moa", "eagle") for rate in ("0.001", "0.0001")
    ]
    rows = grids.rows_of(grid, grids.runs_of(grid), TARGET, done)
    grown = document_of(grid, rows, "given.py")
    told = [row | {"report": None} for row in grown["rows"]]
    assert json.loads(json.dumps(told)) == json.loads(json.dumps(document["rows"]))
    assert grown["missing"] == ["moa (seed 1)", "eagle (seed 1)"]
    assert str(path) in grown["files"]
    assert grown["command"] == f"python -m train.grid --config given.py --done {path}"
    text = grids.render(grown)
    assert f"Trained and decoded earlier, for {path}: moa (seed 0), eagle (seed 0)." in text
    assert document["rows"][0]["decoded"][0]["tau"]["tokens/rounds_by_prompt"] == "8/2 8/4"


def test_rates_may_be_added_to_those_of_an_earlier_report(earlier, monkeypatch):
    """The best of all counts; a report whose best rate the grid does not have says nothing."""
    grid, path, _ = earlier
    more = dataclasses.replace(grid, learning_rates=(1e-3, 1e-4, 1e-2))
    done = done_for(more, path)
    assert trained_for(more, done, monkeypatch) == ["moa-lr0.01-seed0", "eagle-lr0.01-seed0"]
    moa, *_ = grids.rows_of(more, grids.runs_of(more), TARGET, done)
    assert moa.tried == {"0.001": 1.5, "0.0001": 1.7} and moa.report == str(path)
    finish(grids.runs_of(more)[2], 1.9)
    moa, *_ = grids.rows_of(more, grids.runs_of(more), TARGET, done)
    assert (moa.best.learning_rate, moa.simulated_tau, moa.report) == (1e-2, 1.9, None)
    assert moa.tried == {"0.001": 1.5, "0.0001": 1.7, "0.01": 1.9} and moa.decoded is None
    fewer = dataclasses.replace(grid, learning_rates=(1e-3,))
    assert [row.cell for row in done_for(fewer, path)] == ["eagle"]


def test_a_drafter_that_is_not_here_counts_only_where_it_was_decoded(earlier):
    """The best rate trained again here, and worse: the report's next rate has no tau of its own."""
    grid, path, _ = earlier
    finish(grids.runs_of(grid)[1], 1.4)
    moa, *_ = grids.rows_of(grid, grids.runs_of(grid), TARGET, done_for(grid, path))
    assert (moa.best.learning_rate, moa.simulated_tau, moa.report) == (1e-4, 1.4, None)


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
    assert len(done_for(grid, path)) == 2
    model = f"{DEMO}: model.safetensors"
    files = document["files"] | {model: document["files"][model] | {"sha256": "0" * 16}}
    write_json(path, document | {"files": files})
    assert f"{model}: other content" in refusal(done_for, grid, path)


def test_trees_of_one_name_are_told_apart(earlier):
    """Files of earlier versions do not tell, and count."""
    grid, path, document = earlier
    trees = [DraftShape.static(paths) for paths in ([[0], [1], [0, 0]], [[0], [0, 0], [0, 1]])]
    one, other = (dataclasses.replace(grid, shapes=(tree,)) for tree in trees)
    run, how = grids.runs_of(one)[0], grid_decoding.decoding_of(one)
    assert how["shapes"] == grid_decoding.decoding_of(other)["shapes"]
    finish(run, 1.5)
    decoded, file = decoded_by(one, run, [2, 4]), Path(run.config.run.directory) / "decoded.json"
    write_json(file, decoded)
    write_json(path, document | how)
    assert grid_decoding.decoded_of(one, run) and done_for(one, path)
    assert grid_decoding.decoded_of(other, run) is None
    assert "shapes_in_full: " in refusal(done_for, other, path)
    del decoded["settings"]["shapes_in_full"], decoded["settings"]["run"]["drafter.kind"]
    del document["shapes_in_full"]
    write_json(file, decoded)
    write_json(path, document | {"shapes": how["shapes"]})
    assert grid_decoding.decoded_of(other, run) and done_for(other, path)


def test_what_is_no_report_is_refused(earlier):
    grid, path, document = earlier
    for content in ({}, document | {"rows": [1]}, document | {"rows": [{"cell": "moa"}]}):
        write_json(path, content)
        assert f"{path} is no report of train.grid" in refusal(done_for, grid, path)
    path.write_text('{"rows"')
    assert "report.json is not valid JSON" in refusal(done_for, grid, path)
    path.unlink()
    assert "report.json is missing" in refusal(done_for, grid, path)


def test_a_committed_report_of_other_prompts_tells_of_learning_rates(monkeypatch):
    monkeypatch.chdir(ROOT)
    grid = read_config("configs/matched.py", GridConfig)
    monkeypatch.setattr(grids, "inputs_of", lambda grid, target: {})  # the target was another one
    path = Path("reports/matched_300.json")
    document = json.loads(path.read_text())
    done = done_for(grid, path)
    assert [row.cell for row in done] == [row["cell"] for row in document["rows"]]
    tried = [row["simulated_tau_by_learning_rate"] for row in document["rows"]]
    assert [row.simulated_tau_by_rate for row in done] == tried
    assert not any(row.decoded for row in done)


def test_rows_decoded_with_other_prompts_are_trained_again_to_be_decoded(earlier, monkeypatch):
    """At their best rate alone, and count by it until then."""
    grid, path, document = earlier
    new, former = document["rows"], dict(document)
    del former["prompts_are"]
    write_json(path, former)
    done = done_for(grid, path)
    assert trained_for(grid, done, monkeypatch) == ["moa-lr0.0001-seed0", "eagle-lr0.001-seed0"]
    rows = grids.rows_of(grid, grids.runs_of(grid), TARGET, done)
    assert [(row.tried, row.decoded, row.report) for row in rows] == [
        (row["simulated_tau_by_learning_rate"], None, str(path)) for row in new
    ]
    told = grids.render(document_of(grid, rows, "given.py"))
    assert grid_decoding.PROMPTS in told and FORMER_PROMPTS not in told
    assert f"earlier, for {path}, and not decoded as here: moa (seed 0), eagle (seed 0)." in told
    assert FORMER_PROMPTS in grids.render(former)
    worse = former["rows"][0] | {"learning_rate": 1e-3}
    worse["simulated_tau_by_learning_rate"] = {"0.001": 1.5}  # its report had that rate alone
    worse["settings"] = worse["settings"] | {"optim.learning_rate": 1e-3}
    write_json(path.with_name("worse.json"), former | {"rows": [worse]})
    of = lambda *names: grids._earlier_rows(
        [str(path.with_name(name)) for name in names], grid, grids.runs_of(grid), TARGET
    )
    assert trained_for(grid, of(path.name, "worse.json"), monkeypatch) == [
        "moa-lr0.0001-seed0",
        "eagle-lr0.001-seed0",
    ]
    both = path.with_name("both.json")
    write_json(both, document)
    found = of(path.name, both.name)
    assert trained_for(grid, found, monkeypatch) == []
    rows = grids.rows_of(grid, grids.runs_of(grid), TARGET, found)
    assert all(row.decoded and row.report == str(both) for row in rows)
