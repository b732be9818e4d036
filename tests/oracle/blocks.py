"""One pre-norm decoder layer, split where a cache can be put between its two halves.

    self-attention       x -----+----------> apply -> y
                                +-> keys_values -^

    cross-attention      x ----------------> apply -> y
                         memory --> keys_values -^

Keys of both kinds go through the block's own input norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

Weights = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class TorchBlock:
    """Weights of one layer under their checkpoint names; head counts follow from the shapes.

    Biases and the norms of queries and keys are used where `weights` has them.
    """

    weights: Weights
    head_dim: int
    eps: float
    frequency: Tensor  # (E/2,), radians per position

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.eps)

    def heads(self, kind: str, x_BTD: Tensor) -> Tensor:
        """Projects to `kind` (q, k or v), one row per head: (B, heads, T, E)."""
        x_BTHE = self.linear(f"self_attn.{kind}_proj", x_BTD).unflatten(-1, (-1, self.head_dim))
        if f"self_attn.{kind}_norm.weight" in self.weights:
            x_BTHE = self.norm(f"self_attn.{kind}_norm", x_BTHE)
        return x_BTHE.transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rope_frequency(theta: float, head_dim: int, scaling: Mapping | None = None) -> Tensor:
    """Radians per position of each pair of a head, (E/2,); `scaling` as in config.json.

    Llama 3.1 keeps waves shorter than original/high, stretches those longer than original/low
    by `factor`, and blends in between.
    """
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None or scaling["rope_type"] == "default":
        return frequency
    assert scaling["rope_type"] == "llama3"
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / scaling["factor"]


def rotate(x_BHTE: Tensor, position_BT: Tensor, frequency: Tensor) -> Tensor:
    """Turns element i of each head together with element i + E/2."""
    angle = position_BT[:, None, :, None].float() * frequency
    first, second = x_BHTE.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def keys_values(block: TorchBlock, x_BSD: Tensor, position_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated keys and values of a block's input, each (B, K, S, E)."""
    h_BSD = block.norm("input_layernorm", x_BSD)
    k_BKSE = rotate(block.heads("k", h_BSD), position_BS, block.frequency)
    return k_BKSE, block.heads("v", h_BSD)


def attend(q_BHTE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask_BTS: Tensor) -> Tensor:
    """Grouped attention where `mask_BTS` is True: key-value head j serves H/K query heads."""
    group = q_BHTE.shape[1] // k_BKSE.shape[1]
    k_BHSE, v_BHSE = (x.repeat_interleave(group, dim=1) for x in (k_BKSE, v_BKSE))
    score_BHTS = q_BHTE @ k_BHSE.transpose(-1, -2) / math.sqrt(q_BHTE.shape[-1])
    return score_BHTS.masked_fill(~mask_BTS[:, None], -math.inf).softmax(-1) @ v_BHSE


def apply(
    block: TorchBlock,
    x_BTD: Tensor,
    position_BT: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    mask_BTS: Tensor,
) -> Tensor:
    """Output of the block, both residuals included: (B, T, D)."""
    q_BHTE = block.heads("q", block.norm("input_layernorm", x_BTD))
    q_BHTE = rotate(q_BHTE, position_BT, block.frequency)
    mixed_BTX = attend(q_BHTE, k_BKSE, v_BKSE, mask_BTS).transpose(1, 2).flatten(-2)
    return add_mlp(block, x_BTD + block.linear("self_attn.o_proj", mixed_BTX))


def add_mlp(block: TorchBlock, x_BTD: Tensor) -> Tensor:
    """The second half of a block, its residual included."""
    h_BTD = block.norm("post_attention_layernorm", x_BTD)
    gate = functional.silu(block.linear("mlp.gate_proj", h_BTD))
    return x_BTD + block.linear("mlp.down_proj", gate * block.linear("mlp.up_proj", h_BTD))


def self_attend(block: TorchBlock, x_BTD: Tensor, position_BT: Tensor, mask_BTT: Tensor) -> Tensor:
    """The block as an ordinary layer over its own input."""
    return apply(block, x_BTD, position_BT, *keys_values(block, x_BTD, position_BT), mask_BTT)


def causal(num_queries: int, num_keys: int) -> Tensor:
    """(1, T, S): the last query sees every key, each earlier one a key less."""
    return torch.ones(1, num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
