"""A config has the same meaning here and in transformers, in both directions."""

from __future__ import annotations

import dataclasses
import math

import pytest
import transformers

from moa_jax.config import BlockConfig, ExpertsConfig, MoaConfig, RopeScaling, TargetConfig
from moa_jax.drafters.moa import files
from moa_jax.files.families import FAMILIES
from moa_jax.files.hf_config import target_config_from_hf, target_config_to_hf
from moa_jax.model import convert

# Heads are not 30 / 6 wide; and memory of 40 leaves layer self-attention heads of 6.
BLOCK = BlockConfig(30, 6, 2, 10, 70, 1e-5, 5e5, None)
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=16, beta_fast=8.0, truncate=False)
YARN = dataclasses.replace(YARN, attention_factor=1.2)
GEMMA = dict(qk_norm=True, hidden_act="gelu_pytorch_tanh", gemma_norms=True, local_rope_theta=1e3)
GEMMA |= dict(query_pre_attn_scalar=7, rope_scaling=RopeScaling("linear", 8.0))
EXPERTS = ExpertsConfig(9, 4, 20, norm_topk_prob=True)
FLAGS = {
    "llama": {},
    "llama31": dict(rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
    "linear": dict(rope_scaling=RopeScaling("linear", 2.0)),
    "dynamic": dict(rope_scaling=RopeScaling("dynamic", 3.0, original_max_position_embeddings=33)),
    "yarn": dict(rope_scaling=YARN),
    **dict.fromkeys(("mistral", "ministral"), {}),
    "ministral3": dict(rope_scaling=dataclasses.replace(YARN, llama_4_scaling_beta=0.1)),
    "gemma3_text": GEMMA,
    "llama_bias": dict(qkv_bias=True, out_bias=True, mlp_bias=True),
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True),
    "qwen3_moe": dict(qk_norm=True, experts=EXPERTS),
    "qwen3_moe_bias": dict(qk_norm=True, qkv_bias=True, out_bias=True, experts=EXPERTS),
    "qwen3_bias": dict(qk_norm=True, qkv_bias=True, out_bias=True),
}
WHOLE = {  # what is no field of a block
    "mistral": dict(sliding_windows=(9, 9, 9)),
    "ministral": dict(sliding_windows=(9, 0, 9)),
    "gemma3_text": dict(sliding_windows=(9, 9, 0), embed_scale=30**0.5),
}


def config_of(name, tied=False):
    family = name.removesuffix("_bias") if name.removesuffix("_bias") in FAMILIES else "llama"
    block, own = dataclasses.replace(BLOCK, **FLAGS[name]), WHOLE.get(name, {})
    return TargetConfig(family, 50, 3, block, tied, 99, **own)


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_our_config_and_we_read_its_own(name, tied):
    cfg = config_of(name, tied)
    written = target_config_to_hf(cfg)
    theirs = transformers.AutoConfig.for_model(**written)
    assert "rope_parameters" in theirs.to_dict() and "rope_scaling" in written
    for read in (written, theirs.to_dict(), theirs.to_diff_dict()):
        assert target_config_from_hf(read) == cfg


def test_older_spellings_are_read():
    cfg = config_of("linear")
    written = target_config_to_hf(cfg) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert target_config_from_hf(written) == cfg
    bare = target_config_to_hf(config_of("llama"))
    for key in ("rope_scaling", "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta"):
        del bare[key]
    bare |= {"hidden_size": 24, "num_key_value_heads": None, "head_dim": None}
    read = target_config_from_hf(bare)
    assert (read.block.rope_theta, read.block.rope_scaling) == (10000.0, None)
    assert (read.block.num_kv_heads, read.block.head_dim) == (6, 4)


def test_an_unused_sliding_window_does_not_matter():
    config = target_config_to_hf(config_of("qwen2")) | {"sliding_window": 16}
    windows = {"use_sliding_window": True, "max_window_layers": 3}  # the first 3 of 3 are full
    assert target_config_from_hf(config | windows) == config_of("qwen2")
    assert target_config_from_hf(config | {"use_sliding_window": False}) == config_of("qwen2")


def test_llama_3_8b_counts_its_known_parameters():
    block = BlockConfig(4096, 32, 8, 128, 14336, 1e-5, 5e5, None)
    cfg = TargetConfig("llama", 128256, 32, block, False, 8192)
    shapes = convert.stored_shapes(convert.target_table(cfg)).values()
    assert sum(map(math.prod, shapes)) == 8_030_261_248
    shapes = convert.stored_shapes(files.table(MoaConfig(4, 6144, 4, 6144, 8, 3072), cfg))
    assert round(sum(map(math.prod, shapes.values())) / 1e6, 1) == 264.3
