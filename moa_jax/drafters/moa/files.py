"""Files of Mixture-of-Attentions drafters: the authors' tensor names, three kinds of config.json.

    authors  the target's config with architectures ["MOASpec"], without sizes and N
    vllm     of the authors' vLLM fork: model_type "moa_spec" and the six sizes
    ours     sizes, N, and the sizes of the drafter's target

Tensors are the same in all layouts, so sizes are read from shapes, and stated sizes are checked.
The last layout also states the parts that an ablation removes, with their sizes. Our early files
that nest the target's config in `transformer_layer_config` are read, too.
References: paper section 3.1; for names and stored tensors, authors' train/moa_spec.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moa_jax.config import BlockConfig, MoaConfig, TargetConfig
from moa_jax.drafters.moa.blocks import block_configs
from moa_jax.errors import InputError
from moa_jax.files.config_keys import contradiction, refuse_contradictions
from moa_jax.files.hf_config import check_same_block, target_config_to_hf
from moa_jax.files.registry import (
    FileLayout,
    Files,
    check_pairing,
    check_stated,
    layer_sizes,
    mispaired,
    sizes_of_layer,
    tensor_shape,
)
from moa_jax.model import convert
from moa_jax.model.convert import Shape, Table, block_table, kernel, under, vector

MIXINGS = ("attention", "mean", "last")
SIZES = ("num_key_value_heads", "intermediate_size")
_REUSED = "target_layer_inference"
_MEMORY_NORM = "memory_norm.weight"
_FORK_KEYS = (
    *("hidden_size", "num_attention_heads", "head_dim", "vocab_size", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
)


def table(cfg: MoaConfig, target: TargetConfig) -> Table:
    """The table of a drafter's stored tensors."""
    sa, ca, lsa = block_configs(cfg, target)
    memory, width = target.memory_width, target.block.hidden_size
    found: Table = {}
    if sa is not None:
        found |= under(("self_attention",), block_table(sa, "self_attention."))
    found |= under(("cross_attention",), _cross_table(ca, "cross_attention."))
    if lsa is not None:
        found |= under(("layer_self_attention",), block_table(lsa, "layer_self_attention."))
    if cfg.norms:
        found["memory_norm", "scale"] = vector((None,), (_MEMORY_NORM,), (memory,))
    if cfg.hidden_in_memory:
        hidden2e = kernel(("embed", None), ("Hidden2E.weight",), width, (width,))
        found[("hidden2e", "kernel")] = hidden2e
    return found | {
        ("ekv2e", "kernel"): kernel(("memory", "embed"), ("Ekv2E.weight",), memory, (width,)),
        ("ekv2e", "bias"): vector((None,), ("Ekv2E.bias",), (width,)),
    }


def _cross_table(cfg: BlockConfig, prefix: str) -> Table:
    """A block with cross-attention and no biases: separate q, k and v projections."""
    q, k, v, o = (f"{prefix}self_attn.{letter}_proj.weight" for letter in "qkvo")
    width, size, kv_heads = cfg.hidden_size, cfg.head_dim, cfg.num_kv_heads
    queries, each = cfg.num_heads * size, (kv_heads, 1, size)
    return {
        **convert.norm_table(width, prefix),
        ("attention", "q", "kernel"): kernel(("embed", "heads"), (q,), width, (queries,)),
        ("attention", "kv", "kernel"): kernel(
            ("embed", "kv_heads", None, None), (k, v), width, each, each
        ),
        ("attention", "out", "kernel"): kernel(("heads", "embed"), (o,), queries, (width,)),
        **convert.qk_norm_table(cfg, prefix),
        **convert.mlp_table(width, cfg.intermediate_size, False, prefix),
    }


def detect(config: dict[str, Any], names: set[str]) -> bool:
    """Whether the files hold a MoA drafter, by their config or else by their tensors."""
    architectures = set(config.get("architectures") or ())
    stated = config.get("model_type") == "moa_spec" or architectures & {"MOASpec", "MOASpecModel"}
    return bool(stated) or any(name.startswith("layer_self_attention.") for name in names)


def read_config(
    files: Files, target: TargetConfig, target_layer_inference: int | None
) -> tuple[MoaConfig, tuple[str, ...]]:
    """Read a drafter's sizes from its tensors, and N from its config or the caller.

    Raises InputError if the files contradict themselves, the target or the caller.
    """
    config, shapes, _ = files
    mixing, has_self_attention = _ablations(config)
    _check_target(config, shapes, target)
    sizes = {}
    for part, is_there in (
        ("self_attention", has_self_attention),
        ("cross_attention", True),
        ("layer_self_attention", mixing == "attention"),
    ):
        sizes |= _part_sizes(part, shapes, target) if is_there else _stated_sizes(part, config)
    check_stated(config, sizes)
    reused, notices = _reused_layers(config, target, target_layer_inference)
    cfg = MoaConfig(
        **sizes,
        target_layer_inference=reused,
        layer_mixing=mixing,
        has_self_attention=has_self_attention,
        hidden_in_memory=_option("hidden_in_memory", "Hidden2E.weight", config, shapes),
        norms=_option("norms", _MEMORY_NORM, config, shapes),
    )
    return cfg, notices


