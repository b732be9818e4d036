"""Sizes of known targets by hub id, to build or plan a target without its files."""

import dataclasses

from moa_jax.config import BlockConfig, TargetConfig

_LLAMA3_8B = TargetConfig(
    family="llama",
    vocab_size=128_256,
    num_layers=32,
    block=BlockConfig(
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14_336,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=None,
    ),
    tie_word_embeddings=False,
    max_position_embeddings=8192,
)

_LLAMA3_70B = dataclasses.replace(
    _LLAMA3_8B,
    num_layers=80,
    block=dataclasses.replace(
        _LLAMA3_8B.block, hidden_size=8192, num_heads=64, intermediate_size=28_672
    ),
)

_QWEN2_7B = TargetConfig(
    family="qwen2",
    vocab_size=152_064,
    num_layers=28,
    block=BlockConfig(
        hidden_size=3584,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=18_944,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        qkv_bias=True,
    ),
    tie_word_embeddings=False,
    max_position_embeddings=32_768,
)

SHAPES: dict[str, TargetConfig] = {
    "meta-llama/Meta-Llama-3-8B": _LLAMA3_8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA3_8B,
    "meta-llama/Meta-Llama-3-70B": _LLAMA3_70B,
    "meta-llama/Meta-Llama-3-70B-Instruct": _LLAMA3_70B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_7B,
}
