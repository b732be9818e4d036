"""A MoA drafter for Qwen2.5-7B-Instruct: 250 M parameters, UltraChat.

    python -m train.distill --config configs/moa_qwen2_7b.py

The memory is half as wide as for Llama-3-8B, 1024, and with the target's 28 heads the head size of
layer self-attention is 36. The drafter's self-attention has biases on queries, keys and values,
like Qwen2. All other settings, including packed rows and presets, are those of
configs/moa_llama3_8b.py.
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
)

presets = moa_llama3_8b.presets