def write_config(
    cfg: MoaConfig, target: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """The config.json of a drafter; InputError if the layout cannot express the drafter."""
    whole, sizes = target_config_to_hf(target), dataclasses.asdict(cfg)
    if layout in ("authors", "vllm"):
        for is_so, what in (
            (None in block_configs(cfg, target), "no layer self-attention or no self-attention"),
            (cfg.hidden_in_memory, "the target's final state in its memory (hidden_in_memory)"),
            (cfg.norms, "norms of queries, keys and memory (norms)"),
        ):
            if is_so:
                raise InputError(
                    f"the layout {layout!r} cannot say that a drafter has {what}; choose ours"
                )
    if layout == "authors":
        return whole | {"architectures": ["MOASpec"]}
    if layout == "vllm":
        _check_fork(cfg, target)
        del sizes[_REUSED]
    return {
        "architectures": ["MOASpecModel" if layout == "vllm" else "MOASpec"],
        "model_type": "moa_spec",
        **{key: whole[key] for key in _FORK_KEYS},
        **sizes,
        "kv_hidden_size": target.memory_width,
        "disable_LSA": cfg.layer_mixing != "attention",
    }


def _ablations(config: dict[str, Any]) -> tuple[Any, bool]:
    """`layer_mixing` and `has_self_attention`, with defaults for old files without these keys."""
    mixing = config.get("layer_mixing", "attention")
    has_self_attention = config.get("has_self_attention", True)
    if mixing not in MIXINGS:
        raise InputError(f"layer_mixing is {mixing!r}; give one of {', '.join(MIXINGS)}")
    if not isinstance(has_self_attention, bool):
        raise InputError(f"has_self_attention is {has_self_attention!r}; give true or false")
    if config.get("disable_LSA") and mixing == "attention":
        raise InputError(
            "this drafter was made without layer self-attention (disable_LSA) and its files do "
            "not say what its memory is made of; use one that has it, or one of ours"
        )
    if config.get("disable_LSA") is False and mixing != "attention":
        raise contradiction("config.json", "disable_LSA", False, "layer_mixing", mixing)
    return mixing, has_self_attention


def _option(key: str, tensor: str, config: dict[str, Any], shapes: Mapping[str, Shape]) -> bool:
    """A part that is not in the paper; files without its key are judged by their tensors."""
    stored = tensor in shapes
    stated = config.get(key, stored)
    if not isinstance(stated, bool) or stated != stored:
        raise InputError(
            f"config.json says {key} is {stated!r}, but the tensor {tensor} is "
            f"{'there' if stored else 'missing'}; use the config.json of these weights"
        )
    return stated


def _check_target(
    config: dict[str, Any], shapes: Mapping[str, Shape], target: TargetConfig
) -> None:
    """Check config and shapes against the target; the fork uses some keys for the drafter."""
    stated = config.get("transformer_layer_config", config)
    refuse_contradictions(config, "config.json")
    check_same_block(stated, target, "config.json")
    if stated.get("model_type") == "moa_spec":
        stated = {"hidden_size": stated.get("hidden_size")}
    check_pairing(stated, layer_sizes(target))
    width, memory = tensor_shape(shapes, "Ekv2E.weight")
    for what, size, of_target in (
        ("hidden_size", width, target.block.hidden_size),
        ("memory width (2 x key-value heads x head_dim)", memory, target.memory_width),
        ("kv_hidden_size", config.get("kv_hidden_size", memory), target.memory_width),
    ):
        if size != of_target:
            raise mispaired(what, size, of_target)


def _reused_layers(
    config: dict[str, Any], target: TargetConfig, asked: int | None
) -> tuple[int, tuple[str, ...]]:
    """N, from the files or the caller, and a notice if neither states N."""
    stored = config.get(_REUSED)
    if stored is not None and asked not in (None, stored):
        raise InputError(
            f"{_REUSED} {asked} differs from {stored}, with which the drafter was trained; "
            "leave out the flag"
        )
    reused = stored if stored is not None else asked
    if reused is None:
        return 0, (f"the drafter's files do not state {_REUSED}: 0 is assumed",)
    return reused, ()


def _check_fork(cfg: MoaConfig, target: TargetConfig) -> None:
    """Raise InputError if the vLLM fork cannot run the drafter.

    The fork has plain Llama layers and one cache shape.
    """
    bare = dataclasses.replace(
        target.block.llama_like, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False
    )
    kv_heads = cfg.self_attention_num_key_value_heads, cfg.cross_attention_num_key_value_heads
    for wrong, what in (
        (target.block != bare, "biases, norms of queries and keys, or Gemma's layers"),
        (target.block.rope_scaling is not None, "a target with scaled rotary embeddings"),
        (cfg.target_layer_inference > 0, f"{_REUSED} above 0"),
        (kv_heads[0] != kv_heads[1], "different key-value heads in self- and cross-attention"),
    ):
        if wrong:
            raise InputError(f"the vLLM fork cannot run {what}; choose another layout")


def _part_sizes(part: str, shapes: Mapping[str, Shape], target: TargetConfig) -> dict[str, int]:
    lsa = part == "layer_self_attention"
    head_dim = target.memory_width // target.block.num_heads if lsa else target.block.head_dim
    sizes = sizes_of_layer(shapes, f"{part}.", head_dim)
    return {f"{part}_{key}": size for key, size in zip(SIZES, sizes, strict=True)}


def _stated_sizes(part: str, config: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a part that an ablation removes, from config.json."""
    keys = [f"{part}_{size}" for size in SIZES]
    for key in keys:
        if key not in config:
            raise InputError(f"config.json does not state {key}; use the drafter's own config.json")
    return {key: config[key] for key in keys}
