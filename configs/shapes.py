"""Sizes of known targets by hub id, to build or plan a target without its files."""

import dataclasses

from moa_jax.config import BlockConfig, ExpertsConfig, RopeScaling, TargetConfig

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

_QWEN3_30B_A3B = TargetConfig(
    family="qwen3_moe",
    vocab_size=151_936,
    num_layers=48,
    block=BlockConfig(
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=6144,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        qk_norm=True,
        experts=ExpertsConfig(
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    tie_word_embeddings=False,
    max_position_embeddings=40_960,
)

_SMOLLM2_135M = TargetConfig(
    family="llama",
    vocab_size=49_152,
    num_layers=30,
    block=BlockConfig(
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        rope_scaling=None,
    ),
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)

_GEMMA3_27B = TargetConfig(
    family="gemma3_text",
    vocab_size=262_208,
    num_layers=62,
    block=BlockConfig(
        hidden_size=5376,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        intermediate_size=21_504,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=RopeScaling("linear", 8.0),
        qk_norm=True,
        hidden_act="gelu_pytorch_tanh",
        gemma_norms=True,
        query_pre_attn_scalar=168,
        local_rope_theta=10_000.0,
    ),
    tie_word_embeddings=True,
    max_position_embeddings=131_072,
    sliding_windows=tuple(0 if layer % 6 == 5 else 1024 for layer in range(62)),
    embed_scale=5376**0.5,
)

SHAPES: dict[str, TargetConfig] = {
    "google/gemma-3-27b-it": _GEMMA3_27B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "meta-llama/Meta-Llama-3-8B": _LLAMA3_8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA3_8B,
    "meta-llama/Meta-Llama-3-70B": _LLAMA3_70B,
    "meta-llama/Meta-Llama-3-70B-Instruct": _LLAMA3_70B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_7B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
}
