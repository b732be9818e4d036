"""One acceptance rule for plain decoding, chains and trees."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moa_jax.drafters.api import Tree

Array = jax.Array


class Verdict(NamedTuple):
    """The accepted path of each row, root first."""

    path_BN: Array  # node indices; entries from `count` on are rejected nodes
    count_B: Array  # nodes on the path, at least the root; also the tokens that a round emits
    emitted_BN: Array  # the accepted drafts, then the bonus token at count - 1


def verify_greedy(tree: Tree, logits_BNV: Array) -> Verdict:
    """Accepts a node when it and all above it are the target's argmax at their parents.

    Siblings are distinct tokens, so the accepted nodes form one path and, parents standing
    before children, in order of depth. The token that the target would choose after each of
    them is the next one on the path, or the bonus: the output is that of plain decoding
    whatever was drafted.
    """
    choice_BN = jnp.argmax(logits_BNV, axis=-1).astype(tree.tokens_BN.dtype)
    match_BN = tree.tokens_BN == jnp.take_along_axis(choice_BN, tree.parent_BN, axis=1)
    match_BN = match_BN.at[:, 0].set(True)  # the root is committed already
    accepted_BN = jnp.all(match_BN[:, None, :] | ~tree.ancestor_BNN, axis=-1)
    path_BN = jnp.argsort(~accepted_BN, axis=1, stable=True)
    count_B = jnp.sum(accepted_BN, axis=1, dtype=jnp.int32)
    return Verdict(path_BN, count_B, jnp.take_along_axis(choice_BN, path_BN, axis=1))
