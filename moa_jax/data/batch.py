"""The training batch: rows of tokens with one or more conversations each.

tokens    <s> u u a a </s>  <s> u a a  .  .
segment    1  1 1 1 1  1     2  2 2 2  0  0     0 is padding, always at the end of a row
position   0  1 2 3 4  5     0  1 2 3  0  0     restarts with each conversation
response   0  0 0 1 1  1     0  0 1 1  0  0     1: token of an answer, its end mark included
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

Array = np.ndarray | jax.Array


class Batch(NamedTuple):
    """One batch, or one row without the leading axis; int32, `response_BT` bool."""

    tokens_BT: Array
    segment_BT: Array
    position_BT: Array
    response_BT: Array


class TappedBatch(NamedTuple):
    """A batch with stored activations of the target, so that training skips the target's pass."""

    tokens_BT: Array
    segment_BT: Array
    position_BT: Array
    response_BT: Array
    parts: dict[str, Array]  # (B, ...) each, as `moa_jax.training.target_cache` names them

    @property
    def batch(self) -> Batch:
        """The batch without the activations."""
        return Batch(*self[:-1])
