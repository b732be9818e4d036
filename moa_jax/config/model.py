"""Sizes of models: targets and drafters.

Field names are those of Hugging Face configs and of the paper's code. Numeric fields that change a
model's output have no defaults.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from moa_jax.config.checks import at_least, finite
from moa_jax.errors import InputError

Family = Literal["llama", "qwen2", "qwen3"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings: `linear`, or `llama3` as defined by Llama 3.1."""

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        finite(self, "factor", "low_freq_factor", "high_freq_factor", above_zero=True)


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One pre-norm decoder layer: attention and SwiGLU, each with a residual connection."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each query and key head before RoPE (Qwen3)

    def __post_init__(self) -> None:
        counts = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        at_least(1, self, *counts)
        finite(self, "rms_norm_eps")
        finite(self, "rope_theta", above_zero=True)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_heads} attention heads do not share {self.num_kv_heads} key-value "
                "heads evenly; choose a number of key-value heads that divides the heads"
            )
        if self.head_dim % 2:
            raise InputError(
                f"head size {self.head_dim} is odd, and rotary embeddings turn pairs; "
                "choose a width and a number of heads that give an even head size"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A frozen causal LM of the Llama family: `num_layers` equal blocks."""

    family: Family
    vocab_size: int
    num_layers: int
    block: BlockConfig
    tie_word_embeddings: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        at_least(1, self, "vocab_size", "num_layers", "max_position_embeddings")

    @property
    def memory_width(self) -> int:
        """M, the width of one layer's flattened keys and values for one token."""
        return 2 * self.block.num_kv_heads * self.block.head_dim


@dataclasses.dataclass(frozen=True)
class MoaConfig:
    """Sizes of a Mixture-of-Attentions drafter; the keys of its config file have the same names."""

    self_attention_num_key_value_heads: int
    self_attention_intermediate_size: int
    cross_attention_num_key_value_heads: int
    cross_attention_intermediate_size: int
    layer_self_attention_num_key_value_heads: int
    layer_self_attention_intermediate_size: int
    target_layer_inference: int = 0  # the paper's N: target layers reused after CA
    # Reduction of all layers' keys and values to one memory vector: layer self-attention or, as
    # ablations, their mean or the last layer's.
    layer_mixing: Literal["attention", "mean", "last"] = "attention"
    has_self_attention: bool = True  # False, an ablation: embeddings go to cross-attention
    # Not in the paper: a separate matrix adds the target's final-normed state to memory.
    hidden_in_memory: bool = False

    def __post_init__(self) -> None:
        names = (field.name for field in dataclasses.fields(self))
        at_least(1, self, *(name for name in names if name.endswith(("_heads", "_size"))))
        at_least(0, self, "target_layer_inference")


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """An EAGLE-1 or EAGLE-2 drafter: one decoder layer over token and feature.

    The official drafter has a bias in `fc` and no norm at the layer's input; the drafter of the
    paper's code has the norm and no bias. `names` selects the tensor names of the files.
    """

    num_key_value_heads: int
    intermediate_size: int
    block: BlockConfig | None = None  # the layer, if its heads or RoPE differ from the target's
    input_norm: bool = False
    fc_bias: bool = True
    names: Literal["official", "authors"] = "official"
    # The paper's code shifts the drafter's tree mask by one column; True decodes with that mask.
    shifted_mask: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "num_key_value_heads", "intermediate_size")


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 drafter: three tapped layers fused, one wider layer, a separate head."""

    num_key_value_heads: int
    intermediate_size: int
    block: BlockConfig | None = None  # the layer, if its heads or RoPE differ from the target's
    draft_ids: tuple[int, ...] = ()  # target ids that the head scores; () is the whole vocabulary
    tapped_layers: tuple[int, ...] = ()  # streams by the layer they enter; () is 2, L // 2, L - 3

    def __post_init__(self) -> None:
        at_least(1, self, "num_key_value_heads", "intermediate_size")


@dataclasses.dataclass(frozen=True)
class GlideConfig:
    """A GLIDE drafter: one layer with cross-attention to the target's last keys and values."""

    self_attention_num_key_value_heads: int
    self_attention_intermediate_size: int
    block_size: int = 5  # in training, a token sees the target's rows of earlier blocks

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        at_least(1, self, *names)


@dataclasses.dataclass(frozen=True)
class IndependentConfig:
    """A whole small model with the target's vocabulary."""

    model: TargetConfig


@dataclasses.dataclass(frozen=True)
class BorrowedConfig:
    """A small model of the target's width that uses the target's embeddings and head."""

    model: TargetConfig


@dataclasses.dataclass(frozen=True)
class LookupConfig:
    """Prompt lookup: drafts the continuation of the last tokens' latest earlier occurrence."""

    longest_match: int = 3  # maximum tokens of a match; longer matches are preferred
    shortest_match: int = 1

    def __post_init__(self) -> None:
        at_least(1, self, "shortest_match")
        if self.longest_match < self.shortest_match:
            raise InputError(
                f"longest_match is {self.longest_match}, below shortest_match "
                f"{self.shortest_match}; raise it"
            )


DrafterConfig = (
    MoaConfig
    | EagleConfig
    | Eagle3Config
    | GlideConfig
    | IndependentConfig
    | BorrowedConfig
    | LookupConfig
)
