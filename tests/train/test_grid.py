"""Grids of drafters: matched cells, finished runs, prompts, intervals and the report."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from infer.cli.flags.config_file import SHAPES, read_config
from infer.info import ROOT
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, Eagle3Config, EagleConfig, GridConfig, MoaConfig
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.pretrained import SpecialIds, Target, describe_target
from moa_jax.training.fingerprint import fingerprint
from tests.model_folders import refusal
from tests.train.test_training import CONVERSATIONS, changed, distill_config
from train import grid as grids
from train.grid import sizes_of
from train.run.grid_report import _taus

MOA = MoaConfig(1, 24, 1, 24, 1, 16)
DEMO = ROOT / "moa_jax" / "demo" / "target"
TARGET = describe_target(DEMO)


def held_out(folder: Path) -> str:
    """Writes conversations that are not those of the training data."""
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
        ("moa", changed(base, drafter=MOA)),
        ("eagle", changed(base, drafter=EagleConfig(1, 24))),
    )
    settings = dict(learning_rates=(1e-3, 1e-4), directory=str(folder / "grid"), reference="eagle")
    settings |= dict(shapes=(DraftShape(3), DraftShape(3, 2, 4)), prompts=2, max_new_tokens=8)
    return GridConfig(cells, **settings | changes)


def finish(run: grids.GridRun, tau: float, **facts) -> None:
    """Writes the files of a finished run that the report reads."""
    grids.finish(run, **{"simulated_tau": tau, "files": {}} | facts)


def with_cell(grid: GridConfig, **changes) -> GridConfig:
    """Returns the grid with other settings in its first cell."""
    (name, config), *others = grid.cells
    return dataclasses.replace(grid, cells=((name, changed(config, **changes)), *others))


# Prefixes of the settings that cells of a comparison share.
ALIKE = ("target", "data", "optim.total_steps", "optim.accumulate", "horizon", "run.dtype")


def test_a_grid_that_cannot_be_compared_is_refused(tmp_path, monkeypatch):
    assert "no cell" in refusal(toy_grid, tmp_path, reference="walrus")
    assert "several targets" in refusal(with_cell, toy_grid(tmp_path), target="other")
    grid = toy_grid(tmp_path, max_new_tokens=1024)  # all positions of the target
    monkeypatch.setattr(grids, "read_config", lambda path, kind: grid)
    line = refusal(grids.main, ["--config", "given"])
    assert "leaves max_new_tokens 1024 of the target's 1024 positions free" in line


SMOLLM2 = Target(SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"], None, Path("none"), SpecialIds())
OF_OTHER_SIZE = ("half_width", "double_width", "eagle3_and_head")


@pytest.mark.parametrize("name", ["matched", "ablations", "smollm2_matched", "smollm2_rates"])
def test_committed_grids_are_matched(name, monkeypatch):
    """The size of EAGLE-3's draft vocabulary replaces its ids, which depend on the data."""
    monkeypatch.chdir(ROOT)
    target, words, apart = (SMOLLM2, 8192, 0.03) if "smollm2" in name else (TARGET, 512, 0.05)
    grid = read_config(f"configs/{name}.py", GridConfig)
    for cell, config in grid.cells:
        if config.vocabulary:
            drafter = dataclasses.replace(config.drafter, draft_ids=tuple(range(words)))
            cells = dict(grid.cells) | {cell: changed(config, vocabulary=None, drafter=drafter)}
            grid = dataclasses.replace(grid, cells=tuple(cells.items()))
    sizes, shared = sizes_of(grid, target), set()
    for cell, config in grid.cells:
        one = fingerprint(config)
        shared.add(json.dumps({name: one[name] for name in one if name.startswith(ALIKE)}))
        assert abs(sizes[cell] / sizes[grid.reference] - 1) < apart or cell in OF_OTHER_SIZE
    assert len(shared) == 1


# ---- what is finished ---------------------------------------------------------------------


