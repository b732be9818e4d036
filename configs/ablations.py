"""Ablations of MoA, one change per cell, and two non-EAGLE baselines on the bundled target.

    python -m train.grid --config configs/ablations.py --target-cache runs/target_cache

All other settings are those of configs/matched.py, which describes how to generate the data:
batches, MoA's learning rate for all cells, and the number of parameters, with wider MLPs in place
of removed parts. `half_width` and `double_width` change the width of the MLPs. The number of
updates is a third of that in configs/matched.py; warm-up again takes a tenth of the updates.
The bound needs a control, `without_staircase`, since MoA without the bound has no staircase either.
Drafters that use the target's head need no draft vocabulary in training; decoding takes one by
`--draft-vocabulary FILE` of infer.generate and infer.evaluate, or from a file in the drafter's
folder. For a target of the Qwen2 family: configs/moa_qwen2_7b.py.
"""

import dataclasses
import runpy
from pathlib import Path

from moa_jax.config import (
    DistillConfig,
    GlideConfig,
    GridConfig,
    IndependentConfig,
    LossConfig,
    MaskConfig,
)

matched = runpy.run_path(str(Path(__file__).with_name("matched.py")))
moa, base = matched["moa"], matched["base"]
UPDATES = 1000


def with_(**changes: object) -> DistillConfig:
    """MoA's run with some settings changed."""
    warmup = UPDATES // 10
    optim = dataclasses.replace(
        base.optim, warmup_steps=warmup, decay_steps=UPDATES - warmup, total_steps=UPDATES
    )
    run = dataclasses.replace(base.run, eval_every=UPDATES // 5, save_every=UPDATES // 10)
    return dataclasses.replace(base, optim=optim, run=run, **changes)


config: GridConfig = dataclasses.replace(
    matched["config"],
    cells=(
        ("moa", with_()),
        ("without_lsa_mean", with_(drafter=moa(296, layer_mixing="mean"))),
        ("without_lsa_last", with_(drafter=moa(296, layer_mixing="last"))),
        ("without_sa", with_(drafter=moa(728, has_self_attention=False))),
        ("without_bound", with_(masks=MaskConfig(bounded=False))),
        ("without_staircase", with_(masks=MaskConfig(staircase=False))),
        ("n1", with_(drafter=moa(target_layer_inference=1))),
        ("n3", with_(drafter=moa(target_layer_inference=3))),
        ("near_horizon", with_(masks=MaskConfig(shortest_future=3, longest_future=7))),
        ("far_horizon", with_(masks=MaskConfig(shortest_future=12, longest_future=28))),
        ("whole_answer", with_(masks=MaskConfig(variable_future_length=False))),
        ("without_feature_loss", with_(loss=LossConfig(feature_weight=0.0))),
        ("half_width", with_(drafter=moa(128))),
        ("double_width", with_(drafter=moa(512))),
        ("glide", with_(drafter=GlideConfig(1, 684))),
        ("independent", with_(drafter=IndependentConfig(matched["small_llama"]))),
    ),
    learning_rates=(),
    seeds=(0,),
    directory="runs/ablations",
    reference="moa",
)
