"""The matched comparison trained longer, each cell with the rate that won in the short one.

    python -m train.grid --config configs/matched_longer.py

The learning rates come from the grid of `configs/matched.py`, which tried two or three for each
cell (BENCHMARKS has its report); everything else is as there.
"""

import dataclasses
import runpy
from pathlib import Path

from moa_jax.config import DistillConfig, GridConfig

short: GridConfig = runpy.run_path(str(Path(__file__).with_name("matched.py")))["config"]
RATES = {"moa": 4e-4, "eagle2": 4e-4, "moa_n3": 4e-4, "eagle3_seven": 2e-4}
UPDATES = 800


def longer(cell: DistillConfig, rate: float) -> DistillConfig:
    """A cell's run with its own rate and more updates, warmed up alike."""
    optim = dataclasses.replace(
        cell.optim, learning_rate=rate, decay_steps=UPDATES - 30, total_steps=UPDATES
    )
    return dataclasses.replace(cell, optim=optim)


config = dataclasses.replace(
    short,
    cells=tuple((name, longer(cell, RATES[name])) for name, cell in short.cells if name in RATES),
    learning_rates=(),
    directory="runs/matched_longer",
    unmatched=(),
)
