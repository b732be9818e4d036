"""The learning rates of the controls: the drafters that are compared, some with several.

    python -m train.grid --config configs/controls_rates.py

All cells of `configs/controls_best.py`, where rows of this grid's report count, but for one that
has not been begun. The data are those of `configs/controls.py`.
"""

import dataclasses
import runpy
from pathlib import Path

best = runpy.run_path(str(Path(__file__).with_name("controls_best.py")))["config"]

config = dataclasses.replace(
    best,
    cells=tuple(each for each in best.cells if each[0] != "eagle2_tokens_four_passes"),
    directory="runs/controls_rates",
)
