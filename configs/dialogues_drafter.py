"""A drafter for `configs/targets/dialogues`: the bundled one's kind, trained seven times as long.

    D="python -m train.distill --config configs/dialogues_drafter.py"
    C="--target-cache runs/target_cache"    # 6.1 GB
    $D $C --output runs/dialogues_first
    $D $C --init-from runs/dialogues_first --run.directory runs/dialogues_drafter_on \\
        --optim.warmup_steps 200 --optim.decay_steps 4300 --optim.total_steps 4500

`configs/controls.py` says how its data are made, configs/targets/dialogues/README.md what came of
it.
"""

import dataclasses

from configs import demo_drafter

config = dataclasses.replace(
    demo_drafter.config,
    target="configs/targets/dialogues",
    data=dataclasses.replace(
        demo_drafter.config.data,
        train=("runs/answers.jsonl", "runs/past.jsonl"),
        validation=("runs/answers_validation.jsonl", "runs/past_validation.jsonl"),
        max_length=256,
        row_length=256,
        rows_per_batch=8,
    ),
    optim=dataclasses.replace(
        demo_drafter.config.optim,
        learning_rate=4e-4,
        warmup_steps=300,
        decay_steps=2700,
        total_steps=3000,
    ),
    run=dataclasses.replace(
        demo_drafter.config.run,
        directory="runs/dialogues_drafter",
        log_every=50,
        eval_every=500,
    ),
    output="configs/drafters/dialogues",
)
