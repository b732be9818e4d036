"""A MoA drafter for Qwen3-30B-A3B, a target of 128 experts: 127 M parameters, UltraChat.

    python -m train.distill --config configs/moa_qwen3_30b_a3b.py

The drafter's layers have a feed-forward instead of experts. The memory is 1024 wide and has 32
heads. All other settings are those of configs/moa_llama3_8b.py; no preset is set, since a copy of
the target fills most of an accelerator.
"""

import dataclasses

from configs import moa_llama3_8b
from moa_jax.config import MoaConfig

_PACKED = moa_llama3_8b.config

config = dataclasses.replace(
    _PACKED,
    target="Qwen/Qwen3-30B-A3B",
    drafter=MoaConfig(
        self_attention_num_key_value_heads=4,
        self_attention_intermediate_size=6144,
        cross_attention_num_key_value_heads=4,
        cross_attention_intermediate_size=6144,
        layer_self_attention_num_key_value_heads=8,
        layer_self_attention_intermediate_size=3072,
        target_layer_inference=0,
    ),
    run=dataclasses.replace(_PACKED.run, directory="runs/moa_qwen3_30b_a3b"),
)
