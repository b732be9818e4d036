"""The paper's comparison at the size of the bundled target: drafters that differ only in kind.

    python -m train.grid --config configs/matched.py

Every drafter has 0.82 M trainable parameters and is trained on the same batches of the target's own
answers with the same number of updates; its learning rate is the best of three. EAGLE-3 spends a
sixth of its parameters on a head for the most frequent quarter of the vocabulary, as in its
official files; `eagle3_large`, an unmatched cell, has a head and a layer of full size.
`configs/ablations.py` varies one setting of MoA at a time. Reports of this grid for the target that
was bundled until commit aaed1bd are in the history of the repository; `configs/controls.py` uses
the current target. The data:

    R="python -m train.regenerate --target moa_jax/demo/target --batch 64
        --sources star,multiwoz-2.1-val-test,taskmaster-4,synthetic-persona-chat"
    P="--max-new-tokens 128 --ignore-stop"    # past the answers' end
    T="--prompts data:chat/train.jsonl.gz" V="--prompts data:chat/validation.jsonl --limit 64"
    $R $T --limit 256 --output runs/demo_answers.jsonl
    $R $T --limit 1536 $P --output runs/demo_past.jsonl
    $R $V --output runs/demo_answers_validation.jsonl
    $R $V $P --output runs/demo_past_validation.jsonl
    python -m train.vocabulary --target moa_jax/demo/target --corpus runs/demo_past.jsonl \\
        --size 512 --output runs/vocabulary
"""

import dataclasses

from moa_jax.config import (
    DataConfig,
    DistillConfig,
    Eagle3Config,
    EagleConfig,
    FeedbackConfig,
    GridConfig,
    MoaConfig,
    OptimConfig,
    RunConfig,
)

UPDATES = 300


def moa(width: int = 256, **choices: object) -> MoaConfig:
    """A MoA drafter with two MLPs of this width."""
    return MoaConfig(1, width, 1, width, 1, 64, **choices)


base = DistillConfig(
    target="moa_jax/demo/target",
    drafter=moa(),
    data=DataConfig(
        train=("runs/demo_answers.jsonl", "runs/demo_past.jsonl"),
        validation=("runs/demo_answers_validation.jsonl", "runs/demo_past_validation.jsonl"),
        max_length=256,
        row_length=256,
        rows_per_batch=8,
    ),
    optim=OptimConfig(
        learning_rate=1e-4, warmup_steps=30, decay_steps=270, peak=20.0, total_steps=UPDATES
    ),
    run=RunConfig(directory="", log_every=20, eval_every=100, eval_batches=8, save_every=100),
    output="",
    horizon=6,
)
with_ = lambda **changes: dataclasses.replace(base, **changes)  # noqa: E731
noise = FeedbackConfig(noise=0.2)  # EAGLE's value
test_time = FeedbackConfig(steps=4)  # EAGLE-3 has 7; each step costs a drafter pass

config = GridConfig(
    cells=(
        ("moa", base),
        ("eagle2", with_(drafter=EagleConfig(1, 684), feedback=noise)),
        (
            "eagle3",
            with_(drafter=Eagle3Config(1, 296), feedback=test_time, vocabulary="runs/vocabulary"),
        ),
        # Narrower MLPs compensate for the matrix of the target's state.
        ("moa_hidden", with_(drafter=moa(213, hidden_in_memory=True))),
        ("moa_n1", with_(drafter=moa(target_layer_inference=1))),
        ("moa_n3", with_(drafter=moa(target_layer_inference=3))),
        (
            "eagle3_seven",  # all passes of the training-time test, with the authors' weights
            with_(
                drafter=Eagle3Config(1, 296),
                feedback=FeedbackConfig(steps=7, decay=0.8),
                vocabulary="runs/vocabulary",
            ),
        ),
        ("eagle3_large", with_(drafter=Eagle3Config(1, 684), feedback=test_time)),
    ),
    learning_rates=(1e-4, 2e-4, 4e-4),
    directory="runs/matched",
    reference="eagle2",
    unmatched=("eagle3_large",),
    prompts=32,
)
