"""Reads and writes the config.json of drafters that consist of one decoder layer."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from moa_jax.config import BlockConfig, TargetConfig
from moa_jax.errors import InputError
from moa_jax.files.config_keys import LAYER_NEUTRAL, Values, refuse_keys
from moa_jax.files.copies import check_rotary
from moa_jax.files.hf_config import ARCHITECTURES, target_config_from_hf, target_config_to_hf
from moa_jax.files.registry import FileLayout, Files, check_pairing, misstated, sizes_of_layer


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
    return cfg.block or _resized(target.block, *sizes, plain)


def _resized(block: BlockConfig, kv_heads: int, intermediate: int, plain: bool) -> BlockConfig:
    bare = dict(qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False) if plain else {}
    return dataclasses.replace(block, num_kv_heads=kv_heads, intermediate_size=intermediate, **bare)


def read_sizes(
    files: Files, target: TargetConfig, prefix: str, plain: bool = False
) -> dict[str, Any]:
    """The fields of `LayerSizes`: two sizes from the tensors, heads and RoPE from config.json.

    `block` is None if the layer has the target's settings. Raises InputError for files of another
    target and for missing tensors.
    """
    check_pairing(files.config, {"hidden_size": target.block.hidden_size})
    _refuse_variants(files.config, target, plain)
    stated = {"vocab_size": target.vocab_size, "num_hidden_layers": 1} | files.config
    if all(kind == "full_attention" for kind in stated.get("layer_types") or ()):
        stated["layer_types"] = None  # some writers keep the value of the target
    stated.setdefault("max_position_embeddings", target.max_position_embeddings)
    if stated.get("model_type") not in ARCHITECTURES:  # some writers put the drafter's kind here
        stated["model_type"] = "llama" if plain else target.family
    block = target_config_from_hf(stated).block
    check_rotary(files.shapes, files.read, block)
    own = (*sizes_of_layer(files.shapes, prefix, block.head_dim), plain)
    _check_stated(block, *own, target)
    block = _resized(block, *own)
    return {
        "num_key_value_heads": block.num_kv_heads,
        "intermediate_size": block.intermediate_size,
        "block": None if _resized(target.block, *own) == block else block,
    }


def _refuse_variants(config: dict[str, Any], target: TargetConfig, plain: bool) -> None:
    """Raise InputError for keys of other one-layer drafters, which are not supported.

    NVIDIA's files have such keys in `eagle_config`. The paper's code writes the target's config,
    including the target's number of layers.
    """
    if config.get("transformer_layer_config"):
        raise InputError(
            "config.json nests transformer_layer_config, which is speculators' layout and not read "
            "yet; use the official layout, whose keys stand at the top"
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
    refuse_keys(config, "config.json", neutral)
    refuse_keys(config.get("eagle_config") or {}, "config.json: eagle_config", neutral)


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
        raise InputError(
            f"drafters of kind {method} have no layout {layout}; choose ours or authors"
        )
    family = "llama" if plain else target.family
    block = block_of(cfg, target, plain)
    return target_config_to_hf(
        dataclasses.replace(target, family=family, num_layers=1, block=block)
    )