def test_the_best_rate_is_reported(tmp_path):
    """A run that diverged has no simulated tau, so it is not a candidate."""
    grid = toy_grid(tmp_path, seeds=(0, 1))
    runs = grids.runs_of(grid)
    for run, tau in zip([*runs[:2], *runs[4:6]], (1.5, 1.7, None, 1.2), strict=True):
        finish(run, tau)
    rows = grids.rows_of(grid)
    assert [(row["seed"], row["learning_rate"], row["simulated_tau"]) for row in rows] == [
        (0, 1e-4, 1.7),
        (1, 1e-4, 1.2),
    ]
    text = grids.render(grid, rows, TARGET, sizes_of(grid, TARGET))
    size = f"{sizes_of(grid, TARGET)['moa']:,}"
    assert f"| moa | 0 | {size} | 0.0001 | 0.0001: 1.70, 0.001: 1.50 |\n" in text
    assert f"| moa | 1 | {size} | 0.0001 | 0.0001: 1.20, 0.001: - |\n" in text


@pytest.mark.slow
def test_a_finished_run_of_other_settings_or_data_is_no_result(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    shutil.copy(CONVERSATIONS, data)
    grid = with_cell(toy_grid(tmp_path), data_train=(str(data),))
    run = grids.runs_of(grid)[0]

    def distilled(config, flags):
        run.folder.mkdir(parents=True)
        (run.folder / "metrics.jsonl").write_text('{"step": 2, "simulated_tau": 1.5}\n')
        return True

    monkeypatch.setattr(grids, "distill", distilled)
    assert grids.train([run], TARGET.config) and grids.is_finished(run)
    assert [row["simulated_tau"] for row in grids.rows_of(grid)] == [1.5]
    refused = refusal(grids.rows_of, with_cell(grid, optim_total_steps=13))
    assert refused.startswith("cell moa: ") and str(run.folder) in refused
    assert "optim.total_steps: 12 -> 13" in refused
    data.write_text(data.read_text() + "\n")
    assert f"{data}: other content" in refusal(grids.rows_of, grid)
    data.unlink()  # a report does not read the data
    assert len(grids.rows_of(grid)) == 1


# ---- the program ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_grid_from_end_to_end_and_again(small_target, tmp_path, capsys, monkeypatch):
    """Two cells are trained and decoded; a later call decodes only a set that was added."""
    base = changed(distill_config(tmp_path, small_target), data_validation=(held_out(tmp_path),))
    eagle3 = dataclasses.replace(base, drafter=Eagle3Config(1, 24, tapped_layers=(0, 1, 1)))
    cells = (("moa", dataclasses.replace(base, drafter=MOA)), ("eagle3", eagle3))
    shapes = dict(shapes=(DraftShape(3, 2, 4), DraftShape(3)), learning_rates=(1e-3,))
    rest = dict(temperatures=(0.0, 1.0), past_end=False, untrained=("lookup",), questions=2)
    grid = toy_grid(tmp_path, **shapes, **rest)
    grid = dataclasses.replace(grid, cells=cells, reference="moa", over=("eagle3",))
    monkeypatch.setattr(grids, "read_config", lambda path, kind: grid)
    flags = ["--config", "given", "--target-cache", str(tmp_path / "cache")]
    grids.main([*flags, "--runs", "moa-*", "--train-only"])
    assert {"keys", "last", "stream-0", "stream-1", "values"} < set(os.listdir(tmp_path / "cache"))
    grids.main(flags)
    text = capsys.readouterr().out
    decodings = lambda run: json.loads(run.finished.read_text())["decodings"]
    *trained, lookup = grids.runs_of(grid)
    assert [name.split()[0] for name in decodings(lookup)] == ["chain"] * 2
    rounds_of = []
    for run in trained:
        first, *others = decodings(run).values()
        tokens, rounds = sum(first["tokens"]), sum(first["rounds"])
        assert run.cell != "moa" or counted_alone(run, grid) == (tokens, rounds)
        assert len(first["rounds"]) == grid.prompts and len(others) == 3
        assert sum(first["committed"]) == rounds - grid.prompts  # no answer has a single token
        assert f"\n| {run.cell} | 1 | {tokens / rounds:.2f} (" in text
        rounds_of.append(rounds)
    ratio = rounds_of[0] / rounds_of[1]  # of the same text
    assert re.search(rf"\n\| eagle3 .*\| {ratio:.2f} \(", text)
    assert (tmp_path / "grid" / "report.md").read_text() == text

    monkeypatch.setattr(grids, "distill", None)
    found = list(map(decodings, trained))
    with monkeypatch.context() as patch:
        patch.setattr(grids, "open_target", None)
        grids.main(["--config", "given"])
    assert capsys.readouterr().out == text
    monkeypatch.setattr(grids, "prompts_of", lambda grid, target: None)  # decodes no held-out one
    grid = dataclasses.replace(grid, sets=("demo",))
    grids.main(["--config", "given"])
    assert "questions / eagle3 |\n" in capsys.readouterr().out
    for before, run in zip(found, trained, strict=True):
        assert before.items() < decodings(run).items() and len(decodings(run)) == 8


def test_prompts_are_distinct_and_not_trained_on(tmp_path):
    """First turns come before later ones; a conversation that was split in two occurs once."""
    grid = toy_grid(tmp_path, prompts=1000)
    config = dict(grid.cells)["eagle"].data
    validated_by = lambda *paths: dataclasses.replace(
        grid, cells=tuple((n, changed(c, data_validation=paths)) for n, c in grid.cells)
    )
    found = grids.prompts_of(validated_by(*config.validation * 2, CONVERSATIONS), TARGET)
    user = load_tokenizer(DEMO).convert_tokens_to_ids("<|user|>")
    turns = [prompt.count(user) for prompt in found]
    assert len(found) == len(set(map(tuple, found))) > 6
    assert turns == sorted(turns) and turns[0] < turns[-1]
    mixed = with_cell(grid, data_train=(CONVERSATIONS, *config.validation), data_weights=(1.0, 1.0))
    for seen in (validated_by(CONVERSATIONS), mixed):
        assert "or the training data has them all" in refusal(grids.prompts_of, seen, TARGET)


def counted_alone(run: grids.GridRun, grid: GridConfig) -> tuple[int, int]:
    """Returns tokens and rounds of the first shape, each prompt decoded by itself."""
    target = load_target(run.config.target)
    session = Session(target, load_drafter(run.config.output, target), grid.shapes[0])
    prompts = grids.prompts_of(grid, target)
    found = [session.generate([prompt], grid.max_new_tokens)[0] for prompt in prompts]
    tokens = sum(len(result.token_ids) - 1 for result in found)
    return tokens, sum(result.rounds for result in found)


# ---- the report ---------------------------------------------------------------------------


def counts(tokens_P, rounds_P) -> dict[str, list[int]]:
    return {"tokens": list(tokens_P), "rounds": list(rounds_P)}


def interval(*seeds: dict, bases: tuple = ()) -> str:
    """Reads an interval of the report: `1.00 to 2.00`."""
    cells = _taus("tau", "eagle", seeds, bases)
    return cells["tau / eagle" if bases else "tau"].partition(" (")[2].rstrip(")")


def test_intervals_are_those_of_drawn_prompts():
    """A ratio draws the same prompts for both runs; a mean of seeds draws the seeds as well."""
    tokens_P, rounds_P = np.array([10, 20, 30, 40]), np.array([10, 5, 15, 10])
    drawn = np.random.default_rng(5).choice(4, (4000, 4))
    expected = np.quantile(tokens_P[drawn].sum(1) / rounds_P[drawn].sum(1), [0.05, 0.95])
    tau = counts(tokens_P, rounds_P)
    bounds = [float(bound) for bound in interval(tau).split(" to ")]
    np.testing.assert_allclose(bounds, expected, rtol=0.06)
    assert interval(tau, bases=(counts(tokens_P, 2 * rounds_P),)) == "2.00 to 2.00"
    slow, fast = counts([20, 20], [20, 20]), counts([20, 20], [10, 10])
    assert interval(slow, fast) == "1.00 to 2.00"
    assert interval(slow, fast, bases=(fast, slow)) == "0.50 to 2.00"
