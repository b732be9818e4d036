"""The learning rates of the controls: the drafters that are compared, some with several.

    python -m train.grid --config configs/controls_rates.py \\
        --done reports/controls.json,reports/controls_tokens.json

MoA is trained for tokens alone, the others as their authors do, and EAGLE-2 once more with losses
that weigh alike. Earlier reports have one rate of each, and rows of this grid's count in
`configs/controls_best.py`. The data are those of `configs/controls.py`.
"""

import dataclasses
import runpy
from pathlib import Path

best = runpy.run_path(str(Path(__file__).with_name("controls_best.py")))["config"]
CELLS = ("eagle2", "eagle2_even_losses", "eagle3", "moa_tokens", "moa_n3_tokens")

config = dataclasses.replace(
    best,
    cells=tuple(each for each in best.cells if each[0] in CELLS),
    directory="runs/controls_rates",
    notes=(),
)
