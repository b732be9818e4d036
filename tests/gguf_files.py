"""Writes GGUF files of model folders, as llama.cpp's converter does, and damages them."""

from __future__ import annotations

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
    writer = gguf.GGUFWriter(path, config["model_type"])
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
    arch, cfg = config["model_type"], target_config_from_hf(config)
    block, rope = cfg.block, cfg.block.rope_scaling
    sizes: dict[str, Any] = {
        "context_length": cfg.max_position_embeddings,
        "embedding_length": block.hidden_size,
        "block_count": cfg.num_layers,
        "feed_forward_length": block.intermediate_size,
        "attention.head_count": block.num_heads,
        "attention.head_count_kv": block.num_kv_heads,
        "attention.key_length": block.head_dim,
        "attention.value_length": block.head_dim,
        "attention.layer_norm_rms_epsilon": block.rms_norm_eps,
        "rope.freq_base": block.rope_theta,
        "rope.dimension_count": block.head_dim,
    }
    if rope is not None and rope.rope_type == "linear":
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    return {f"{arch}.{key}": value for key, value in sizes.items()}


def _tokenizer(folder: Path, size: int) -> dict[str, Any]:
    """Returns the vocabulary of a byte-level BPE; without a tokenizer, `size` byte tokens."""
    if not (folder / "tokenizer.json").exists():
        tokens = [f"t{index}" for index in range(size)]
        kinds, more = [1] * size, {}
        merges = ["t 1"]
        tokens[:3] = ["t", "1", "t1"]
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
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        **more,
    }


def _tensors(config: dict[str, Any], reader: TensorReader) -> list[tuple[str, np.ndarray]]:
    """Returns all tensors by llama.cpp's names, in float32; a Llama's q and k are reordered."""
    arch = gguf.MODEL_ARCH[config["model_type"].upper()]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    cfg = target_config_from_hf(config)
    heads = {"q_proj": cfg.block.num_heads, "k_proj": cfg.block.num_kv_heads}
    found = []
    for name in reader.shapes:
        values = np.array(reader.read(name), np.float32)
        count = heads.get(name.split(".")[-2])
        if count and cfg.family == "llama":
            halves = values.reshape(count, 2, -1, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        found.append((names.get_name(name, (".weight", ".bias")), values))
    scaling = cfg.block.rope_scaling
    if scaling is not None and scaling.rope_type == "llama3":
        rope = (cfg.block.head_dim, cfg.block.rope_theta)
        factors = inverse_frequencies(*rope, None) / inverse_frequencies(*rope, scaling)
        found.append(("rope_freqs.weight", factors))
    return found
