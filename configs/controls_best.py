"""The best of each kind: MoA for tokens alone, EAGLE-2 and EAGLE-3 as their authors train them.

    python -m train.grid --config configs/controls_best.py --report \\
        --done reports/controls.json,reports/controls_tokens.json

Trains what those reports lack: `configs/controls.py` says how the data are made. As MoA gains by
leaving out the feature loss and EAGLE-2 cannot do without, one more EAGLE-2 weighs its two losses
alike, where its authors give that of tokens a tenth.
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
names = ("eagle2", "eagle2_even_losses", "eagle3", "moa_tokens", "moa_n3_tokens")
config = dataclasses.replace(
    controls,
    cells=tuple((name, cells[name]) for name in names),
    directory="runs/controls_best",
)
