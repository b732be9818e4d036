"""How a drafter that predicts one level at a time grows what the target will verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moa_jax.drafters.api import Cache, Tree, chain

Array = jax.Array

# (cache, tokens_BW, step) -> (logits_BWV, cache): `step` counts levels from the root's, 0
Step = Callable[[Cache, Array, int], tuple[Array, Any]]


def grow_chain(step: Step, cache: Cache, root_B: Array, num_drafted: int) -> tuple[Tree, Cache]:
    """The root and `num_drafted` tokens after it, each the likeliest after the one before."""
    tokens = [root_B]
    for index in range(num_drafted):
        logits_B1V, cache = step(cache, tokens[-1][:, None], index)
        tokens.append(jnp.argmax(logits_B1V[:, 0], axis=-1).astype(root_B.dtype))
    return chain(jnp.stack(tokens, axis=1)), cache
