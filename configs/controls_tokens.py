"""The controls without the feature loss: drafters trained on the target's distributions only.

    python -m train.grid --config configs/controls_tokens.py --target-cache runs/target_cache

All other settings are those of `configs/controls.py`, which describes how to generate the data. In
`configs/ablations.py` MoA gains by dropping the feature loss.
"""

import dataclasses
import runpy
from pathlib import Path

controls = runpy.run_path(str(Path(__file__).with_name("controls.py")))
CELLS = ("eagle2", "moa", "moa_n3")

both = {name: cell for name, cell in controls["config"].cells if name in CELLS}
tokens = {
    f"{name}_tokens": dataclasses.replace(
        cell, loss=dataclasses.replace(cell.loss, feature_weight=0.0)
    )
    for name, cell in both.items()
}
config = dataclasses.replace(
    controls["config"],
    cells=tuple((both | tokens).items()),
    directory="runs/controls_tokens",
)
