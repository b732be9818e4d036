"""A smoke test: a drafter for the bundled target on 40 conversations, a minute on a laptop.

python -m train.distill --config configs/tiny.py
"""

from pathlib import Path

from moa_jax.config import DataConfig, DistillConfig, MoaConfig, OptimConfig, RunConfig

DEMO = Path(__file__).resolve().parents[1] / "moa_jax" / "demo"
CONVERSATIONS = str(DEMO / "conversations.jsonl")

config = DistillConfig(
    target=str(DEMO / "target"),
    drafter=MoaConfig(
        self_attention_num_key_value_heads=1,
        self_attention_intermediate_size=128,
        cross_attention_num_key_value_heads=1,
        cross_attention_intermediate_size=128,
        layer_self_attention_num_key_value_heads=1,
        layer_self_attention_intermediate_size=32,
    ),
    data=DataConfig(
        train=(CONVERSATIONS,),
        validation=(CONVERSATIONS,),
        max_length=128,
        row_length=128,
        rows_per_batch=8,
    ),
    optim=OptimConfig(
        learning_rate=1e-4, warmup_steps=10, decay_steps=50, peak=20.0, total_steps=60
    ),
    run=RunConfig(directory="runs/tiny", log_every=5, eval_every=20, eval_batches=2, save_every=20),
)
