"""Mixture of Attentions (arXiv 2410.03804, section 3): the drafter and its training forward.

    target K, V of all layers --LSA, mean over layers--> Ekv2E --> memory ----+
                                                                              v
    token embeddings ------------------SA---------------------------------> CA --> feature
                                                                              |
                                       N > 0: the target's last N layers <----+

A feature imitates the target's last (normed) hidden state, so the target's head reads it.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from . import blocks
from .blocks import TorchBlock, Weights, apply, causal, keys_values, self_attend


class Seen(NamedTuple):
    """The arrays of the frozen target that a drafter reads, for every token of a batch.

    `hidden_LBTD` has L+1 entries: the embeddings, the outputs of layers 1..L-1, and last the output
    of layer L *after* the final norm. Keys are rotated, as in the target's cache.
    """

    hidden_LBTD: Tensor
    key_LBKTE: Tensor
    value_LBKTE: Tensor


@torch.no_grad()
def observe(model: Any, tokens_BT: Tensor, attention_BT: Tensor | None = None) -> Seen:
    """Runs a transformers causal LM from scratch on right-padded tokens."""
    every = transformers.DynamicCache()  # keeps all rows of layers with a sliding window, too
    names = inspect.signature(model.forward).parameters
    given = {"cache" if "cache" in names else "past_key_values": every, "use_cache": True}
    out = model(tokens_BT, attention_mask=attention_BT, output_hidden_states=True, **given)
    keys, values = (
        torch.stack([getattr(x, name) for x in every.layers]) for name in ("keys", "values")
    )
    return Seen(torch.stack(out.hidden_states), keys, values)


@dataclasses.dataclass(frozen=True)
class TorchDrafter:
    """The drafter's own parts, and the parts that it borrows from the target."""

    sa: TorchBlock
    ca: TorchBlock
    lsa: TorchBlock
    ekv2e: tuple[Tensor, Tensor]  # weight (D, M) and bias (D,)
    reused: tuple[TorchBlock, ...]  # the target's last N layers
    embed_VD: Tensor
    final_norm_D: Tensor
    head_VD: Tensor

    def logits(self, feature_BTD: Tensor) -> Tensor:
        return feature_BTD @ self.head_VD.T


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def memory_width(config: Any) -> int:
    """Returns M: one layer's flattened keys and values of one token."""
    return 2 * config.num_key_value_heads * head_dim_of(config)


def make_drafter(config: Any, target: Weights, draft: Weights, num_reused: int) -> TorchDrafter:
    """Joins weights under checkpoint names; `config` is the target's, as transformers 5 reads it.

    Only SA and the target's own layers turn at the target's *scaled* frequencies; CA and LSA
    turn at the plain ones of the same theta (reference 1.8).
    """
    head_dim, rope = head_dim_of(config), config.rope_parameters
    lsa_dim = memory_width(config) // config.num_attention_heads
    theta = rope["rope_theta"]
    scaled = blocks.rope_frequency(theta, head_dim, rope)

    def block(weights: Weights, prefix: str, head_dim: int, frequency: Tensor) -> TorchBlock:
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        return TorchBlock(own, head_dim, config.rms_norm_eps, frequency)

    layers = range(config.num_hidden_layers - num_reused, config.num_hidden_layers)
    embed_VD = target["model.embed_tokens.weight"]
    return TorchDrafter(
        sa=block(draft, "self_attention.", head_dim, scaled),
        ca=block(draft, "cross_attention.", head_dim, blocks.rope_frequency(theta, head_dim)),
        lsa=block(draft, "layer_self_attention.", lsa_dim, blocks.rope_frequency(theta, lsa_dim)),
        ekv2e=(draft["Ekv2E.weight"], draft["Ekv2E.bias"]),
        reused=tuple(block(target, f"model.layers.{i}.", head_dim, scaled) for i in layers),
        embed_VD=embed_VD,
        final_norm_D=target["model.norm.weight"],
        head_VD=target.get("lm_head.weight", embed_VD),
    )


