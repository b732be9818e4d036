"""Grids of drafters: what is matched, what is finished stays what it was, the report."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from infer.flags.config_file import read_config
from infer.info import ROOT
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, Eagle3Config, EagleConfig, GridConfig, MoaConfig
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.drafters.api import Taps
from moa_jax.errors import InputError
from moa_jax.files.folders import write_json
from moa_jax.pretrained import describe_target
from moa_jax.training.fingerprint import fingerprint
from tests.model_folders import refusal
from tests.train.test_training import CONVERSATIONS, distill_config
from train import grid as grids
from train.run import grid_decoding, grid_document
from train.run.earlier import read_earlier
from train.run.grid_report import (
    DRAWS,
    ENDINGS,
    FORMER_PROMPTS,
    Tau,
    figures,
    interval,
    interval_over_seeds,
    render,
    tau_of,
)
from train.run.target_cache import CacheFlags, shared

MOA = MoaConfig(1, 24, 1, 24, 1, 16)
DEMO = ROOT / "moa_jax" / "demo" / "target"
TARGET = describe_target(DEMO)


def held_out(folder: Path) -> str:
    """Conversations that are not those of the training data, as a file."""
    records = [json.loads(line) for line in Path(CONVERSATIONS).read_text().splitlines()[:6]]
    for record in records:
        record["messages"][0]["content"] = f"Hello. {record['messages'][0]['content']}"
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def toy_grid(folder, target=DEMO, **changes) -> GridConfig:
    base = distill_config(folder, target)
    base = changed(base, data_validation=(held_out(folder),))
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


def document_of(grid: GridConfig, rows: list, config_file: str) -> dict:
    return grid_document.document_of(
        grid, rows, TARGET, grids.check_sizes(grid, TARGET), config_file
    )


def finish(run: grids.GridRun, tau: float) -> None:
    """What a finished run of an early version leaves, as far as the report reads it."""
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
    seeds = [run.seed for run in grids.chosen_runs(runs, ["eagle"], [], [1])]
    assert seeds == [1, 1]
    assert "no walrus" in refusal(grids.chosen_runs, runs, ["walrus"], [])
    assert "--seeds: the grid has no 7, but 0, 1" in refusal(grids.chosen_runs, runs, [], [], [7])


def test_rates_are_numbers_however_they_are_written(tmp_path, monkeypatch):
    grid, trained = toy_grid(tmp_path), []
    monkeypatch.setattr(grids, "read_config", lambda path, kind: grid)
    monkeypatch.setattr(grids, "train", lambda runs, *rest: trained.extend(runs))
    asked = lambda rates: grids.main(["--config", "given", "--learning-rates", rates])
    for text in ("1e-4", "0.0001", "1.0e-04"):
        trained.clear()
        asked(text)
        assert [(run.cell, run.learning_rate) for run in trained] == [
            ("moa", 1e-4),
            ("eagle", 1e-4),
        ]
    assert "grid has no 0.0002, but 0.0001, 0.001" in refusal(asked, "2e-4")
    assert "--learning-rates 1e-4,fast: " in refusal(asked, "1e-4,fast")


def test_a_grid_without_prompts_is_refused_before_it_is_trained(tmp_path, monkeypatch):
    grid = toy_grid(tmp_path, max_new_tokens=1024)  # all positions of the target
    monkeypatch.setattr(grids, "read_config", lambda path, kind: grid)
    monkeypatch.setattr(grids, "train", None)
    said = refusal(grids.main, ["--config", "given"])
    assert "leaves max_new_tokens 1024 of the target's 1024 positions free" in said


def test_without_rates_each_cell_keeps_its_own(tmp_path):
    grid = toy_grid(tmp_path, learning_rates=())
    (name, config), other = grid.cells
    fast = dataclasses.replace(config.optim, learning_rate=5e-3)
    cells = ((name, dataclasses.replace(config, optim=fast)), other)
    runs = grids.runs_of(dataclasses.replace(grid, cells=cells))
    assert [(run.cell, run.learning_rate) for run in runs] == [("moa", 5e-3), ("eagle", 1e-3)]
    assert [run.config.optim.learning_rate for run in runs] == [5e-3, 1e-3]
    assert runs[0].config.run.directory.endswith("/moa-lr0.005-seed0")
    said = refusal(grids.chosen_runs, runs, ["moa"], [1e-3])
    assert said.startswith("--cells moa --learning-rates 0.001: no run of the grid is of all these")


def changed(config, **changes):
    """A config with settings replaced, `data_seed=1` for the field `seed` of its `data`."""
    for name, value in changes.items():
        part, _, field = name.partition("_")
        inner = dataclasses.replace(getattr(config, part), **{field: value}) if field else value
        config = dataclasses.replace(config, **{part: inner})
    return config


def with_cell(grid: GridConfig, **changes) -> GridConfig:
    """The grid with other settings in its first cell."""
    (name, config), *others = grid.cells
    return dataclasses.replace(grid, cells=((name, changed(config, **changes)), *others))


def test_sizes_must_match(tmp_path):
    grid = toy_grid(tmp_path)
    sizes = grids.check_sizes(grid, TARGET)
    assert set(sizes) == {"moa", "eagle"}
    strict = dataclasses.replace(grid, tolerance=0.0)
    assert "parameters" in refusal(grids.check_sizes, strict, TARGET)
    grids.check_sizes(dataclasses.replace(strict, unmatched=("moa",)), TARGET)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(optim_total_steps=13), "optim.total_steps: 12 -> 13"),
        (dict(data_rows_per_batch=5), "data.rows_per_batch: 4 -> 5"),
        (dict(data_train=("other.jsonl",)), '-> ["other.jsonl"]'),
        (dict(horizon=4), "horizon: 3 -> 4"),
    ],
)
def test_cells_are_trained_alike(tmp_path, changes, line):
    grid = toy_grid(tmp_path)
    assert grids.check_alike(grid) == {}
    other = with_cell(grid, **changes)
    said = refusal(grids.check_alike, other)
    assert said.startswith("cell moa is not trained like eagle: ") and line in said
    (different,) = grids.check_alike(dataclasses.replace(other, unmatched=("moa",)))["moa"]
    assert line in different


def test_no_cell_has_another_target_or_optimiser_for_free(tmp_path, monkeypatch):
    grid = toy_grid(tmp_path, unmatched=("moa",))
    assert "target: " in refusal(grids.check_alike, with_cell(grid, target="other"))
    assert grids.check_alike(with_cell(grid, optim_peak=3.0, loss_token_weight=1.0))["moa"] == []
    other = with_cell(toy_grid(tmp_path), optim_total_steps=13)
    monkeypatch.setattr(grids, "read_config", lambda path, kind: other)
    assert "optim.total_steps" in refusal(grids.main, ["--config", "given"])


@pytest.mark.parametrize(
    "name",
    ["matched", "matched_longer", "matched_seeds", "ablations"]
    + ["controls", "controls_rates", "controls_tokens", "controls_best"],
)
def test_committed_grids_are_matched(name, monkeypatch):
    """The draft vocabulary of EAGLE-3 is data, so that its size stands for it."""
    monkeypatch.chdir(ROOT)
    grid = read_config(f"configs/{name}.py", GridConfig)
    for cell, config in grid.cells:
        if config.vocabulary:
            drafter = dataclasses.replace(config.drafter, draft_ids=tuple(range(512)))
            cells = dict(grid.cells) | {cell: changed(config, vocabulary=None, drafter=drafter)}
            grid = dataclasses.replace(grid, cells=tuple(cells.items()))
    assert grid.tolerance == 0.05
    assert not any(grids.check_alike(grid).values())
    assert len(grids.check_sizes(grid, TARGET)) == len(grid.cells)


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


# ---- what is finished ---------------------------------------------------------------------


def test_the_best_rate_is_reported_and_what_is_missing(tmp_path):
    grid = toy_grid(tmp_path)
    runs = grids.runs_of(grid)
    for run, tau in zip(runs[:2], (1.5, 1.7), strict=True):
        finish(run, tau)
    rows = grids.rows_of(grid, runs, TARGET)
    assert [(row.best.learning_rate, row.simulated_tau) for row in rows] == [(1e-4, 1.7)]
    text = grids.render(document_of(grid, rows, "given.py"))
    size = f"{grids.check_sizes(grid, TARGET)['moa']:,}"
    assert f"| moa | 0 | {size} | 0.0001 | 1.70 | 0.001: 1.50, 0.0001: 1.70 |" in text
    assert "Not trained yet: eagle (seed 0)." in text


def test_what_a_run_was_trained_on_is_told_and_kept(tmp_path):
    """In the report, also where it comes from an earlier one; beside what people say of it."""
    grid = toy_grid(tmp_path, learning_rates=(1e-3,), notes=("Little.", "And what not."))
    run = grids.runs_of(grid)[0]
    finish(run, 1.5)
    left = {"settings": fingerprint(run.config), "trained_on": "TPU v9, jax 1.0"}
    write_json(Path(run.config.run.directory) / "finished.json", left)
    document = document_of(grid, grids.rows_of(grid, grids.runs_of(grid), TARGET), "given.py")
    text = grids.render(document)
    assert "Trained on TPU v9, jax 1.0: moa (0); not recorded: none." in text
    assert "## What is shown, and what is not\n\n- Little.\n- And what not.\n" in text
    key = (run.cell, run.seed, "0.001")
    decoded = [{ending: {"tau": 1.0} for ending in ENDINGS}] * len(grid.shapes)
    row = document["rows"][0] | {"decoded": decoded, "prompts": 2}
    path = tmp_path / "report.json"
    write_json(path, document | {"rows": [row]})
    (earlier,) = read_earlier(str(path), {key: run.config}, {}, grid_decoding.decoding_of(grid))
    assert earlier.trained_on == "TPU v9, jax 1.0"


WIDER = dataclasses.replace(MOA, self_attention_intermediate_size=32)
OTHERS = [
    (dict(drafter=WIDER), "drafter.self_attention_intermediate_size: 24 -> 32"),
    (dict(optim_total_steps=13), "optim.total_steps: 12 -> 13"),
    (dict(data_train=("other.jsonl",)), '-> ["other.jsonl"]'),
]


@pytest.mark.parametrize(("changes", "line"), OTHERS)
@pytest.mark.parametrize("kind", ["file", "checkpoint", "nothing"])
def test_a_finished_run_of_other_settings_is_no_result(tmp_path, kind, changes, line):
    """Told by its file, by its checkpoints where an early version wrote none, else not."""
    grid = toy_grid(tmp_path)
    run = grids.runs_of(grid)[0]
    finish(run, 1.5)
    settings, folder = fingerprint(run.config), Path(run.config.run.directory)
    if kind == "file":
        write_json(folder / "finished.json", {"settings": settings})
    if kind == "checkpoint":
        for step, saved in ((4, {"target": "before"}), (12, settings)):
            meta = folder / "checkpoints" / str(step) / "meta"
            meta.mkdir(parents=True)
            write_json(meta / "metadata", {"config": saved})
    assert grids.is_finished(run, TARGET)
    other = grids.runs_of(with_cell(grid, **changes))
    if kind == "nothing":
        assert grids.is_finished(other[0], TARGET)
        return
    for said in (
        refusal(grids.train, other[:1], TARGET),
        refusal(grids.rows_of, grid, other, TARGET),
    ):
        assert said.startswith("cell moa: ") and str(folder) in said and line in said


@pytest.mark.slow
def test_a_finished_run_of_other_data_is_no_result(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    shutil.copy(CONVERSATIONS, data)
    grid = with_cell(toy_grid(tmp_path), data_train=(str(data),))
    run = grids.runs_of(grid)[0]
    finished = lambda config, flags: finish(run, 1.5) or True
    monkeypatch.setattr(grids, "distill", finished)
    assert grids.train([run], TARGET) and grids.is_finished(run, TARGET)
    assert grids.files_of(run.config)[str(data)]["bytes"] == data.stat().st_size
    data.write_text(data.read_text() + "\n")
    assert f"{data}: other content" in refusal(grids.is_finished, run, TARGET)
    data.unlink()  # a report needs no data
    assert grids.is_finished(run, TARGET)
    (Path(run.config.run.directory) / "finished.json").write_text('{"settings')
    assert "finished.json is not valid JSON" in refusal(grids.is_finished, run, TARGET)


def decoded_by(grid: GridConfig, run: grids.GridRun, rounds: list[int] | None) -> dict:
    """What decoded.json holds where the prompts got 8 tokens each in so many rounds."""
    tau = 8 * len(rounds) / sum(rounds) if rounds else 2.0
    counts = {"tokens": [8] * len(rounds), "rounds": rounds} if rounds else {}
    shape = {"tau": tau, "tau_past_end": tau}
    stored = {"counts": {key: counts for key in shape}} if rounds else {}
    settings = json.loads(json.dumps(grid_decoding.settings_of(grid, run)))
    return {"prompts": 2, "settings": settings, "shapes": [shape | stored] * len(grid.shapes)}


def test_damaged_files_of_a_run(tmp_path):
    grid = toy_grid(tmp_path)
    run = grids.runs_of(grid)[0]
    finish(run, 1.5)
    path = Path(run.config.run.directory) / "decoded.json"
    good = decoded_by(grid, run, [2, 4])
    for text in (
        json.dumps(good)[:-30],
        "{}",
        "[]",
        json.dumps(good | {"shapes": good["shapes"][:1]}),
        json.dumps(good | {"shapes": [{"tau": 1.0}] * 2}),
        json.dumps(good | {"prompts": None}),
        json.dumps(good | {"settings": {"run": "none"}}),
    ):
        path.write_text(text)
        assert grids.rows_of(grid, [run], TARGET)[0].decoded is None, text
    path.write_text(json.dumps(good))
    assert grids.rows_of(grid, [run], TARGET)[0].decoded.taus[0]["tau"].value == pytest.approx(
        8 / 3
    )
    log = path.with_name("metrics.jsonl")
    for text in ("", '{"step": 2, "loss": 1.0}\n', '{"step": 2, "simulated_tau": null}\n'):
        log.write_text(text)
        said = refusal(grids.rows_of, grid, [run], TARGET)
        assert said.startswith(f"{log.parent}: metrics.jsonl holds no simulated tau")


# ---- rows of earlier reports --------------------------------------------------------------


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


# ---- one cache for all --------------------------------------------------------------------


def test_one_cache_serves_all_cells_of_the_same_rows(tmp_path):
    grid = toy_grid(tmp_path, unmatched=("moa",))
    eagle3 = dataclasses.replace(grid.cells[0][1], drafter=Eagle3Config(1, 24))
    grid = dataclasses.replace(grid, cells=(*grid.cells, ("eagle3", eagle3)))
    flags = CacheFlags(tmp_path / "cache", 1.0)
    one_of = lambda grid: shared(flags, grid.cells, TARGET.config)
    assert one_of(grid) == flags._replace(taps=Taps(True, (2, 6, 9)))
    alike = with_cell(grid, data_rows_per_batch=2, data_seed=5, optim_total_steps=13)
    assert one_of(alike) == one_of(grid)
    for changes, line in (
        (dict(data_row_length=32), "cell eagle does not read the rows of moa: data.row_length: 32"),
        (dict(run_dtype="bfloat16"), 'run.dtype: "bfloat16" -> "float32"'),
    ):
        other = with_cell(grid, **changes)
        assert line in refusal(one_of, other)


# ---- the report ---------------------------------------------------------------------------


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


def test_a_config_that_cannot_be_compared(tmp_path):
    with pytest.raises(InputError, match="no cell"):
        toy_grid(tmp_path, reference="walrus")
    with pytest.raises(InputError, match="one seed"):
        toy_grid(tmp_path, seeds=())
    for name, low in (("prompts", 1), ("max_new_tokens", 2)):
        said = refusal(toy_grid, tmp_path, **{name: low - 1})
        assert said == f"{name} is {low - 1}: choose a whole number of at least {low}"


@pytest.mark.slow
def test_a_grid_from_end_to_end_and_again(small_target, tmp_path, capsys, monkeypatch):
    """Two cells trained and decoded; a second call computes nothing."""
    base = changed(distill_config(tmp_path, small_target), data_validation=(held_out(tmp_path),))
    eagle3 = dataclasses.replace(base, drafter=Eagle3Config(1, 24, tapped_layers=(0, 1, 1)))
    cells = (("moa", dataclasses.replace(base, drafter=MOA)), ("eagle3", eagle3))
    grid = toy_grid(tmp_path, learning_rates=(1e-3,))
    grid = dataclasses.replace(grid, cells=cells, reference="moa", tolerance=2.0)
    monkeypatch.setattr(grids, "read_config", lambda path, kind: grid)
    grids.main(["--config", "given", "--target-cache", str(tmp_path / "cache")])
    text = capsys.readouterr().out
    assert {"keys", "last", "stream-0", "stream-1", "values"} < set(os.listdir(tmp_path / "cache"))
    report, runs = (tmp_path / "grid" / "report.json").read_bytes(), grids.runs_of(grid)
    document = json.loads(report)
    for run, row in zip(runs, document["rows"], strict=True):
        said, (tokens, rounds) = row["decoded"][0]["tau"], counted_alone(run, grid)
        assert (said["tokens"], said["rounds"]) == (tokens, rounds)
        assert said["tau"] == tokens / rounds
        first, *_ = said["accepted/reached_by_position"].split()
        accepted, reached = map(int, first.split("/"))
        assert 0 <= accepted <= reached == rounds - grid.prompts
        assert f"\n| {run.cell} | 0 | {tokens / rounds:.2f} (" in text
    first, second = (row["decoded"][0]["tau"] for row in document["rows"])
    ratio = first["rounds"] / second["rounds"]  # of the same text
    assert second["of_reference"] == pytest.approx(ratio)
    assert re.search(rf"\n\| eagle3 .*\| {ratio:.2f} \(", text)

    decoded = Path(runs[0].config.run.directory, "decoded.json")
    whole = decoded.read_bytes()
    decoded.write_bytes(whole[:-40])
    grids.main(["--config", "given"])
    assert decoded.read_bytes() == whole and capsys.readouterr().out == text
    monkeypatch.setattr(grids, "distill", None)
    monkeypatch.setattr(grid_decoding, "open_target", None)
    grids.main(["--config", "given"])
    assert capsys.readouterr().out == text
    assert (tmp_path / "grid" / "report.json").read_bytes() == report

    here, grid = grid, dataclasses.replace(grid, directory=str(tmp_path / "elsewhere"))
    grids.main(["--config", "given", "--done", str(tmp_path / "grid" / "report.json")])
    grown = capsys.readouterr().out
    assert "earlier, for" in grown and "Not trained" not in grown
    assert all(line in grown for line in text.splitlines() if line.startswith(("| moa", "| eagle")))
    grid = here

    for run in runs:  # as early versions left it: Orbax's own file tells
        Path(run.config.run.directory, "finished.json").unlink()
    grids.main(["--config", "given"])
    longer = tuple((name, changed(config, optim_total_steps=13)) for name, config in grid.cells)
    grid = dataclasses.replace(grid, cells=longer)
    assert "optim.total_steps: 12 -> 13" in refusal(grids.main, ["--config", "given"])


def test_prompts_are_distinct_and_not_trained_on(tmp_path):
    """First turns come before later ones; a conversation that was cut in two comes once."""
    grid = toy_grid(tmp_path, prompts=1000)
    config = dict(grid.cells)["eagle"].data
    validated_by = lambda *paths: dataclasses.replace(
        grid, cells=tuple((n, changed(c, data_validation=paths)) for n, c in grid.cells)
    )
    tokenizer = load_tokenizer(DEMO)
    records = [json.loads(line) for line in Path(config.validation[0]).read_text().splitlines()]
    expected = [
        tokenizer.apply_chat_template(
            record["messages"][:at], add_generation_prompt=True, return_dict=False
        )
        for record in records
        for at in range(1, len(record["messages"]), 2)
    ]
    many = validated_by(*config.validation, *config.validation, CONVERSATIONS)
    found = grid_decoding.prompts_of(many, TARGET)
    fitting = {tuple(each) for each in expected if len(each) < config.max_length}
    assert fitting == set(map(tuple, found)) and len(found) == len(fitting) > 6
    turns = [prompt.count(tokenizer.convert_tokens_to_ids("<|user|>")) for prompt in found]
    assert turns == sorted(turns) and turns[0] < turns[-1]
    seen = [validated_by(CONVERSATIONS), with_cell(grid, data_train=config.validation)]
    mixed = (CONVERSATIONS, *config.validation)
    seen += [with_cell(grid, data_train=mixed, data_weights=(1.0, 1.0))]
    for one in seen:
        assert "or the training data has them all" in refusal(grid_decoding.prompts_of, one, TARGET)


def counted_alone(run: grids.GridRun, grid: GridConfig) -> tuple[int, int]:
    """Tokens and rounds of the first shape, each prompt decoded by itself."""
    target = load_target(run.config.target)
    session = Session(target, load_drafter(run.config.output, target), grid.shapes[0])
    prompts = grid_decoding.prompts_of(grid, target)
    found = [session.generate([prompt], grid.max_new_tokens)[0] for prompt in prompts]
    tokens = sum(len(result.token_ids) - 1 for result in found)
    return tokens, sum(result.rounds for result in found)
