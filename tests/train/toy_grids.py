"""Grids of two small drafters, and what their finished runs leave."""

import dataclasses
import json
from pathlib import Path

from infer.info import ROOT
from moa_jax.config import DraftShape, EagleConfig, GridConfig, MoaConfig
from moa_jax.pretrained import describe_target
from tests.train.test_training import CONVERSATIONS, distill_config
from train import grid as grids
from train.run.grid_report import ENDINGS

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
        shapes=(DraftShape(3), DraftShape(3, 2, 4)),
        prompts=2,
        max_new_tokens=8,
    )
    return GridConfig(cells, **settings | changes)


def finish(run: grids.GridRun, tau: float, **facts) -> None:
    """What a finished run leaves, as far as the report reads it."""
    grids.finish(run, **{"simulated_tau": tau, "files": {}} | facts)


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


def decoded_by(grid: GridConfig, rounds: list[int]) -> dict:
    """What finished.json holds where the prompts got 8 tokens each in so many rounds."""
    counts = {"tokens": [8] * len(rounds), "rounds": rounds}
    shapes = [dict.fromkeys(ENDINGS, counts)] * len(grid.shapes)
    return {"decoding": grids.decoding_of(grid), "decoded": shapes}
