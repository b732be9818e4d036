"""The precision of float32 matrix products on hardware with a faster, less exact mode."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp


def matmul_precision(dtype: Any) -> contextlib.AbstractContextManager[None]:
    """Context in which float32 programs multiply in float32, not in TF32 or bfloat16."""
    if jnp.dtype(dtype) == jnp.float32:
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
