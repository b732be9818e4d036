"""The interface between drafters and decoding or training: pure functions and arrays.

A drafter reads two things of the target: borrowed weights, and tapped activations of verified
tokens. The same functions therefore run on the target's machine, on a client across a network, and
in training. Code outside this package uses drafters through this file only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import DraftShape
from moa_jax.data.batch import Batch
from moa_jax.model import llama, masks
from moa_jax.model.cache import KV

Array = jax.Array
Params = Any
Shared = Any
Cache = Any
Digest = Any


class TapSpec(NamedTuple):
    """Static: the activations of a target pass that the drafter reads."""

    rows: bool = False  # keys and values of every layer
    streams: tuple[int, ...] = ()  # residual streams, by the layer they enter
    hidden: bool = False  # the final-normed state; in training it is always provided


class TargetActivations(NamedTuple):
    """The activations of T tokens; parts that are not in `TapSpec` are None or ()."""

    rows_LBKTE: KV | None
    streams: tuple[Array, ...]  # (B, T, D) each
    hidden_BTD: Array | None  # after the target's final norm
    # In training with a draft vocabulary, whether the next token is in it; None: all tokens count.
    draftable_BT: Array | None = None


NO_TOKEN = -1  # no token: an absent node, or the target's choice without finite logits


class Tree(NamedTuple):
    """Tokens to verify in one target pass, parents before children; node 0 is the root.

    Siblings are distinct tokens, in the order of the drafter's candidates.

    tokens    root  a  b  c        depth    0 1 1 2       ancestor  x . . .
                   /  \\                                             x x . .
    parent    0    0  0  1         (c is a child of a)              x . x .
                                                                    x x . x
    """

    tokens_BN: Array  # NO_TOKEN for absent nodes
    parent_BN: Array  # the root is its own parent
    depth_BN: Array
    ancestor_BNN: Array  # [i, j]: j is i or an ancestor of i; a first axis of 1 applies to all rows
    draft_BNV: Array | None = None  # sampled drafts: the probs that children are sampled from


def host_tree(tokens_BN: np.ndarray, parent_BN: np.ndarray) -> Tree:
    """The tree of given tokens and parents, as host arrays."""
    B, N = tokens_BN.shape
    row_B, depth_BN = np.arange(B), np.zeros((B, N), np.int32)
    ancestor_BNN = np.broadcast_to(np.eye(N, dtype=bool), (B, N, N)).copy()
    for node in range(1, N):  # parents come first
        parent_B = parent_BN[:, node]
        depth_BN[:, node] = depth_BN[row_B, parent_B] + 1
        ancestor_BNN[:, node] |= ancestor_BNN[row_B, parent_B]
    return Tree(tokens_BN, parent_BN, depth_BN, ancestor_BNN)


class CandidateSampler(NamedTuple):
    """Selection of candidates from a drafter's logits in a round."""

    # (logits_BWU, tokens from the root to each node_BWP) -> adjusted logits_BWU; with `noise`, the
    # log-probabilities that candidates are sampled from
    adjusted: Callable[[Array, Array], Array]
    # (nodes of a level, depth of their children, size of the vocabulary) -> Gumbel noise_BWU
    noise: Callable[[int, int, int], Array] | None
    ids_U: Array | None  # the target's ids of a draft vocabulary; None: logits cover all ids
    vocab_size: int


def chain(tokens_BN: Array) -> Tree:
    """The tree in which every node has at most one child; a single node is plain decoding."""
    B, N = tokens_BN.shape
    index_N = jnp.arange(N, dtype=jnp.int32)
    spread = lambda row_N: jnp.broadcast_to(row_N, (B, N))
    parent_BN = spread(jnp.maximum(index_N - 1, 0))
    return Tree(tokens_BN, parent_BN, spread(index_N), masks.causal_tree(N))


def streams(params: Params, length_B: Array, tapped: TargetActivations) -> TargetActivations:
    """The default digest: the tapped activations, without the rows of all layers.

    A drafter that taps the rows of all layers needs another `condense`, since the rows are too
    large to store.
    """
    return tapped._replace(rows_LBKTE=None)


def target_head(params: Params, shared: Shared, feature_BTD: Array) -> Array:
    """The target's head, for a drafter without a separate head."""
    return llama.unembed(shared, feature_BTD)


# (params, shared, batch, tapped, key, progress) -> (loss, metrics)
DrafterLoss = Callable[
    [Params, Shared, Batch, TargetActivations, Array, Array], tuple[Array, dict[str, Array]]
]


class Drafter(NamedTuple):
    """A drafter for one target, closed over frozen configs.

    `condense` and `extend` take T tokens that the target has just processed, at positions length to
    length + T - 1: the prompt after prefill, the accepted path after a verification. `condense`
    reads the target's activations, and `extend` writes the digest to the cache; a network may
    connect the two. Rows of rejected tokens are not removed, since lengths determine the visible
    rows. `propose` drafts from the root, which is at position `length` and in no cache. `draft_one`
    drafts one token without the target's activations of the tokens from `known` on:

        position   0 .. known-1 | known ... length-1 | length
                   verified     | fed to `draft_one` | the token fed now
    """

    taps: TapSpec
    # (target params) -> the target weights that the drafter reads
    shared_params: Callable[[Params], Shared]
    # (key) -> float32 params
    init: Callable[[Array], Params]
    # (batch, rows, dtype) -> cache
    init_cache: Callable[[int, int, jnp.dtype], Cache]
    # (params, shared, cache, tokens_BT, length_B, digest) -> cache
    extend: Callable[[Params, Shared, Cache, Array, Array, Digest], Cache]
    # (params, shared, cache, root_B, length_B, shape, sampler) -> (tree, cache)
    propose: Callable[
        [Params, Shared, Cache, Array, Array, DraftShape, CandidateSampler], tuple[Tree, Cache]
    ]
    loss: DrafterLoss
    # (params, shared, batch, tapped, known_BT, horizon) -> head inputs (B, T, D) of a drafter that
    # has the target's activations of known tokens only, as in decoding; correct for tokens at
    # most `horizon` positions after the last known one
    teacher_forced: Callable[[Params, Shared, Batch, TargetActivations, Array, int], Array]
    # (params, shared, head inputs_BTD) -> float32 logits_BTU
    head: Callable[[Params, Shared, Array], Array] = target_head
    chains_only: bool = False  # `propose` raises InputError for a tree
    own_head: bool = False  # False: `head` is the target's, and a draft vocabulary can slice it
    draft_ids: tuple[int, ...] | None = None  # target ids of the logits, if not all in order
    # (params, length_B, tapped) -> inputs of `extend`: arrays with axis 0 B and axis -2 T
    condense: Callable[[Params, Array, TargetActivations], Digest] = streams
    condense_only: tuple[str, ...] = ()  # parts of the params that only `condense` reads
    # (params, shared, cache, token_B, length_B, known_B) -> (logits_BU, cache); None: unsupported
    draft_one: (
        Callable[[Params, Shared, Cache, Array, Array, Array], tuple[Array, Cache]] | None
    ) = None
