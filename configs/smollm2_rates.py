"""Learning rates of each kind of drafter in configs/smollm2_matched.py, on a fifth of the updates.

    bash configs/smollm2_grid.sh rates

The command trains one cell per kind. A best rate at an end of the list is no choice: add one beyond
it and run the command again. The rates chosen belong into RATES of configs/smollm2_matched.py.
"""

import dataclasses
import runpy
from pathlib import Path

from moa_jax.config import GridConfig

known = runpy.run_path(str(Path(__file__).with_name("smollm2_matched.py")))
matched: GridConfig = known["config"]

config = dataclasses.replace(
    matched,
    cells=tuple((name, known["with_updates"](each, 300)) for name, each in matched.cells),
    learning_rates=(2e-4, 4e-4, 8e-4),
    seeds=(0,),
    directory="runs/smollm2/rates",
    untrained=(),
    shapes=(),  # `simulated_tau` chooses
)
