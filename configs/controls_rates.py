"""The learning rates of `configs/controls.py`: its four chief cells with several, one seed.

    python -m train.grid --config configs/controls_rates.py --target-cache runs/target_cache

Its directory is another one: the grid of the controls has one rate a cell.
"""

import dataclasses
import runpy
from pathlib import Path

controls = runpy.run_path(str(Path(__file__).with_name("controls.py")))
CELLS = ("eagle2", "moa", "moa_hidden", "eagle3")

config = dataclasses.replace(
    controls["config"],
    cells=tuple(each for each in controls["config"].cells if each[0] in CELLS),
    learning_rates=(2e-4, 4e-4, 8e-4),
    directory="runs/controls_rates",
    seeds=(0,),
)
