"""Drafting a chain with EAGLE-1 and EAGLE-3, and EAGLE-3's loss, without caches.

This code follows the papers.

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


def _part(weights: Weights, prefix: str, sizes: Sizes) -> TorchBlock:
    inside = {name.removeprefix(prefix): x for name, x in weights.items() if prefix in name}
    frequency = rope_frequency(sizes.theta, sizes.head_dim)
    return TorchBlock(inside, sizes.head_dim, sizes.eps, frequency)


def draft(
    method: str,
    weights: Weights,
    reads: Reads,
    tokens: Sequence[int],
    count: int,
    sizes: Sizes,
) -> tuple[list[int], Tensor]:
    """Returns the next `count` tokens and their logits; the last of `tokens` is the root.

    Logits of EAGLE-3 are over the draft vocabulary.
    """
    if method == "eagle":
        layer = _eagle(weights, reads, sizes)
        return _chain(reads, reads.hidden, tokens, count, *layer, None)
    layer = _eagle3(weights, sizes)
    return _chain(reads, _fused(weights, reads), tokens, count, *layer, weights["d2t"])


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
        true_TD, score_TV = _fused(weights, reads), reads.hidden @ reads.head.T
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


def _fused(weights: Weights, reads: Reads) -> Tensor:
    return functional.linear(torch.cat(list(reads.streams), dim=-1), weights["fc.weight"])


def _eagle(weights: Weights, reads: Reads, sizes: Sizes) -> tuple[Layer, Layer]:
    """Returns the layer, a function of embeddings and previous features, and the target's head."""
    block = _part(weights, "layers.0.", sizes)

    def feature(embedding_TD: Tensor, before_TD: Tensor) -> Tensor:
        both = torch.cat([embedding_TD, before_TD], dim=-1)
        x_TD = functional.linear(both, weights["fc.weight"], weights.get("fc.bias"))
        mixed_BTX = _attention(block, x_TD[None])  # no norm at the input, as the official layer
        return add_mlp(block, x_TD + block.linear("self_attn.o_proj", mixed_BTX[0]))

    return feature, lambda x_TD: x_TD @ reads.head.T


def _eagle3(weights: Weights, sizes: Sizes) -> tuple[Layer, Layer]:
    """Returns the layer, a function of embeddings and previous features, and its own head."""
    block = _part(weights, "midlayer.", sizes)

    def feature(embedding_TD: Tensor, before_TD: Tensor) -> Tensor:
        both = [block.norm("input_layernorm", embedding_TD), block.norm("hidden_norm", before_TD)]
        mixed_TX = _attention(block, torch.cat(both, dim=-1)[None])
        return add_mlp(block, before_TD + block.linear("self_attn.o_proj", mixed_TX[0]))

    def logits(x_TD: Tensor) -> Tensor:
        return rms_norm(x_TD, weights["norm.weight"], sizes.eps) @ weights["lm_head.weight"].T

    return feature, logits


def _chain(reads, true_TD, tokens, count, feature, logits, d2t) -> tuple[list[int], Tensor]:
    tokens, seen = list(tokens), []
    verified = len(tokens) - 1
    features = [true_TD[i] for i in range(verified)]
    for _ in range(count):
        entries = range(1, len(tokens))
        embedding_TD = reads.embed[[tokens[p] for p in entries]]
        out_TD = feature(embedding_TD, torch.stack([features[p - 1] for p in entries]))
        seen.append(logits(out_TD[-1]))
        best = int(seen[-1].argmax())
        tokens.append(best if d2t is None else best + int(d2t[best]))
        features.append(out_TD[-1])
    return tokens[verified + 1 :], torch.stack(seen)


def _attention(block: TorchBlock, h_BTD: Tensor) -> Tensor:
    """Returns causal self-attention before the output product, (B, T, H E), of normed inputs."""
    T = h_BTD.shape[1]
    position_BT, mask_BTT = torch.arange(T)[None], causal(T, T)
    q, k = (rotate(block.heads(x, h_BTD), position_BT, block.frequency) for x in "qk")
    return attend(q, k, block.heads("v", h_BTD), mask_BTT).transpose(1, 2).flatten(-2)
