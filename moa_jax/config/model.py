"""Sizes of models: targets and drafters.

Field names are those of Hugging Face configs and of the paper's code. Numeric fields that change a
model's output have no defaults.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from moa_jax.config.checks import at_least, finite
from moa_jax.errors import InputError

Family = Literal[
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral", "ministral3", "gemma3_text"
]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary embeddings; fields have the names of config.json's keys.

    `linear`; `llama3` as defined by Llama 3.1; `yarn`; and `dynamic`, NTK-aware scaling, with the
    frequencies of sequences that are `factor` times as long as the original ones.
    """

    rope_type: Literal["linear", "llama3", "yarn", "dynamic"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0  # yarn: pairs with more turns than this keep their frequency,
    beta_slow: float = 1.0  # and the frequency of pairs with fewer turns is divided by `factor`
    truncate: bool = True  # yarn: the two limits are whole indices of pairs
    attention_factor: float = 1.0  # yarn: factor of rotated queries and keys
    llama_4_scaling_beta: float = 0.0  # Ministral 3: growth of queries beyond the original length

    def __post_init__(self) -> None:
        finite(self, "factor", "low_freq_factor", "high_freq_factor", above_zero=True)
        finite(self, "beta_fast", "beta_slow", "attention_factor", above_zero=True)
        finite(self, "llama_4_scaling_beta")
        at_least(1, self, "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A feed-forward of experts; fields have the names of config.json's keys."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool  # whether the weights of a token's experts are scaled to a sum of 1

    def __post_init__(self) -> None:
        at_least(1, self, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
        if self.num_experts_per_tok > self.num_experts:
            raise InputError(
                f"num_experts_per_tok is {self.num_experts_per_tok} of {self.num_experts} experts; "
                "choose at most all"
            )


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
    qk_norm: bool = False  # RMSNorm on each query and key head before RoPE (Qwen3, Gemma 3)
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    # Gemma 3: norms scale by 1 + weight, and the outputs of attention and feed-forward have norms.
    gemma_norms: bool = False
    query_pre_attn_scalar: int | None = None  # scores are divided by its root; None is head_dim
    local_rope_theta: float | None = None  # of layers with a window, unscaled; None: as others
    experts: ExpertsConfig | None = None  # instead of the feed-forward of `intermediate_size`

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

    @property
    def llama_like(self) -> BlockConfig:
        """This layer without what a Llama's layer cannot have, as drafters' layers are."""
        scaling = self.rope_scaling
        if scaling is not None and scaling.llama_4_scaling_beta:
            scaling = dataclasses.replace(scaling, llama_4_scaling_beta=0.0)
        return dataclasses.replace(
            self,
            rope_scaling=scaling,
            hidden_act="silu",
            gemma_norms=False,
            query_pre_attn_scalar=None,
            local_rope_theta=None,
            experts=None,
        )

    @property
    def split_width(self) -> int:
        """The width of the feed-forward, or of each expert, which a mesh splits."""
        return self.experts.moe_intermediate_size if self.experts else self.intermediate_size


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A frozen causal LM of the Llama family: `num_layers` equal blocks, some with a window."""

    family: Family
    vocab_size: int
    num_layers: int
    block: BlockConfig
    tie_word_embeddings: bool
    max_position_embeddings: int
    # Tokens that a token of each layer sees, itself included; 0 is all, () is 0 for every layer.
    sliding_windows: tuple[int, ...] = ()
    embed_scale: float = 1.0  # factor of embeddings at the first layer, not at a tied head

    def __post_init__(self) -> None:
        at_least(1, self, "vocab_size", "num_layers", "max_position_embeddings")
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise InputError(
                f"{len(self.sliding_windows)} sliding windows for {self.num_layers} layers; give "
                "one per layer, 0 for full attention"
            )

    def windows_of_last(self, count: int) -> tuple[int, ...]:
        """The windows of the last `count` layers."""
        return self.sliding_windows[self.num_layers - count :] or (0,) * count

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
    # Not in the paper: norms of queries and keys in SA, CA and LSA, and of the input of Ekv2E.
    norms: bool = False

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
    """An EAGLE-3 drafter: tapped layers fused, one wider layer, a separate head.

    Official drafters have none of the four norms: EAGLE-3.1 has the first and the last, and the
    speculators library trains the other three by default.
    """

    num_key_value_heads: int
    intermediate_size: int
    block: BlockConfig | None = None  # the layer, if its heads or RoPE differ from the target's
    draft_ids: tuple[int, ...] = ()  # target ids that the head scores; () is the whole vocabulary
    tapped_layers: tuple[int, ...] = ()  # streams by the layer they enter; () is 2, L // 2, L - 3
    fc_norm: bool = False  # a norm of each tapped stream before they are fused
    norm_before_fc: bool = False  # one norm of all tapped streams before they are fused
    norm_before_residual: bool = False  # the layer adds to the normed feature, not to the feature
    norm_output: bool = False  # a drafted token's feature is the normed output of the layer

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
