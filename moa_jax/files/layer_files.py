"""Reads and writes the config.json of drafters that consist of one decoder layer."""

from __future__ import annotations

import dataclasses
import re
from types import MappingProxyType
from typing import Any, Protocol

from moa_jax.config import BlockConfig, Family, TargetConfig
from moa_jax.errors import InputError
from moa_jax.files.config_keys import (
    LAYER_NEUTRAL,
    Values,
    refuse_contradictions,
    refuse_keys,
    refuse_unknown,
    shown,
)
from moa_jax.files.copies import check_rotary
from moa_jax.files.families import ARCHITECTURES
from moa_jax.files.hf_config import target_config_from_hf, target_config_to_hf
from moa_jax.files.registry import FileLayout, Files, check_pairing, misstated, sizes_of_layer

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class LayerSizes(Protocol):
    """The fields that all configs of one-layer drafters share."""

    num_key_value_heads: int
    intermediate_size: int
    block: BlockConfig | None


def block_of(cfg: LayerSizes, target: TargetConfig, plain: bool = False) -> BlockConfig:
    """The drafter's layer: `cfg.block`, else the target's layer with the drafter's sizes.

    `plain` drops the biases and norms that Llama does not have.
    """
    sizes = (cfg.num_key_value_heads, cfg.intermediate_size)
    return cfg.block or _resized(target.block.llama_like, *sizes, plain)


def _resized(block: BlockConfig, kv_heads: int, intermediate: int, plain: bool) -> BlockConfig:
    bare = dict(qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False) if plain else {}
    return dataclasses.replace(block, num_kv_heads=kv_heads, intermediate_size=intermediate, **bare)


def family_of(block: BlockConfig) -> Family:
    """A family that has such a layer."""
    if block.qkv_bias and not block.out_bias and not block.qk_norm:
        return "qwen2"
    return "qwen3" if block.qk_norm else "llama"


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config.json, those of speculators' nested layer beside the others.

    Raises InputError for versions of that layout other than 0.1 to 0.9, for nested keys that
    contradict the others, and for a missing `norm_before_residual`, of which speculators and vLLM
    have different defaults.
    """
    nested = config.get("transformer_layer_config")
    if nested is None:
        return config
    version = config.get("speculators_version", "0.9")
    if not re.match(r"0\.[1-9](\.|$)", str(version)):
        raise InputError(
            f"config.json: speculators_version: {shown(version)} is not read; use files of "
            "speculators 0.1 to 0.9"
        )
    refuse_contradictions(config | {"tie_word_embeddings": None}, "config.json")
    if config.get("norm_before_residual") is None:
        raise InputError(
            "config.json: norm_before_residual is missing: speculators reads that as false and "
            "vLLM as true; state it as the drafter was trained"
        )
    outer = {key: value for key, value in config.items() if value is not None}
    return {**nested, **outer, "transformer_layer_config": None}


def read_sizes(
    files: Files,
    target: TargetConfig,
    prefix: str,
    plain: bool = False,
    own: Values = MappingProxyType({}),
) -> dict[str, Any]:
    """The fields of `LayerSizes`: two sizes from the tensors, heads and RoPE from config.json.

    `block` is None if the layer has the target's settings. `own` has the supported values of keys
    that only the caller's kind has. Raises InputError for files of another target and for missing
    tensors.
    """
    check_pairing(files.config, {"hidden_size": target.block.hidden_size})
    _refuse_variants(files.config, target, plain, own)
    stated = {"vocab_size": target.vocab_size, "num_hidden_layers": 1} | files.config
    if all(kind == "full_attention" for kind in stated.get("layer_types") or ()):
        stated["layer_types"] = None  # some writers keep the value of the target
    stated.setdefault("max_position_embeddings", target.max_position_embeddings)
    # Some writers put the drafter's kind here, or the target's, whose experts no drafter has.
    if stated.get("model_type") not in {*ARCHITECTURES} - {"qwen3_moe"}:
        stated["model_type"] = "llama" if plain else family_of(target.block)
    block = target_config_from_hf(stated).block
    if block.gemma_norms:
        raise InputError(
            "config.json: a layer of Gemma is not read in a drafter; state the model_type of a "
            "Llama or Qwen layer with these tensors"
        )
    check_rotary(files.shapes, files.read, block)
    found = (*sizes_of_layer(files.shapes, prefix, block.head_dim), plain)
    _check_stated(block, *found, target)
    block = _resized(block, *found)
    if plain:  # a layer of Qwen3, also below the model_type of Llama
        has_norms = f"{prefix}self_attn.q_norm.weight" in files.shapes
        block = dataclasses.replace(block, qk_norm=has_norms)
    return {
        "num_key_value_heads": block.num_kv_heads,
        "intermediate_size": block.intermediate_size,
        "block": None if _resized(target.block.llama_like, *found) == block else block,
    }


def _refuse_variants(
    config: dict[str, Any], target: TargetConfig, plain: bool, own: Values
) -> None:
    """Raise InputError for keys of other one-layer drafters, which are not supported.

    NVIDIA's files have such keys in `eagle_config`. The paper's code writes the target's config,
    including the target's number of layers.
    """
    if config.get("transformer_layer_config"):
        raise InputError(
            "config.json nests transformer_layer_config, which is read for EAGLE-3 only; use the "
            "official layout, whose keys stand at the top"
        )
    layers = (1,) if plain else (1, target.num_layers)
    neutral: Values = {
        **LAYER_NEUTRAL,
        "num_hidden_layers": layers,
        "target_hidden_size": (target.block.hidden_size,),
        "target_num_hidden_layers": (target.num_layers,),
        "target_vocab_size": (target.vocab_size,),
    }
    if plain:
        neutral = {**neutral, "attention_bias": (False,), "mlp_bias": (False,)}
    else:  # the drafter uses the target's head
        neutral = {**neutral, "draft_vocab_size": (target.vocab_size,)}
    neutral = {**neutral, **own}
    for keys, where in (
        (config, "config.json"),
        (config.get("eagle_config") or {}, "config.json: eagle_config"),
    ):
        refuse_keys(keys, where, neutral)
        refuse_unknown(keys, where, [*neutral, LAYER_IDS])


def _check_stated(
    block: BlockConfig, kv_heads: int, width: int, plain: bool, target: TargetConfig
) -> None:
    """Raise InputError for sizes in config.json that differ from those of the tensors.

    Unless `plain`, config.json may state the target's sizes, as the paper's code writes them.
    """
    for key, value, found, of_target in (
        ("num_key_value_heads", block.num_kv_heads, kv_heads, target.block.num_kv_heads),
        ("intermediate_size", block.intermediate_size, width, target.block.intermediate_size),
    ):
        if value != found and (plain or value != of_target):
            raise misstated(key, value, found)


def write_sizes(
    cfg: LayerSizes, target: TargetConfig, layout: FileLayout, method: str, plain: bool = False
) -> dict[str, Any]:
    """The config.json of a one-layer model; raises InputError for unsupported layouts."""
    if layout not in ("ours", "authors"):
        others = "ours, authors, or speculators for vLLM" if plain else "ours or authors"
        raise InputError(f"drafters of kind {method} have no layout {layout}; choose {others}")
    return target_config_to_hf(one_layer(cfg, target, plain))


def one_layer(cfg: LayerSizes, target: TargetConfig, plain: bool) -> TargetConfig:
    """A model of the drafter's layer alone, as config.json describes it."""
    block = block_of(cfg, target, plain)
    return dataclasses.replace(
        target,
        family=family_of(block),
        num_layers=1,
        block=block,
        sliding_windows=(),
        embed_scale=1.0,
    )
