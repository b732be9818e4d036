"""Attention in blocks on a CPU: the kernels of accelerators, interpreted."""

from __future__ import annotations

import jax
import pytest

from moa_jax.model import attention
from moa_jax.model.cache import KV
from moa_jax.model.kernels import train_intervals
from moa_jax.model.kernels.train_intervals import How
from moa_jax.model.masks import IntervalMask


def in_blocks(patch: pytest.MonkeyPatch, size: int) -> list[tuple[int, ...]]:
    """From now on programs are traced with blocks of this size; returns the shapes that came."""
    calls = []

    class Kernels:
        @staticmethod
        def attend(q_BKGTE: jax.Array, kv: KV, seen: IntervalMask) -> jax.Array:
            calls.append(q_BKGTE.shape)
            how = How("tpu", size, size, is_interpreted=True)
            return train_intervals.attend(q_BKGTE, kv, seen, how)

    patch.setattr(attention, "_by_intervals", lambda q_BKGTE, kv: Kernels)
    return calls
