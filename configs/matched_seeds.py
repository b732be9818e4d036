"""The longer matched comparison again, with three seeds and on more prompts.

    python -m train.grid --config configs/matched_seeds.py --target-cache runs/target_cache

Training data are those of `configs/matched.py`; the held-out questions are all that its sources
have among the first 128 conversations:

    V="--prompts data:chat/validation.jsonl --limit 128"    # R and P: see there
    $R $V --output runs/seeds_answers_validation.jsonl
    $R $V $P --output runs/seeds_past_validation.jsonl
"""

import dataclasses
import runpy
from pathlib import Path

from moa_jax.config import DistillConfig, GridConfig

longer = runpy.run_path(str(Path(__file__).with_name("matched_longer.py")))
short: GridConfig = longer["short"]
RATES = {"eagle2": 4e-4, "moa": 4e-4, "moa_hidden": 4e-4, "eagle3": 2e-4}
VALIDATION = ("runs/seeds_answers_validation.jsonl", "runs/seeds_past_validation.jsonl")


def trained(cell: DistillConfig, rate: float) -> DistillConfig:
    """A cell's longer run, evaluated on the questions of this grid."""
    cell = longer["longer"](cell, rate)
    return dataclasses.replace(cell, data=dataclasses.replace(cell.data, validation=VALIDATION))


cells = dict(short.cells)
config = dataclasses.replace(
    short,
    cells=tuple((name, trained(cells[name], rate)) for name, rate in RATES.items()),
    learning_rates=(),
    directory="runs/matched_seeds",
    seeds=(0, 1, 2),
    unmatched=(),
    prompts=96,
)
