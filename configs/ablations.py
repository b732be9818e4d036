"""MoA with one thing changed at a time, and two baselines that are no EAGLE: the bundled target.

    python -m train.grid --config configs/ablations.py --target-cache runs/target_cache

Everything else is as in configs/controls.py, which says how the data are made: batches, the
learning rate of MoA for all, and the parameters, where MLPs get what is left out; half and double
width is that of the MLPs. Updates are a third of those there, a warm-up a tenth of them as there.
The bound needs a control, as without it there is no staircase either. A draft vocabulary is no
setting of MoA's training but of its decoding, since MoA uses the target's head: `--draft-vocabulary
FILE` of infer.generate and infer.evaluate, or a file in the drafter's folder. For a target of the
Qwen2 family: configs/moa_qwen2_7b.py.
"""

import dataclasses
import runpy
from pathlib import Path

from moa_jax.config import (
    BlockConfig,
    DistillConfig,
    GlideConfig,
    GridConfig,
    IndependentConfig,
    LossConfig,
    MaskConfig,
    TargetConfig,
)

controls = runpy.run_path(str(Path(__file__).with_name("controls.py")))
moa = runpy.run_path(str(Path(__file__).with_name("matched.py")))["moa"]
base: DistillConfig = dict(controls["config"].cells)["moa"]
UPDATES = 1000
small_llama = TargetConfig(  # a sixth of the target's layers at half its width
    "llama", 2048, 2, BlockConfig(128, 2, 1, 64, 600, 1e-5, 10_000.0, None), True, 1024
)


def with_(**changes: object) -> DistillConfig:
    """MoA's run with some of its settings changed."""
    warmup = UPDATES // 10
    optim = dataclasses.replace(
        base.optim, warmup_steps=warmup, decay_steps=UPDATES - warmup, total_steps=UPDATES
    )
    run = dataclasses.replace(base.run, eval_every=UPDATES // 5, save_every=UPDATES // 10)
    return dataclasses.replace(base, optim=optim, run=run, **changes)


config: GridConfig = dataclasses.replace(
    controls["config"],
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
        ("independent", with_(drafter=IndependentConfig(small_llama))),
    ),
    seeds=(0,),
    directory="runs/ablations",
    reference="moa",
    unmatched=("half_width", "double_width"),
)
