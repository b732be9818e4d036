"""The one interface between decoding or training and a drafter: pure functions and arrays.

A drafter sees the target only through what it borrows (weights) and what is tapped for it
(activations of verified tokens), so the same functions run beside the target, across a
network, and in training. Everything outside this package knows drafters by this file alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moa_jax import masks
from moa_jax.batch import Batch
from moa_jax.cache import KV
from moa_jax.config import DraftShape

Array = jax.Array
Params = Any
Shared = Any
Cache = Any


class Taps(NamedTuple):
    """Static: what of a target pass the drafter reads."""

    rows: bool = False  # keys and values of every layer
    streams: tuple[int, ...] = ()  # residual streams, by the layer they enter


class Tapped(NamedTuple):
    """What was tapped of T tokens; fields that were not asked for are None or ()."""

    rows_LBKTE: KV | None
    streams: tuple[Array, ...]  # (B, T, D) each
    hidden_BTD: Array  # after the target's final norm


NOTHING = -1  # the token of a node that is not there: no choice of a target equals it


class Tree(NamedTuple):
    """Tokens to verify in one target pass, parents before children; node 0 is the root.

    Siblings are distinct tokens, in the order in which they were proposed.

    tokens    root  a  b  c        depth    0 1 1 2       ancestor  x . . .
                   /  \\                                             x x . .
    parent    0    0  0  1         (c is a child of a)              x . x .
                                                                    x x . x
    """

    tokens_BN: Array  # NOTHING where drafting stopped early
    parent_BN: Array  # the root is its own parent
    depth_BN: Array
    ancestor_BNN: Array  # [i, j]: j is i or above it; a first axis of 1 serves all rows
    draft_BNV: Array | None = None  # sampled drafts: the law that each node's children came from


class Guide(NamedTuple):
    """How a round chooses candidates from a drafter's logits."""

    # (logits_BWU, tokens of the nodes above and of the node itself_BWP) -> log-probabilities_BWU
    log_law: Callable[[Array, Array], Array]
    # (nodes of a level, depth of their children, size of the vocabulary) -> Gumbel noise_BWU
    noise: Callable[[int, int, int], Array] | None
    ids_U: Array | None  # the target's ids of a draft vocabulary
    vocab_size: int
    active_B: Array  # rows that still decode


def chain(tokens_BN: Array) -> Tree:
    """The tree whose nodes are a line; a single node is plain decoding."""
    B, N = tokens_BN.shape
    index_N = jnp.arange(N, dtype=jnp.int32)
    spread = lambda row_N: jnp.broadcast_to(row_N, (B, N))  # noqa: E731
    parent_BN = spread(jnp.maximum(index_N - 1, 0))
    return Tree(tokens_BN, parent_BN, spread(index_N), masks.line(N))


class Drafter(NamedTuple):
    """A drafter for one target, closed over frozen configs.

    `extend` takes T tokens that the target has just processed and adds them to the cache at
    rows length .. length + T - 1: after prefill the prompt, after a verification the path.
    Rows that turn out unaccepted need no removal, since lengths alone say what is seen.
    `propose` drafts from the root, which stands at `length` and is in no cache.
    """

    taps: Taps
    # (target params) -> the weights the drafter reads from it
    borrow: Callable[[Params], Shared]
    # (key) -> float32 params
    init: Callable[[Array], Params]
    # (batch, rows, dtype) -> cache
    init_cache: Callable[[int, int, jnp.dtype], Cache]
    # (params, shared, cache, tokens_BT, length_B, tapped) -> cache
    extend: Callable[[Params, Shared, Cache, Array, Array, Tapped], Cache]
    # (params, shared, cache, root_B, length_B, shape, guide) -> (tree, cache)
    propose: Callable[[Params, Shared, Cache, Array, Array, DraftShape, Guide], tuple[Tree, Cache]]
    # (params, shared, batch, tapped, key, progress) -> (loss, metrics)
    loss: Callable[[Params, Shared, Batch, Tapped, Array, Array], tuple[Array, dict[str, Array]]]
    # (params, shared, batch, tapped, known_BT, horizon) -> what goes to the head (B, T, D) when the
    # drafter has target activations of known tokens only, as in decoding; right for tokens at
    # most `horizon` after the last known one
    teacher_forced: Callable[[Params, Shared, Batch, Tapped, Array, int], Array]
    # (params, shared, what goes to the head_BTD) -> float32 logits_BTU
    head: Callable[[Params, Shared, Array], Array]
    own_head: bool = False  # else `head` is the target's, and a draft vocabulary can slice it
    draft_ids: tuple[int, ...] | None = None  # target ids of the logits, if not all in order
