"""The best runs per kind: MoA by token loss only, EAGLE-2 and EAGLE-3 as trained by their authors.

    python -m train.grid --config configs/controls_best.py --report \\
        --done reports/matched.json

The eagle3 cells read the draft vocabulary that `configs/controls.py` describes. Without
`--report`, and with `--cells`, `--seeds` and `--learning-rates`, the same command trains
runs that the report lacks; `configs/controls.py` describes how to generate the data. Since MoA
gains by dropping the feature loss, two more cells are variants of EAGLE-2. `eagle2_even_losses`
weights both losses equally, while EAGLE-2's authors weight the token loss by a tenth.
`eagle2_tokens_four_passes` has the token loss only and four passes, each fed with the features of
the previous pass (HASS), since a single pass with the token loss only does not train the second
token. Two more cells are variants of MoA: without the staircase, which costs MoA 1 to 4 % in
`configs/ablations.py`, and with all positions trained at distance 1 as well. GLIDE and a small
Llama, as in the ablations, are also trained with the token loss only: these cells test whether
MoA's lead depends on the target activations that MoA reads.
"""

import dataclasses
import runpy
from pathlib import Path

controls, tokens, ablations = (
    runpy.run_path(str(Path(__file__).with_name(name)))["config"]
    for name in ("controls.py", "controls_tokens.py", "ablations.py")
)
ablations = dict(ablations.cells)
cells = dict(controls.cells) | dict(tokens.cells)
eagle2 = cells["eagle2"]
even = dataclasses.replace(eagle2.loss, token_weight=eagle2.loss.feature_weight)
cells["eagle2_even_losses"] = dataclasses.replace(eagle2, loss=even)
feedback = dataclasses.replace(eagle2.feedback, steps=4)
cells["eagle2_tokens_four_passes"] = dataclasses.replace(cells["eagle2_tokens"], feedback=feedback)
names = ("eagle2", "eagle2_even_losses", "eagle2_tokens_four_passes", "eagle3")
names += ("moa", "moa_hidden", "moa_tokens", "moa_n3_tokens", "moa_tokens_without_staircase")
names += ("moa_tokens_first_tokens", "glide", "independent")
for name, change in (
    ("without_staircase", {"staircase": False}),
    ("first_tokens", {"first_tokens": True}),
):
    masks = dataclasses.replace(cells["moa_tokens"].masks, **change)
    cells[f"moa_tokens_{name}"] = dataclasses.replace(cells["moa_tokens"], masks=masks)
for name in ("glide", "independent"):
    cells[name] = dataclasses.replace(cells["moa_tokens"], drafter=ablations[name].drafter)
config = dataclasses.replace(
    controls,
    cells=tuple((name, cells[name]) for name in names),
    learning_rates=(5e-5, 1e-4, 2e-4, 4e-4, 8e-4),
    directory="runs/controls_best",
)
