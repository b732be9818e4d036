"""The drafter of the bundled pair, trained on the target's own answers.

    python -m train.distill --config configs/demo_drafter.py

`train.regenerate` makes the data beforehand (moa_jax/demo/README.md).
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
    ),
    data=DataConfig(
        train=("runs/demo_answers.jsonl", "runs/demo_past.jsonl"),
        validation=("runs/demo_answers_validation.jsonl", "runs/demo_past_validation.jsonl"),
        max_length=320,
        row_length=320,
        rows_per_batch=12,
    ),
    optim=OptimConfig(
        learning_rate=1e-4, warmup_steps=50, decay_steps=950, peak=20.0, total_steps=1000
    ),
    run=RunConfig(
        directory="runs/demo_drafter", log_every=20, eval_every=100, eval_batches=8, save_every=100
    ),
    output="moa_jax/demo/draft",
    horizon=2,  # a chain of depth 3 is the fastest on a CPU
)
