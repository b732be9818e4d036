"""Plain decoding without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], limit: int) -> list[int]:
    """Returns the prompt and `limit` new tokens."""
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens
