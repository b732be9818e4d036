"""The families of targets, and the names in their files; `infer.info --families` prints them.

A family is a `model_type` of transformers, whose float32 logits are the reference of its tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from moa_jax.config import Family


class FamilyFiles(NamedTuple):
    """The names and defaults of one family's files."""

    architecture: str  # the class of transformers
    gguf: tuple[str, ...]  # architectures of GGUF files that hold this family
    wrappers: tuple[str, ...] = ()  # model types whose `text_config` is of this family
    # Values of keys that a config.json leaves out, as in transformers' config class.
    defaults: Mapping[str, Any] = MappingProxyType({})


_GEMMA3 = {
    **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"head_dim": 256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6},
    **{"rope_local_base_freq": 10_000.0, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    "tie_word_embeddings": True,
}
FAMILIES: dict[Family, FamilyFiles] = {
    "llama": FamilyFiles("LlamaForCausalLM", ("llama",)),
    "qwen2": FamilyFiles("Qwen2ForCausalLM", ("qwen2",)),
    "qwen3": FamilyFiles("Qwen3ForCausalLM", ("qwen3",)),
    "qwen3_moe": FamilyFiles("Qwen3MoeForCausalLM", ("qwen3moe",)),
    "mistral": FamilyFiles(
        "MistralForCausalLM", ("llama", "mistral3"), ("mistral3",), {"sliding_window": 4096}
    ),
    "ministral": FamilyFiles("MinistralForCausalLM", ("llama",), defaults={"sliding_window": 4096}),
    "ministral3": FamilyFiles(
        "Ministral3ForCausalLM", ("mistral3",), ("mistral3",), {"head_dim": 128}
    ),
    "gemma3_text": FamilyFiles("Gemma3ForCausalLM", ("gemma3",), ("gemma3",), _GEMMA3),
}
ARCHITECTURES = {family: files.architecture for family, files in FAMILIES.items()}
WRAPPERS = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
}
# Of a wrapper whose `text_config` does not state its own model type.
TEXT_OF_WRAPPER = {"mistral3": "mistral", "gemma3": "gemma3_text"}
