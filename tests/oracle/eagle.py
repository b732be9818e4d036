"""EAGLE-3's loss, without caches.

This code follows the paper, and vLLM's llama_eagle3.py in norms that the paper does not have. Norms
with weights are applied if the weights are there.

Entry p is made of the token at position p and the feature of position p - 1: the target's if that
position is verified, else the drafter's own. Position 0 has no entry. RoPE counts positions only by
their differences, so it does not matter that implementations count entries differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .blocks import TorchBlock, add_mlp, attend, causal, rms_norm, rope_frequency, rotate

Weights = Mapping[str, Tensor]
Layer = Callable[..., Tensor]


class Reads(NamedTuple):
    """The target's arrays that a drafter reads, (T, D) each but the two tables (V, D)."""

    hidden: Tensor  # after the final norm
    streams: Sequence[Tensor]  # that enter the three tapped layers
    embed: Tensor
    head: Tensor


class Sizes(NamedTuple):
    """Settings that the shapes of weights do not determine."""

    head_dim: int
    eps: float
    theta: float
    norm_before_residual: bool = False
    norm_output: bool = False


class LearntConversation(NamedTuple):
    """A conversation for training: its tokens, the target's arrays, and its answers."""

    tokens: Sequence[int]
    reads: Reads
    answer: Sequence[bool]


def loss_eagle3(
    weights: Weights,
    conversations: Sequence[LearntConversation],
    steps: int,
    decay: float,
    sizes: Sizes,
) -> Tensor:
    """Returns the cross-entropy of the training-time test; pass j has the weight `decay` ** j.

    Pass j drafts each token as the (j + 1)-th of a round. The loss is the mean over answer tokens
    with an entry before their round. A token adds 0 if the target's argmax is not in the draft
    vocabulary.
    """
    feature, logits = _eagle3(weights, sizes)
    ids_U = torch.arange(len(weights["d2t"])) + weights["d2t"]
    total, asked = [torch.zeros(()) for _ in range(steps)], [1e-5] * steps
    for tokens, reads, answer in conversations:
        true_TD, score_TV = _fused(weights, reads, sizes.eps), reads.hidden @ reads.head.T
        law_TU, own = score_TV[:, ids_U].softmax(-1), {}
        for j in range(steps):
            for p in range(j + 1, len(tokens)):
                root = p - j  # the last entry that is fed with the target's feature
                drafted = [own[i, root + i] for i in range(j)]
                before_PD = torch.stack([*true_TD[:root], *drafted])
                own[j, p] = feature(reads.embed[list(tokens[1 : p + 1])], before_PD)[-1]
                asked[j] += bool(answer[p])
                if answer[p] and weights["t2d"][score_TV[p].argmax()]:
                    total[j] = total[j] - law_TU[p] @ logits(own[j, p]).log_softmax(-1)
    shares = [decay**j for j in range(steps)]
    return sum(w * x / n for w, x, n in zip(shares, total, asked, strict=True)) / sum(shares)


def _fused(weights: Weights, reads: Reads, eps: float) -> Tensor:
    normed = lambda x, name: rms_norm(x, weights[name], eps) if name in weights else x
    streams = [normed(x, f"fc_norm.{i}.weight") for i, x in enumerate(reads.streams)]
    joined = normed(torch.cat(streams, dim=-1), "input_norm.weight")
    return functional.linear(joined, weights["fc.weight"])


def _eagle3(weights: Weights, sizes: Sizes) -> tuple[Layer, Layer]:
    """Returns the layer, a function of embeddings and previous features, and its own head."""
    inside = {
        name.removeprefix("midlayer."): x for name, x in weights.items() if "midlayer." in name
    }
    frequency = rope_frequency(sizes.theta, sizes.head_dim)
    block = TorchBlock(inside, sizes.head_dim, sizes.eps, frequency)

    def feature(embedding_TD: Tensor, before_TD: Tensor) -> Tensor:
        both = [block.norm("input_layernorm", embedding_TD), block.norm("hidden_norm", before_TD)]
        mixed_TX = _attention(block, torch.cat(both, dim=-1)[None])
        start_TD = both[1] if sizes.norm_before_residual else before_TD
        x_TD = add_mlp(block, start_TD + block.linear("self_attn.o_proj", mixed_TX[0]))
        return last_norm(x_TD) if sizes.norm_output else x_TD

    def last_norm(x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, weights["norm.weight"], sizes.eps)

    def logits(x_TD: Tensor) -> Tensor:
        return (x_TD if sizes.norm_output else last_norm(x_TD)) @ weights["lm_head.weight"].T

    return feature, logits


def _attention(block: TorchBlock, h_BTD: Tensor) -> Tensor:
    """Returns causal self-attention before the output product, (B, T, H E), of normed inputs."""
    T = h_BTD.shape[1]
    position_BT, mask_BTT = torch.arange(T)[None], causal(T, T)
    q, k = (rotate(block.heads(x, h_BTD), position_BT, block.frequency) for x in "qk")
    return attend(q, k, block.heads("v", h_BTD), mask_BTT).transpose(1, 2).flatten(-2)