def memory_of(drafter: TorchDrafter, key_LBKTE: Tensor, value_LBKTE: Tensor) -> Tensor:
    """Returns one vector per token from the target's keys and values of all layers (LSA, Ekv2E).

    A token's row for one layer is [key head 0, value head 0, key head 1, ...]. LSA attends over the
    layers of that token alone, at positions 0..L-1, without a mask.
    """
    pair_LBKTX = torch.cat([key_LBKTE, value_LBKTE], dim=-1)
    flat_BTLM = pair_LBKTX.permute(1, 3, 0, 2, 4).flatten(-2)
    rows_XLM = flat_BTLM.flatten(0, 1)
    num_rows, num_layers, _ = rows_XLM.shape
    position_XL = torch.arange(num_layers).expand(num_rows, -1)
    everything = torch.ones(1, num_layers, num_layers, dtype=torch.bool)
    lsa_BTLM = self_attend(drafter.lsa, rows_XLM, position_XL, everything).view_as(flat_BTLM)
    weight_DM, bias_D = drafter.ekv2e
    return lsa_BTLM.mean(dim=2) @ weight_DM.T + bias_D


def noisy_response(response_BT: Tensor, every_B: Tensor) -> Tensor:
    """Variable future length: each `every`-th token, counted from 0, becomes a known token."""
    index_T = torch.arange(response_BT.shape[1])
    return response_BT * (index_T[None] % every_B[:, None] != 0)


def draft_masks(noisy_BT: Tensor, staircase_B: Tensor) -> tuple[Tensor, Tensor]:
    """SA and CA masks, each (B, T, T), of a noisy response (0 marks a known token).

    A drafted token attends to the memory up to `start`, the last known token at or before its own:

        r~        0 0 1 1 0 1      CA    x . . . . .    SA staircase   x . . . . .
        start     0 1 1 1 4 4            x x . . . .                   . x . . . .
                                         x x . . . .                   . . x . . .
                                         x x . . . .                   . . x x . .
                                         x x x x x .                   . . . . x .
                                         x x x x x .                   . . . . . x

    Plain SA is causal. The staircase hides from SA the tokens that CA can see.
    """
    index_T = torch.arange(noisy_BT.shape[1])
    start_BT = torch.where(noisy_BT == 0, index_T, 0).cummax(dim=1).values
    query, key, start = index_T[None, :, None], index_T[None, None, :], start_BT[:, :, None]
    plain = key <= query
    staircase = plain & ((key > start) | (key == query))
    return torch.where(staircase_B[:, None, None], staircase, plain), key <= start


class Forward(NamedTuple):
    """The intermediate results of the training forward; `tli_in_BTD` is None where N is 0."""

    memory_BTD: Tensor
    sa_BTD: Tensor
    ca_BTD: Tensor
    tli_in_BTD: Tensor | None
    feature_BTD: Tensor
    logits_BTV: Tensor


def train_forward(
    drafter: TorchDrafter,
    seen: Seen,
    attention_BT: Tensor,
    noisy_BT: Tensor,
    staircase_B: Tensor,
) -> Forward:
    """Drafts at every position at once, as decoding would (section 3.3, T-step bounded mask).

    `noisy_BT` is the response mask, thinned by `noisy_response` or not. With N > 0 the reused
    layers see the true states of known tokens and the drafter's own states elsewhere.
    """
    position_BT = attention_BT.cumsum(dim=1) - 1
    sa_mask, ca_mask = draft_masks(noisy_BT, staircase_B)
    memory_BTD = memory_of(drafter, seen.key_LBKTE, seen.value_LBKTE)
    sa_BTD = self_attend(drafter.sa, seen.hidden_LBTD[0], position_BT, sa_mask)
    memory_kv = keys_values(drafter.ca, memory_BTD, position_BT)
    ca_BTD = apply(drafter.ca, sa_BTD, position_BT, *memory_kv, ca_mask)
    if not drafter.reused:
        return Forward(memory_BTD, sa_BTD, ca_BTD, None, ca_BTD, drafter.logits(ca_BTD))
    true_BTD = seen.hidden_LBTD[-1 - len(drafter.reused)]
    tli_in_BTD = x_BTD = torch.where(noisy_BT[:, :, None] == 0, true_BTD, ca_BTD)
    for layer in drafter.reused:
        x_BTD = self_attend(layer, x_BTD, position_BT, causal(*noisy_BT.shape[1:] * 2))
    feature_BTD = blocks.rms_norm(x_BTD, drafter.final_norm_D, drafter.sa.eps)
    logits_BTV = drafter.logits(feature_BTD)
    return Forward(memory_BTD, sa_BTD, ca_BTD, tli_in_BTD, feature_BTD, logits_BTV)
