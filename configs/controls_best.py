"""The best of each kind: MoA for tokens alone, EAGLE-2 and EAGLE-3 as their authors train them.

    python -m train.grid --config configs/controls_best.py --report \\
        --done reports/matched.json

Without `--report`, and with `--cells`, `--seeds` and `--learning-rates`, it trains what that report
lacks: `configs/controls.py` says how the data are made. As MoA gains by leaving out the
feature loss, there are two more of EAGLE-2: one weighs both losses alike, where its authors give
that of tokens a tenth, and one is trained for tokens alone in four passes, each fed with the
features of the last (HASS), as one pass for tokens alone teaches it no second token. And there are
two more of MoA, without the staircase, which costs it 1 to 4 % in `configs/ablations.py`, and with
all positions trained at distance 1 as well. GLIDE and a small Llama, as in those ablations, are
trained for tokens alone too: they tell whether MoA's lead needs what it reads of the target.
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
