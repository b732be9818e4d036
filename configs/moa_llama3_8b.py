"""The paper's drafter for Llama-3-8B-Instruct: 264 M parameters, UltraChat, 40 epochs.

    python -m train.distill --config configs/moa_llama3_8b.py [--preset h200:1]

Rows of 4,096 tokens hold several separate conversations, truncated to 2,048 tokens as in the
authors' code, with almost no padding. A batch of 16 rows has about 53 conversations, while the
authors' batch has 32; configs/moa_llama3_8b_paper.py has the authors' batches. The schedule is in
epochs like the authors': warm-up of 50 updates to 20 times the constant rate, then one epoch of
linear decay. The loss covers the whole vocabulary, as the authors'; train.vocabulary adds a draft
vocabulary to the finished drafter.

Presets hold the settings that depend on the machine; `train.plan` selects the preset of its
topology automatically. A batch that is computed in parts (h200:1) gives slightly different random
draws and means, so a run must keep its preset.
"""

from moa_jax.config import (
    ChunkConfig,
    DataConfig,
    DistillConfig,
    MoaConfig,
    OptimConfig,
    RunConfig,
)

CHAT = "hub:HuggingFaceH4/ultrachat_200k@8049631c405ae6576f93f445c6b8166f76f5505a"
CONVERSATIONS = 207_865
TOKENS = 1_200  # mean tokens per conversation, an estimate
EPOCH = CONVERSATIONS * TOKENS // (16 * 4096)

config = DistillConfig(
    target="meta-llama/Meta-Llama-3-8B-Instruct",
    drafter=MoaConfig(
        self_attention_num_key_value_heads=4,
        self_attention_intermediate_size=6144,
        cross_attention_num_key_value_heads=4,
        cross_attention_intermediate_size=6144,
        layer_self_attention_num_key_value_heads=8,
        layer_self_attention_intermediate_size=3072,
        target_layer_inference=0,
    ),
    data=DataConfig(
        train=(f"{CHAT}/train_sft",),
        validation=(f"{CHAT}/test_sft",),
        max_length=2048,
        row_length=4096,
        rows_per_batch=16,
        longest_first=True,
        cache="runs/cache",
    ),
    optim=OptimConfig(
        learning_rate=3e-5,
        warmup_steps=50,
        decay_steps=EPOCH,
        peak=20.0,
        total_steps=40 * EPOCH,
    ),
    chunks=ChunkConfig(head=0, memory=0),  # no recomputation unless a preset needs chunks
    run=RunConfig(
        directory="runs/moa_llama3_8b",
        log_every=20,
        eval_every=500,
        save_every=500,
        dtype="bfloat16",
    ),
)

# Settings per machine, selected by `--preset NAME`.
presets = {
    # A copy of the target takes 15.0 of a chip's 15.75 GiB, so two chips share a copy, and the
    # remaining memory requires chunks. A target that is split over all chips needs no chunks
    # (`--mesh.tensor 1 --mesh.target cut --chunks.head 0 --chunks.memory 0`): by `train.plan` a
    # step is then a tenth faster, but each chip receives twice the bytes.
    "v5e:4x4": {
        "mesh.tensor": "2",
        "mesh.target": "copied",
        "chunks.head": "512",
        "chunks.memory": "2048",
    },
    # A copy takes a sixth of a chip, and a tenth to a quarter of a GPU. `auto` would select the
    # same, but `auto` depends on the memory available to jax, which another program may reduce.
    "v5p:2x2x2": {"mesh.target": "copied"},
    **dict.fromkeys(("h200:8", "h100:8", "a100:8", "b200:8"), {"mesh.target": "copied"}),
    # Four rows at a time take 72 of 121 GiB; sixteen rows would not fit.
    "h200:1": {"optim.accumulate": "4"},
}
