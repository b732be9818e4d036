"""Losses and gradients of distillation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .blocks import Weights
from .moa import Forward, Seen, TorchDrafter, make_drafter, train_forward


def loss_of(drafter: TorchDrafter, seen: Seen, response_BT: Tensor, out: Forward) -> Tensor:
    """Compares the drafter's distribution with the target's at each answer token.

    The mean runs over the whole batch and over the answers as given, not as thinned. With N > 0 the
    loss includes the state that enters the reused layers; the error is 0 where that is the true
    state.
    """

    def mean(value_BT: Tensor) -> Tensor:
        return (value_BT * response_BT).sum() / (response_BT.sum() + 1e-5)

    def distance(x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        return mean(functional.smooth_l1_loss(x_BTD, y_BTD, reduction="none").mean(-1))

    last_BTD = seen.hidden_LBTD[-1]
    expected_BTV = drafter.logits(last_BTD).softmax(-1)
    cross_entropy = mean(-(expected_BTV * out.logits_BTV.log_softmax(-1)).sum(-1))
    feature = distance(out.feature_BTD, last_BTD)
    if out.tli_in_BTD is None:
        return 0.1 * cross_entropy + feature
    prev = distance(out.tli_in_BTD, seen.hidden_LBTD[-1 - len(drafter.reused)])
    return 0.1 * cross_entropy + 0.5 * (feature + prev)


class Sample(NamedTuple):
    """One micro-batch and its draws: the target's arrays, the masks, and the staircase rows."""

    seen: Seen
    attention_BT: Tensor
    response_BT: Tensor
    noisy_BT: Tensor
    staircase_B: Tensor


def evaluate(drafter: TorchDrafter, sample: Sample) -> tuple[Forward, Tensor]:
    out = train_forward(
        drafter, sample.seen, sample.attention_BT, sample.noisy_BT, sample.staircase_B
    )
    return out, loss_of(drafter, sample.seen, sample.response_BT, out)


def gradients(
    config: Any, target: Weights, draft: Weights, num_reused: int, sample: Sample
) -> dict[str, Tensor]:
    """Returns d loss / d tensor for every tensor of the drafter; the target is frozen."""
    own = {name: value.detach().clone().requires_grad_() for name, value in draft.items()}
    drafter = make_drafter(config, target, own, num_reused)
    found = torch.autograd.grad(evaluate(drafter, sample)[1], list(own.values()))
    return dict(zip(own, found, strict=True))
