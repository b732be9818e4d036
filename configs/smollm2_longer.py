"""The drafters of configs/smollm2_matched.py after 6,000 updates, on a GPU.

    MOA_CONFIG=configs/smollm2_longer.py .ci/gpu train-smollm2
    python -m train.grid --config configs/smollm2_longer.py    # decodes finished runs, and reports

By default the grid has one seed.
"""

import dataclasses
import runpy
from pathlib import Path

from moa_jax.config import GridConfig

known = runpy.run_path(str(Path(__file__).with_name("smollm2_matched.py")))
matched: GridConfig = known["config"]

config = dataclasses.replace(
    matched,
    cells=tuple((name, known["with_updates"](each, 6000)) for name, each in matched.cells),
    seeds=(0,),
    directory="runs/smollm2/longer",
)
