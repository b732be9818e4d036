"""One acceptance rule for plain decoding, chains and trees, greedy and sampled."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moa_jax.drafters.api import Tree

Array = jax.Array


class VerifyResult(NamedTuple):
    """The accepted path of each row, root first; D is the number of levels."""

    path_BD: Array  # node indices; entries from `count` on are undefined
    count_B: Array  # nodes on the path, at least the root; also the number of emitted tokens
    emitted_BD: Array  # the accepted drafts, then the bonus token at count - 1


def verify(tree: Tree, choice_BN: Array, levels: int) -> VerifyResult:
    """Accepts a node if the node and all its ancestors equal the target's choice at their parents.

    `choice_BN` is the target's token after each node: the argmax, or a sample from the target's
    distribution. Siblings are distinct tokens, so the accepted nodes form one path with one node
    per level. The choice at a node of the path is the next node's token or the bonus token, so
    the output is that of plain decoding for any draft.
    """
    match_BN = tree.tokens_BN == jnp.take_along_axis(choice_BN, tree.parent_BN, axis=1)
    match_BN = match_BN.at[:, 0].set(True)  # the root is committed already
    accepted_BN = jnp.all(match_BN[:, None, :] | ~tree.ancestor_BNN, axis=-1)
    count_B = jnp.sum(accepted_BN, axis=1, dtype=jnp.int32)
    level_BDN = tree.depth_BN[:, None, :] == jnp.arange(levels)[:, None]
    path_BD = jnp.argmax(accepted_BN[:, None, :] & level_BDN, axis=-1)
    return VerifyResult(path_BD, count_B, jnp.take_along_axis(choice_BN, path_BD, axis=1))
