"""A drafter of the paper's kind for Qwen2.5-7B-Instruct: 250 M parameters, UltraChat.

    python -m train.distill --config configs/moa_qwen2_7b.py

The memory is half as wide as Llama-3-8B's, 1024, and the target's 28 heads leave layer
self-attention heads of 36. Its self-attention has the biases of Qwen2's queries, keys and
values. The rest is that of configs/moa_llama3_8b.py, with its packed rows and its presets.
"""

import dataclasses

from configs import moa_llama3_8b
from moa_jax.config import MoaConfig

_PACKED = moa_llama3_8b.config

config = dataclasses.replace(
    _PACKED,
    target="Qwen/Qwen2.5-7B-Instruct",
    drafter=MoaConfig(
        self_attention_num_key_value_heads=4,
        self_attention_intermediate_size=8192,
        cross_attention_num_key_value_heads=4,
        cross_attention_intermediate_size=8192,
        layer_self_attention_num_key_value_heads=4,
        layer_self_attention_intermediate_size=3072,
        target_layer_inference=0,
    ),
    run=dataclasses.replace(_PACKED.run, directory="runs/moa_qwen2_7b"),
    output="runs/moa_qwen2_7b/final",
)

presets = moa_llama3_8b.presets
