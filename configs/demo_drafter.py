"""The drafter of the bundled pair, trained on the target's own answers.

    python -m train.distill --config configs/demo_drafter.py --target-cache runs/demo_cache \\
        --overwrite    # of the bundled drafter

`train.regenerate` generates the data beforehand. Later runs of the same config continue training
on more data, the last run with the token loss only (moa_jax/demo/README.md). Some answers are to
kinds of prompts that the target was not trained on, since users enter such prompts. Memory holds
the target's state because this drafter is older than the result that the state does not help
(reports/drafters.md, three seeds); the state adds 8 % more parameters.
"""

from moa_jax.config import DataConfig, DistillConfig, MoaConfig, OptimConfig, RunConfig

config = DistillConfig(
    target="moa_jax/demo/target",
    drafter=MoaConfig(
        self_attention_num_key_value_heads=1,
        self_attention_intermediate_size=256,
        cross_attention_num_key_value_heads=1,
        cross_attention_intermediate_size=256,
        layer_self_attention_num_key_value_heads=1,
        layer_self_attention_intermediate_size=64,
        hidden_in_memory=True,
    ),
    data=DataConfig(
        train=(
            "runs/answers.jsonl",
            "runs/past.jsonl",
            "runs/other_answers.jsonl",
            "runs/other_past.jsonl",
        ),
        validation=("runs/answers_validation.jsonl", "runs/past_validation.jsonl"),
        max_length=256,
        row_length=256,
        rows_per_batch=8,
    ),
    optim=OptimConfig(
        learning_rate=4e-4, warmup_steps=400, decay_steps=7600, peak=20.0, total_steps=8000
    ),
    run=RunConfig(
        directory="runs/demo_drafter", log_every=50, eval_every=500, eval_batches=8, save_every=250
    ),
    output="moa_jax/demo/draft",
    horizon=2,  # a chain of depth 3 is the fastest on a CPU
)
