"""The paper's comparison at the size of the bundled target: drafters that differ only in kind.

    python -m train.grid --config configs/matched.py --target-cache runs/target_cache

Every drafter has 0.82 M trainable parameters and is trained on the same batches of the target's own
answers with the same number of updates; its learning rate is the best of three. EAGLE-3 spends a
sixth of its parameters on a head for the most frequent quarter of the vocabulary, as in its
official files. `eagle2_even_losses` weights both losses equally, while EAGLE-2's authors weight the
token loss by a tenth. Cells with `tokens` in their names have the token loss only. GLIDE and a
small Llama test whether MoA's lead depends on the target activations that MoA reads.
`configs/ablations.py` varies one setting of MoA at a time. The data are the target's own answers,
both natural answers and answers of 128 tokens that continue past their end:

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

from moa_jax.config import (
    BlockConfig,
    DataConfig,
    DistillConfig,
    Eagle3Config,
    EagleConfig,
    FeedbackConfig,
    GlideConfig,
    GridConfig,
    IndependentConfig,
    LossConfig,
    MaskConfig,
    MoaConfig,
    OptimConfig,
    RunConfig,
    TargetConfig,
)


def moa(width: int = 256, **choices: object) -> MoaConfig:
    """A MoA drafter with two MLPs of this width."""
    return MoaConfig(1, width, 1, width, 1, 64, **choices)


base = DistillConfig(
    target="moa_jax/demo/target",
    drafter=moa(),
    data=DataConfig(
        train=("runs/answers.jsonl", "runs/past.jsonl"),
        validation=("runs/answers_validation.jsonl", "runs/past_validation.jsonl"),
        max_length=256,
        row_length=256,
        rows_per_batch=8,
    ),
    optim=OptimConfig(
        learning_rate=4e-4, warmup_steps=300, decay_steps=2700, peak=20.0, total_steps=3000
    ),
    run=RunConfig(directory="", log_every=50, eval_every=600, eval_batches=8, save_every=300),
    output="",
    horizon=6,
)
with_ = lambda **changes: dataclasses.replace(base, **changes)  # noqa: E731
noise = FeedbackConfig(noise=0.2)  # EAGLE's value
test_time = FeedbackConfig(steps=4)  # EAGLE-3 has 7; each step costs a drafter pass
even = LossConfig(token_weight=base.loss.feature_weight)
tokens = LossConfig(feature_weight=0.0)
small_llama = TargetConfig(  # a sixth of the target's layers at half its width
    "llama", 2048, 2, BlockConfig(128, 2, 1, 64, 600, 1e-5, 10_000.0, None), True, 1024
)

config = GridConfig(
    cells=(
        ("eagle2", with_(drafter=EagleConfig(1, 684), feedback=noise)),
        ("eagle2_even_losses", with_(drafter=EagleConfig(1, 684), feedback=noise, loss=even)),
        (
            "eagle3",
            with_(
                drafter=Eagle3Config(1, 296),
                feedback=test_time,
                vocabulary="runs/vocabulary_of_answers",
            ),
        ),
        ("moa", base),
        # Narrower MLPs compensate for the matrix of the target's state.
        ("moa_hidden", with_(drafter=moa(213, hidden_in_memory=True))),
        ("moa_n3", with_(drafter=moa(target_layer_inference=3))),
        ("moa_tokens", with_(loss=tokens)),
        ("moa_n3_tokens", with_(drafter=moa(target_layer_inference=3), loss=tokens)),
        ("moa_tokens_without_staircase", with_(loss=tokens, masks=MaskConfig(staircase=False))),
        ("moa_tokens_first_tokens", with_(loss=tokens, masks=MaskConfig(first_tokens=True))),
        ("glide", with_(drafter=GlideConfig(1, 684), loss=tokens)),
        ("independent", with_(drafter=IndependentConfig(small_llama), loss=tokens)),
    ),
    learning_rates=(1e-4, 2e-4, 4e-4),
    directory="runs/matched",
    reference="eagle2",
    seeds=(0, 1, 2),
    prompts=128,
)
