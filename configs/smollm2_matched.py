"""Drafters for SmolLM2-135M-Instruct that differ only in kind: the paper's comparison, real target.

    bash configs/smollm2_grid.sh STAGE

Every drafter has 7.5 M trainable parameters within 3 % and the draft vocabulary of
configs/smollm2.py, and trains on the same batches. `moa` has the paper's losses, cells with
`tokens` in their names have the token loss only. EAGLE-3 spends 4.7 M of its parameters on its own
head of that vocabulary; `eagle3_and_head` has in its layer what the others have, and the head
besides. `llama` is a small Llama with the target's embeddings and head that reads nothing else of
the target. configs/smollm2_rates.py compares learning rates on 300 updates; RATES has its results,
and the rate of configs/smollm2.py where it has not run. The stages of configs/smollm2_grid.sh leave
out `moa_n3`, `moa_n1`, `glide` and the third seed, for which `.ci/gpu train-smollm2` is meant.
"""

import dataclasses
import runpy
from pathlib import Path

from moa_jax.config import (
    BorrowedConfig,
    DistillConfig,
    DraftShape,
    Eagle3Config,
    EagleConfig,
    FeedbackConfig,
    GlideConfig,
    GridConfig,
    LossConfig,
    MaskConfig,
    MoaConfig,
)

here = Path(__file__)
base: DistillConfig = runpy.run_path(str(here.with_name("smollm2.py")))["config"]
smollm2 = runpy.run_path(str(here.with_name("shapes.py")))["SHAPES"][
    "HuggingFaceTB/SmolLM2-135M-Instruct"
]
RATES: dict[str, float] = {}  # by kind, of smollm2_rates.py
# The kind whose rate a cell takes, if the cell is not a kind of its own.
KINDS = dict.fromkeys(("moa", "moa_n1", "moa_n3", "moa_n3_tokens"), "moa_tokens")
KINDS |= dict.fromkeys(("moa_last", "moa_mean", "moa_norms", "moa_first_tokens"), "moa_tokens")
KINDS |= {"eagle3_and_head": "eagle3", "glide": "llama"}


def moa(**changes: object) -> MoaConfig:
    """MoA of configs/smollm2.py with some settings changed."""
    return dataclasses.replace(base.drafter, **changes)


def small_llama(layers: int, width: int) -> BorrowedConfig:
    """Layers like the target's, with MLPs of this width."""
    block = dataclasses.replace(smollm2.block, intermediate_size=width)
    return BorrowedConfig(dataclasses.replace(smollm2, num_layers=layers, block=block))


def cell(name: str, **changes: object) -> tuple[str, DistillConfig]:
    """A cell whose learning rate is that of its kind."""
    rate = RATES.get(KINDS.get(name, name), base.optim.learning_rate)
    optim = dataclasses.replace(base.optim, learning_rate=rate)
    return name, dataclasses.replace(base, optim=optim, output="", **changes)


def with_updates(found: DistillConfig, updates: int) -> DistillConfig:
    """The same run with another number of updates, and the same shares of warm-up and decay."""
    warmup = updates // 10
    optim = dataclasses.replace(
        found.optim, total_steps=updates, warmup_steps=warmup, decay_steps=updates - warmup
    )
    run = dataclasses.replace(found.run, eval_every=min(found.run.eval_every, updates // 2))
    return dataclasses.replace(found, optim=optim, run=run)


eagle3 = dict(
    feedback=FeedbackConfig(steps=7),  # the training-time test, as its authors
    vocabulary="runs/smollm2/vocabulary",
    draft_vocabulary=None,
)
wider = dict(self_attention_intermediate_size=1605, cross_attention_intermediate_size=1605)
tokens = LossConfig(feature_weight=0.0)
config = GridConfig(
    cells=(  # the most informative ones first
        cell("moa_tokens", loss=tokens),
        cell("eagle3", drafter=Eagle3Config(3, 200), **eagle3),
        cell("llama", drafter=small_llama(2, 1658), loss=tokens),
        cell("eagle2", drafter=EagleConfig(3, 3446), feedback=FeedbackConfig(noise=0.2)),
        cell("moa_n3_tokens", drafter=moa(target_layer_inference=3), loss=tokens),
        cell("moa"),
        cell("moa_n3", drafter=moa(target_layer_inference=3)),
        # One change of `moa_tokens` each, with the same number of parameters.
        cell("moa_last", drafter=moa(layer_mixing="last", **wider), loss=tokens),
        cell("moa_mean", drafter=moa(layer_mixing="mean", **wider), loss=tokens),
        cell("eagle3_and_head", drafter=Eagle3Config(3, 2930), **eagle3),
        # Ideas that are not in the paper.
        cell("moa_norms", drafter=moa(norms=True), loss=tokens),
        cell("moa_first_tokens", masks=MaskConfig(first_tokens=True), loss=tokens),
        cell("moa_n1", drafter=moa(target_layer_inference=1)),
        cell("glide", drafter=GlideConfig(3, 3446), loss=tokens),
    ),
    learning_rates=(),
    seeds=(0, 1, 2),
    directory="runs/smollm2/matched",
    reference="eagle2",
    over=("eagle3", "llama"),
    untrained=("lookup",),
    shapes=(DraftShape(5), DraftShape(3), DraftShape(7), DraftShape(5, 4, 16)),
    temperatures=(0.0, 1.0),
    sets=("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa"),
    prompts=32,
    max_new_tokens=128,
    past_end=False,
)
