"""The controls of the matched comparison: current target, ten times the updates, three seeds.

    python -m train.grid --config configs/controls.py --target-cache runs/target_cache

`configs/controls_best.py` tries other learning rates; the rates of this file were the best of
shorter grids. Cells and recipes are those of `configs/matched.py`. The target is
`moa_jax/demo/target`. The data are the target's own answers, both natural answers and answers of
128 tokens that continue past their end:

    R="python -m train.regenerate --target moa_jax/demo/target --batch 64
        --sources star,multiwoz-2.1-val-test,taskmaster-4,synthetic-persona-chat"
    P="--max-new-tokens 128 --ignore-stop"
    T="--prompts data:chat/train.jsonl.gz" V="--prompts data:chat/validation.jsonl --limit 128"
    $R $T --limit 1280 --output runs/answers.jsonl
    $R $T --limit 1500 $P --output runs/past.jsonl
    $R $V --output runs/answers_validation.jsonl
    $R $V $P --output runs/past_validation.jsonl
    python -m train.vocabulary --target moa_jax/demo/target --corpus runs/past.jsonl \\
        --size 512 --output runs/vocabulary_of_answers
"""

import dataclasses
import runpy
from pathlib import Path

from moa_jax.config import DataConfig, DistillConfig, GridConfig

matched = runpy.run_path(str(Path(__file__).with_name("matched.py")))
short: GridConfig = matched["config"]

UPDATES = 3000
TARGET = "moa_jax/demo/target"
DATA = DataConfig(
    train=("runs/answers.jsonl", "runs/past.jsonl"),
    validation=("runs/answers_validation.jsonl", "runs/past_validation.jsonl"),
    max_length=256,
    row_length=256,
    rows_per_batch=8,
)
RATES = {
    "eagle2": 4e-4,
    "moa": 4e-4,
    "eagle3": 2e-4,
    "moa_hidden": 4e-4,
    "moa_n3": 4e-4,
}


def trained(cell: DistillConfig, rate: float) -> DistillConfig:
    """A cell's run on this target and data, with a warm-up of a tenth of the updates."""
    warmup = UPDATES // 10
    optim = dataclasses.replace(
        cell.optim,
        learning_rate=rate,
        warmup_steps=warmup,
        decay_steps=UPDATES - warmup,
        total_steps=UPDATES,
    )
    run = dataclasses.replace(
        cell.run, log_every=50, eval_every=UPDATES // 5, save_every=UPDATES // 10
    )
    vocabulary = cell.vocabulary and "runs/vocabulary_of_answers"
    return dataclasses.replace(
        cell, target=TARGET, data=DATA, optim=optim, run=run, vocabulary=vocabulary
    )


cells = dict(short.cells)
config = dataclasses.replace(
    short,
    cells=tuple((name, trained(cells[name], rate)) for name, rate in RATES.items()),
    learning_rates=(),
    directory="runs/controls",
    seeds=(0, 1, 2),
    unmatched=(),
    prompts=128,
)
