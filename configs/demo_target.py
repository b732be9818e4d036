"""The target of the bundled pair: 12 narrow layers, task and small-talk dialogues.

    python -m train.pretrain --config configs/demo_target.py

The target is deep and narrow, so that a drafter of two layers is cheap relative to the target. All
sources are under MIT or CC-BY-4.0; the model card lists the sources.
"""

from moa_jax.config import (
    BlockConfig,
    DataConfig,
    OptimConfig,
    PretrainConfig,
    RunConfig,
    TargetConfig,
)

SOURCES = (
    "star",
    "multiwoz-2.1-val-test",
    "taskmaster-4",
    "synthetic-persona-chat",
)

config = PretrainConfig(
    target=TargetConfig(
        family="llama",
        vocab_size=2048,
        num_layers=12,
        block=BlockConfig(
            hidden_size=256,
            num_heads=4,
            num_kv_heads=1,
            head_dim=64,
            intermediate_size=704,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            rope_scaling=None,
        ),
        tie_word_embeddings=True,
        max_position_embeddings=1024,
    ),
    data=DataConfig(
        train=("data:chat/train.jsonl.gz",),
        validation=("data:chat/validation.jsonl",),
        sources=SOURCES,
        max_length=320,
        row_length=320,
        rows_per_batch=12,
    ),
    optim=OptimConfig(
        learning_rate=1e-4,
        warmup_steps=100,
        decay_steps=2600,
        peak=20.0,
        total_steps=2700,
        weight_decay=0.05,
    ),
    run=RunConfig(
        directory="runs/demo_target", log_every=20, eval_every=200, eval_batches=8, save_every=50
    ),
    tokenizer="runs/demo_tokenizer",
)
