"""Writes GGUF files of model folders, as llama.cpp's converter does, and damages them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moa_jax.files.hf_config import target_config_from_hf
from moa_jax.files.model_folder import open_tensors
from moa_jax.files.tensor_reader import TensorReader
from moa_jax.files.whole_files import read_json
from moa_jax.model.layers import inverse_frequencies

Q = gguf.GGMLQuantizationType
ARCH = {"mistral": "llama", "ministral3": "mistral3"}  # by model type
ARCH |= {"gemma3_text": "gemma3", "qwen3_moe": "qwen3moe"}


def write_gguf(
    path: Path,
    folder: Path,
    quantize: Mapping[str, Q] | Q = Q.F32,
    *,
    leave_out: str | None = None,
    **keys: Any,
) -> Path:
    """Writes a target as a GGUF file; `quantize` applies to matrices, by the ends of their names.

    `keys` replace metadata, and None removes a key; two underscores stand for a dot. `leave_out` is
    the GGUF name of a tensor that is not written.
    """
    config, reader = read_json(folder / "config.json"), open_tensors(folder)
    writer = gguf.GGUFWriter(path, ARCH.get(config["model_type"], config["model_type"]))
    metadata = _sizes(config) | _tokenizer(folder, config["vocab_size"])
    metadata |= {key.replace("__", "."): value for key, value in keys.items()}
    for key, value in metadata.items():
        if value is not None:
            _add(writer, key, value)
    for name, values in _tensors(config, reader):
        kind = Q.F32 if values.ndim == 1 else quantize
        if not isinstance(kind, Q):
            kind = next((each for end, each in quantize.items() if name.endswith(end)), Q.F32)
        if name != leave_out:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    types = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    types |= {str: writer.add_string, list: writer.add_array}
    if key == "general.architecture":  # the writer has added its own
        writer.kv_data[0][key].value = value
        return
    types[type(value)](key, value)


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    arch, cfg = ARCH.get(config["model_type"], config["model_type"]), target_config_from_hf(config)
    block, rope = cfg.block, cfg.block.rope_scaling
    sizes: dict[str, Any] = {
        **dict.fromkeys(("attention.key_length", "attention.value_length"), block.head_dim),
        "context_length": cfg.max_position_embeddings,
        "embedding_length": block.hidden_size,
        "block_count": cfg.num_layers,
        "feed_forward_length": block.intermediate_size,
        "attention.head_count": block.num_heads,
        "attention.head_count_kv": block.num_kv_heads,
        "attention.layer_norm_rms_epsilon": block.rms_norm_eps,
        "rope.freq_base": block.rope_theta,
        "rope.dimension_count": block.head_dim,
    }
    if rope is not None and rope.rope_type in ("linear", "yarn"):
        sizes |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": rope.factor}
        sizes["rope.scaling.original_context_length"] = rope.original_max_position_embeddings
        if beta := rope.llama_4_scaling_beta:
            sizes |= {"attention.temperature_scale": beta, "rope.scaling.yarn_log_multiplier": 1.0}
    if block.gemma_norms:
        sizes |= {"attention.sliding_window": cfg.sliding_windows[0]}
        sizes |= {"attention.sliding_window_pattern": cfg.sliding_windows.index(0) + 1}
    if experts := block.experts:
        sizes |= {"expert_count": experts.num_experts}
        sizes |= {"expert_used_count": experts.num_experts_per_tok}
        sizes |= {"expert_feed_forward_length": experts.moe_intermediate_size}
    return {f"{arch}.{key}": value for key, value in sizes.items()}


def _tokenizer(folder: Path, size: int) -> dict[str, Any]:
    """Returns the vocabulary of a byte-level BPE; without a tokenizer, `size` byte tokens."""
    if not (folder / "tokenizer.json").exists():
        tokens = ["t", "1", "t1", *(f"t{index}" for index in range(3, size))]
        kinds, merges, more = [1] * size, ["t 1"], {}
    else:
        stored = read_json(folder / "tokenizer.json")
        settings = read_json(folder / "tokenizer_config.json")
        special = {token["content"]: token["id"] for token in stored["added_tokens"]}
        id_of = stored["model"]["vocab"] | special
        tokens = sorted(id_of, key=id_of.__getitem__)
        kinds = [3 if token in special else 1 for token in tokens]
        merges = [" ".join(pair) for pair in stored["model"]["merges"]]
        more = {"tokenizer.chat_template": settings.get("chat_template")}
        for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
            more[f"tokenizer.ggml.{key}_token_id"] = id_of[settings[f"{name}_token"]]
    found = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": merges}
    found |= {"token_type": kinds}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()} | more


def _tensors(config: dict[str, Any], reader: TensorReader) -> list[tuple[str, np.ndarray]]:
    """Returns all tensors by llama.cpp's names, in float32.

    A Llama's q and k are reordered, and the experts of a layer stacked.
    """
    arch = gguf.MODEL_ARCH[ARCH.get(config["model_type"], config["model_type"]).upper()]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    cfg = target_config_from_hf(config)
    heads = {"q_proj": cfg.block.num_heads, "k_proj": cfg.block.num_kv_heads}
    parts: dict[str, list[np.ndarray]] = {}
    for name in reader.shapes:
        values = np.array(reader.read(name), np.float32)
        count = heads.get(name.split(".")[-2])
        values += cfg.block.gemma_norms and name.endswith("norm.weight")
        if count and cfg.family in ("llama", "mistral", "ministral", "ministral3"):
            halves = values.reshape(count, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        of_all = re.sub(r"experts\.\d+", "experts", name)
        parts.setdefault(names.get_name(of_all, (".weight", ".bias")), []).append(values)
    found = [(name, np.stack(each) if each[1:] else each[0]) for name, each in parts.items()]
    scaling = cfg.block.rope_scaling
    if scaling is not None and scaling.rope_type == "llama3":
        rope = (cfg.block.head_dim, cfg.block.rope_theta)
        factors = inverse_frequencies(*rope, None) / inverse_frequencies(*rope, scaling)
        found.append(("rope_freqs.weight", factors))
    return found
