"""The learning rates of `configs/controls.py`: each cell with several, for a fifth of the updates.

    python -m train.grid --config configs/controls_rates.py --target-cache runs/target_cache

The rates that win stand in `configs/controls.py`.
"""

import dataclasses
import runpy
from pathlib import Path

controls = runpy.run_path(str(Path(__file__).with_name("controls.py")))

config = dataclasses.replace(
    controls["config"],
    cells=tuple(
        (name, controls["trained"](cell, 1e-4, controls["UPDATES"] // 5))
        for name, cell in controls["config"].cells
        if name != "eagle2_shifted_mask"  # it is trained as eagle2 is
    ),
    learning_rates=(2e-4, 4e-4, 8e-4),
    directory="runs/controls_rates",
    seeds=(0,),
    prompts=32,
)
