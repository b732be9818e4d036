"""The best of each kind: MoA for tokens alone, EAGLE-2 and EAGLE-3 as their authors train them.

    python -m train.grid --config configs/controls_best.py \\
        --done reports/controls.json,reports/controls_tokens.json

Trains what those reports lack: `configs/controls.py` says how the data are made. As MoA gains by
leaving out the feature loss, there are two more of EAGLE-2: one weighs both losses alike, where its
authors give that of tokens a tenth, and one is trained for tokens alone in four passes, each fed
with the features of the last (HASS), as one pass for tokens alone teaches it no second token.
"""

import dataclasses
import runpy
from pathlib import Path

controls, tokens = (
    runpy.run_path(str(Path(__file__).with_name(name)))["config"]
    for name in ("controls.py", "controls_tokens.py")
)
cells = dict(controls.cells) | dict(tokens.cells)
eagle2 = cells["eagle2"]
even = dataclasses.replace(eagle2.loss, token_weight=eagle2.loss.feature_weight)
cells["eagle2_even_losses"] = dataclasses.replace(eagle2, loss=even)
feedback = dataclasses.replace(eagle2.feedback, steps=4)
cells["eagle2_tokens_four_passes"] = dataclasses.replace(cells["eagle2_tokens"], feedback=feedback)
names = ("eagle2", "eagle2_even_losses", "eagle2_tokens_four_passes", "eagle3")
names += ("moa_tokens", "moa_n3_tokens")
config = dataclasses.replace(
    controls,
    cells=tuple((name, cells[name]) for name in names),
    directory="runs/controls_best",
)
