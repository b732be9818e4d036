"""Simulated acceptance: measures the cost of a round without trained weights."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moa_jax.decode import sampling
from moa_jax.decode.sampling import BatchSampling
from moa_jax.decode.state import RoundState, StaticConfig
from moa_jax.drafters.api import Tree

Array = jax.Array


def accept_with(probability: float, seed: int = 0) -> Callable[..., Array]:
    """Returns a `StaticConfig.token_chooser` that accepts first children with `probability`.

    Other children are rejected. The random number depends on (row, position), so a chain of depth d
    has a tau of 1 + p + ... + p^(d-1). If the child is rejected, the token is the target's argmax,
    or the next id that is not a child of the node. The logits are computed as usual.
    """

    def choose(
        setup: StaticConfig,
        batch_sampling: BatchSampling,
        round_state: RoundState,
        tree: Tree,
        logits_BNV: Array,
    ) -> Array:
        argmax_BN = jnp.argmax(logits_BNV, axis=-1).astype(jnp.int32)
        most = max(setup.shape.most_children, 1)
        child_BNk = sampling.children(tree, most)
        other_BNj = (argmax_BN[..., None] + jnp.arange(most + 1)) % logits_BNV.shape[-1]
        free_BNj = jnp.all(other_BNj[..., None] != child_BNk[:, :, None, :], axis=-1)
        first_BN1 = jnp.argmax(free_BNj, axis=-1, keepdims=True)
        other_BN = jnp.take_along_axis(other_BNj, first_BN1, axis=-1)[..., 0]
        # The random number depends only on the seed, the row and the position.
        position_BN = round_state.length_B[:, None] + tree.depth_BN
        keys_B = jax.random.split(jax.random.key(seed), position_BN.shape[0])
        one = lambda key, place: jax.random.uniform(jax.random.fold_in(key, place))
        uniform_BN = jax.vmap(jax.vmap(one, (None, 0)))(keys_B, position_BN)
        follow_BN = (uniform_BN < probability) & (child_BNk[..., 0] >= 0)
        return jnp.where(follow_BN, child_BNk[..., 0], other_BN)

    return choose
