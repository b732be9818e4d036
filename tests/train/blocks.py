"""Attention in blocks on a CPU: the kernels of accelerators, in interpret mode."""

from __future__ import annotations

import jax
import pytest

from moa_jax.model import attention
from moa_jax.model.cache import KV
from moa_jax.model.kernels import train_intervals
from moa_jax.model.kernels.train_intervals import How
from moa_jax.model.masks import IntervalMask


def in_blocks(patch: pytest.MonkeyPatch, size: int) -> list[tuple[int, ...]]:
    """Traces later programs with blocks of this size; returns the list of traced shapes."""
    calls = []

    class Kernels:
        @staticmethod
        def attend(q_BKGTE: jax.Array, kv: KV, seen: IntervalMask) -> jax.Array:
            calls.append(q_BKGTE.shape)
            how = How("tpu", size, size, is_interpreted=True)
            return train_intervals.attend(q_BKGTE, kv, seen, how)

    patch.setattr(attention, "_by_intervals", lambda q_BKGTE, kv: Kernels)
    return calls
