"""Grows the draft tree that the target verifies, one level of nodes at a time.

The drafter processes all nodes of a level at once. Each node sees its own ancestors, and the
drafter returns candidates for its children:

    static tree     a list of paths selects the candidates that become nodes, by their rank
    chain           the static tree in which every node is a first child
    dynamic tree    the b most likely candidates of a level are fed next; of the candidates of all
                    levels, the M most likely are verified

An example: a dynamic tree below the root 5, with depth 4, breadth b = 2 and M = 4. Nodes are shown
with the probability of their path from the root, in order of creation:

    level 1      7 .5     8 .4
    level 2      1 .25    2 .15      children of 7, the 1st node of level 1
                 3 .36    4 .04      children of 8, the 2nd
    level 3      6 .288   9 .036     children of 3, the most likely node of level 2
                 6 .175   2 .05      children of 1, the second most likely

`CandidateList` lists the candidates by place. A parent is 0 for the root, else 1 + the parent's
place:

    place        0    1    2    3    4    5    6     7     8     9
    tokens_BX    7    8    1    2    3    4    6     9     6     2
    score_BX     .5   .4   .25  .15  .36  .04  .288  .036  .175  .05    (log-probabilities)
    parent_BX    0    0    1    1    2    2    5     5     3     3

Level 3 is drafted from the b best candidates of level 2, which are at places 2 to 5:

    best_BW      2    0     the third candidate of the level and the first: the tokens 3 and 1
    slot_BW      1    0     best // 2, since each node has 2 candidates: the parents are the 2nd
                            and the 1st fed node; a child extends its parent's ancestors and path
    place_BW     5    3     best + 1 + 2, since level 1 has 2 candidates: parent of the children

`select` returns the tree. Node 0 is the root, so the i-th chosen place, from 0 on, is node i + 1:

    chosen_BN         0    1    4    6   the M best places, sorted, so that parents come first
    wanted_BN         0    0    2    5   the parents of these places, as in `CandidateList`
    tokens_BN    5    7    8    3    6
    parent_BN    0    0    0    2    3   last node: wanted_BN 5 is place 4; the root and 2 chosen
    depth_BN     0    1    1    2    3   places precede place 4, so the parent is node 3

Scores are float32, and the earliest candidate wins a tie, so no node is chosen without its parent.
References: paper section 4 and EAGLE-2 (2406.16858) for dynamic trees; authors'
inference/moa_spec.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import DraftShape
from moa_jax.drafters.api import Cache, CandidateSampler, Params, Shared, Tree
from moa_jax.model import masks, sharding
from moa_jax.model.topk import top_k
from moa_jax.runtime.devices import traced_platform

Array = jax.Array


class Nodes(NamedTuple):
    """W nodes that a drafter processes at once, and the lengths of its caches.

    A tree with root r, children a and b of r, and the current node c, a child of a: W 1 and X 4.

        cache row   0 ... known-1 | known ... length-1 | length   +1  +2  +3
                    verified      | fed to `draft_one` | r         a   b   c
        ancestor_BWX                                     x         x   .   x
    """

    tokens_BW: Array
    # Ancestors, including the node itself, among the X nodes fed in this round; the W nodes are
    # the last of the X. A first axis of 1 applies to all rows.
    ancestor_BWX: Array
    length_B: Array  # tokens before the root
    known_B: Array  # tokens whose target activations are in the drafter's cache
    depth: int | Array  # levels below the root: a single number, or an array (W,)

    @property
    def position_BW(self) -> Array:
        """The position of each node in its sequence."""
        return jnp.broadcast_to(self.length_B[:, None] + self.depth, self.tokens_BW.shape)

    @property
    def start_B(self) -> Array:
        """The cache row of the first of the W nodes."""
        W, X = self.ancestor_BWX.shape[1:]
        return self.length_B + X - W

    @property
    def seen(self) -> masks.CacheMask:
        """Mask of self-attention: all tokens before the root, and ancestors."""
        return masks.cache_mask(self.length_B, self.ancestor_BWX)

    @property
    def known(self) -> masks.CacheMask:
        """Mask of attention to the target's activations."""
        return masks.cache_mask(self.known_B)


# (params, shared, cache, nodes) -> (logits_BWU, cache with the rows of these nodes)
Step = Callable[[Params, Shared, Cache, Nodes], tuple[Array, Cache]]


def by_level(step: Step) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`propose` and `draft_one` of a `Drafter` whose `step` predicts the children of its nodes."""

    def propose(
        params: Params,
        shared: Shared,
        cache: Cache,
        root_B: Array,
        length_B: Array,
        shape: DraftShape,
        sampler: CandidateSampler,
    ) -> tuple[Tree, Cache]:
        def feed(
            cache: Cache, tokens_BW: Array, ancestor_BWX: Array, depth: int
        ) -> tuple[Array, Cache]:
            nodes = Nodes(tokens_BW, ancestor_BWX, length_B, length_B, depth)
            return step(params, shared, cache, nodes)

        return grow(feed, cache, root_B, shape, sampler)

    def draft_one(
        params: Params,
        shared: Shared,
        cache: Cache,
        token_B: Array,
        length_B: Array,
        known_B: Array,
    ) -> tuple[Array, Cache]:
        node = Nodes(token_B[:, None], masks.causal_tree(1), length_B, known_B, depth=0)
        logits_B1U, cache = step(params, shared, cache, node)
        return logits_B1U[:, 0], cache

    return propose, draft_one


# (cache, tokens_BW, ancestor_BWX, depth) -> (logits_BWU, cache), as in `Nodes`
Feed = Callable[[Cache, Array, Array, int], tuple[Array, Any]]


def grow(
    feed: Feed, cache: Cache, root_B: Array, shape: DraftShape, sampler: CandidateSampler
) -> tuple[Tree, Cache]:
    """Drafts a tree of `shape` from the root; returns the tree and the cache with its rows."""
    how = _grow_dynamic if shape.is_dynamic else _grow_static
    return how(feed, cache, root_B, shape, sampler)


# ---- one level ----------------------------------------------------------------------------


class Level(NamedTuple):
    """Nodes that are fed together."""

    tokens_BW: Array
    ancestor_BWX: Array  # see `Nodes`
    path_BWP: Array  # the tokens from the root to the node, inclusive
    depth: int


class Candidates(NamedTuple):
    """The first k candidates for children of each node of a level, best first."""

    tokens_BWk: Array
    log_prob_BWk: Array
    draft_BWV: Array | None  # the probs that the candidates were sampled from


def _root(root_B: Array) -> Level:
    return Level(root_B[:, None], masks.causal_tree(1), root_B[:, None, None], 0)


def _expand(
    feed: Feed, cache: Cache, level: Level, count: int, sampler: CandidateSampler
) -> tuple[Candidates, Cache]:
    """Feeds one level and chooses candidates for the children of the level's nodes."""
    logits_BWU, cache = feed(cache, level.tokens_BW, level.ancestor_BWX, level.depth)
    return _choose(logits_BWU, level, count, sampler), cache


def _choose(logits_BWU: Array, level: Level, count: int, sampler: CandidateSampler) -> Candidates:
    """The `count` best candidates, best first; with Gumbel noise, samples without replacement."""
    adjusted_BWU = sampler.adjusted(logits_BWU.astype(jnp.float32), level.path_BWP)
    if sampler.noise is None:
        index_BWk, log_prob_BWk = _top_k(adjusted_BWU, count)
        draft_BWV = None
    else:
        W, U = adjusted_BWU.shape[1:]
        _, index_BWk = top_k(adjusted_BWU + sampler.noise(W, level.depth + 1, U), count)
        log_prob_BWk = jnp.take_along_axis(adjusted_BWU, index_BWk, axis=-1)
        draft_BWV = jnp.exp(adjusted_BWU)
    # Map ids of the draft vocabulary to the target's ids.
    if sampler.ids_U is not None:
        index_BWk = sampler.ids_U[index_BWk]
        if draft_BWV is not None:
            blank = jnp.zeros((*draft_BWV.shape[:2], sampler.vocab_size))
            draft_BWV = blank.at[..., sampler.ids_U].set(draft_BWV)
    return Candidates(index_BWk, log_prob_BWk, draft_BWV)


def _top_k(logits_BWU: Array, count: int) -> tuple[Array, Array]:
    """The indices of the `count` largest logits, and their entries of `jax.nn.log_softmax`.

    The other entries are not computed. The computed entries use the arithmetic of `log_softmax`.
    """
    logit_BWk, index_BWk = top_k(logits_BWU, count)
    # Without the barrier XLA slices `most_BW1` from a sort of all logits, in 3 ms; XLA does not
    # sort a vocabulary that is split over a mesh.
    if traced_platform() == "cpu" and not sharding.on_decode_mesh():
        logit_BWk, index_BWk = lax.optimization_barrier((logit_BWk, index_BWk))
    most_BW1 = logit_BWk[..., :1]
    sum_BW1 = jnp.exp(logits_BWU - most_BW1).sum(axis=-1, keepdims=True)
    return index_BWk, (logit_BWk - most_BW1) - jnp.log(sum_BW1)


# ---- static trees -------------------------------------------------------------------------


class StaticLevel(NamedTuple):
    """The candidates that become the nodes of a level, and the nodes that are fed next.

    The levels below the root for the paths (0) (1) (1, 0) (1, 1), which are the nodes 1 to 4:

        level          1       2
        node           1  2    3  4
        slot           0  0    0  0     index of the parent among the fed nodes of the level above
        rank           0  1    0  1     index among the candidates of the parent
        fed            1                indices of this level's nodes with children: the second
        ancestor_WX    1  1             node 2 sees the root and itself; node 1 is not fed

    The slot of nodes 3 and 4 is 0 although their parent, node 2, is the second node of level 1:
    node 2 is the only fed node of that level.
    """

    slot: np.ndarray
    rank: np.ndarray
    fed: np.ndarray
    ancestor_WX: np.ndarray  # of the W nodes fed next, among the X nodes fed so far, inclusive


def static_levels(paths: tuple[tuple[int, ...], ...]) -> list[StaticLevel]:
    """The levels of a static tree below its root, from all paths except ()."""
    parents = {path[:-1] for path in paths}
    above: list[tuple[int, ...]] = [()]  # the fed nodes of the level above
    all_fed: list[tuple[int, ...]] = [()]
    levels = []
    for depth in range(1, 1 + max(map(len, paths), default=0)):
        new = [path for path in paths if len(path) == depth]
        slot = np.array([above.index(path[:-1]) for path in new])
        rank = np.array([path[-1] for path in new])
        fed = np.array([i for i, path in enumerate(new) if path in parents], int)
        above = [new[i] for i in fed]
        all_fed += above
        seen = [path[: len(other)] == other for path in above for other in all_fed]
        ancestor_WX = np.array(seen, bool).reshape(len(above), len(all_fed))
        levels.append(StaticLevel(slot, rank, fed, ancestor_WX))
    return levels


def _grow_static(
    feed: Feed, cache: Cache, root_B: Array, shape: DraftShape, sampler: CandidateSampler
) -> tuple[Tree, Cache]:
    """Grows a tree whose paths are fixed."""
    level, tokens, draft_probs = _root(root_B), [root_B[:, None]], []
    for slot, rank, fed, ancestor_WX in static_levels(shape.tree_paths):
        # 1. Feed the level above: each node of this level is a candidate of its parent.
        found, cache = _expand(feed, cache, level, int(rank.max()) + 1, sampler)
        tokens_BW = found.tokens_BWk[:, slot, rank]
        tokens.append(tokens_BW)
        draft_probs.append(found.draft_BWV)
        # 2. The nodes with children are fed next.
        path_BWP = level.path_BWP[:, slot[fed]]
        level = Level(
            tokens_BW[:, fed],
            ancestor_WX[None],
            jnp.concatenate([path_BWP, tokens_BW[:, fed, None]], axis=-1),
            level.depth + 1,
        )
    tree = static_tree(jnp.concatenate(tokens, axis=1), shape.tree_paths)
    return tree._replace(draft_BNV=_probs_of(draft_probs, shape.tree_paths)), cache


def static_tree(tokens_BN: Array, paths: tuple[tuple[int, ...], ...]) -> Tree:
    """The tree of the root and the given paths; `tokens_BN` has the root first, then the paths."""
    all_paths = ((), *paths)
    node_of = {path: node for node, path in enumerate(all_paths)}
    parent_N = np.array([node_of[path[:-1]] for path in all_paths], np.int32)
    depth_N = np.array([len(path) for path in all_paths], np.int32)
    ancestor_NN = np.array([[path[: len(a)] == a for a in all_paths] for path in all_paths])
    spread = lambda row_N: jnp.broadcast_to(jnp.asarray(row_N), tokens_BN.shape)
    return Tree(tokens_BN, spread(parent_N), spread(depth_N), ancestor_NN[None])


def _probs_of(fed: list[Array | None], paths: tuple[tuple[int, ...], ...]) -> Array | None:
    """The drafter's probs (B, N, V) at the nodes of a sampled draft, zeros at leaves; else None."""
    if not fed or fed[0] is None:
        return None
    fed_BXV = jnp.concatenate(fed, axis=1)
    blank_BNV = jnp.zeros((fed_BXV.shape[0], 1 + len(paths), fed_BXV.shape[-1]))
    parents = {path[:-1] for path in paths}
    fed_X = np.array([node for node, path in enumerate(((), *paths)) if path in parents])
    return blank_BNV.at[:, fed_X].set(fed_BXV)


# ---- dynamic trees ------------------------------------------------------------------------


class CandidateList(NamedTuple):
    """All candidates so far, in order of creation; see the example of the module."""

    tokens_BX: Array
    score_BX: Array  # log-probability of the path
    parent_BX: Array  # 0 for the root, else 1 + the parent's place in this list
    depth: tuple[int, ...]


def _grow_dynamic(
    feed: Feed, cache: Cache, root_B: Array, shape: DraftShape, sampler: CandidateSampler
) -> tuple[Tree, Cache]:
    """Drafts `breadth` candidates per node; feeds each level's best and returns the best of all."""
    B, b = root_B.shape[0], shape.breadth
    level, place_BW = _root(root_B), jnp.zeros((B, 1), jnp.int32)
    score_BW = jnp.zeros((B, 1), jnp.float32)  # log-probability of each node's path
    flats: list[CandidateList] = []
    for depth in range(1, shape.depth):
        # 1. Feed the level: every node gets b candidates.
        found, cache = _expand(feed, cache, level, b, sampler)
        # 2. Append the candidates to the list.
        num_earlier = sum(len(flat.depth) for flat in flats)
        score_BX = (score_BW[..., None] + found.log_prob_BWk).reshape(B, -1)
        parent_BX = jnp.repeat(place_BW, b, axis=1)
        depths = (depth,) * score_BX.shape[1]
        flats.append(CandidateList(found.tokens_BWk.reshape(B, -1), score_BX, parent_BX, depths))
        # 3. The b best candidates of the level are fed next.
        if depth < shape.depth - 1:
            level, score_BW, best_BW = _frontier(level, flats[-1], b)
            place_BW = 1 + num_earlier + best_BW
    # 4. The best candidates of all levels form the tree.
    arrays = (jnp.concatenate(parts, axis=1) for parts in list(zip(*flats, strict=True))[:3])
    flat = CandidateList(*arrays, sum((flat.depth for flat in flats), ()))
    return select(root_B, flat, shape), cache


def _frontier(level: Level, flat: CandidateList, breadth: int) -> tuple[Level, Array, Array]:
    """The best candidates of a level as the next level, their scores, and their places.

    The places (B, W) are indices into `flat`, which holds the candidates of this level only.
    """
    score_BW, best_BW = lax.top_k(flat.score_BX, breadth)
    candidates_each = flat.score_BX.shape[1] // level.tokens_BW.shape[1]
    slot_BW1 = (best_BW // candidates_each)[..., None]
    tokens_BW = jnp.take_along_axis(flat.tokens_BX, best_BW, axis=1)
    above_BWX = jnp.take_along_axis(level.ancestor_BWX, slot_BW1, axis=1)
    itself_BWW = jnp.broadcast_to(jnp.eye(breadth, dtype=bool), (*best_BW.shape, breadth))
    path_BWP = jnp.take_along_axis(level.path_BWP, slot_BW1, axis=1)
    below = Level(
        tokens_BW,
        jnp.concatenate([above_BWX, itself_BWW], axis=-1),
        jnp.concatenate([path_BWP, tokens_BW[..., None]], axis=-1),
        level.depth + 1,
    )
    return below, score_BW, best_BW.astype(jnp.int32)


def select(root_B: Array, flat: CandidateList, shape: DraftShape) -> Tree:
    """The tree of the most likely candidates."""
    # 1. Choose the best places, in order of creation.
    _, chosen_BN = lax.top_k(flat.score_BX, shape.num_drafted)
    chosen_BN = jnp.sort(chosen_BN, axis=1)
    tokens_BN = jnp.take_along_axis(flat.tokens_BX, chosen_BN, axis=1)
    # 2. Map parents to nodes of the tree. The root and all chosen places below the parent's place
    # precede the parent's node; for these places, 1 + place < wanted.
    wanted_BN = jnp.take_along_axis(flat.parent_BX, chosen_BN, axis=1)
    before_BNN = (chosen_BN + 1)[:, None, :] < wanted_BN[..., None]
    node_BN = 1 + jnp.sum(before_BNN, axis=-1, dtype=jnp.int32)
    parent_BN = jnp.where(wanted_BN == 0, 0, jnp.minimum(node_BN, shape.num_drafted))
    # 3. Prepend the root.
    depth_BN = jnp.asarray(np.array(flat.depth, np.int32))[chosen_BN]
    first = lambda value, rows_BN: jnp.concatenate([value, rows_BN], axis=1)
    zero_B1 = jnp.zeros((len(root_B), 1), jnp.int32)
    parent_BN = first(zero_B1, parent_BN)
    return Tree(
        first(root_B[:, None], tokens_BN),
        parent_BN,
        first(zero_B1, depth_BN),
        ancestors(parent_BN, shape.depth),
    )


def ancestors(parent_BN: Array, depth: int) -> Array:
    """The ancestor matrix (B, N, N) of a tree of `depth` levels, from its parents.

    Each iteration copies every parent's row of the previous iteration, and so adds one level.
    """
    B, N = parent_BN.shape
    itself_BNN = jnp.broadcast_to(jnp.eye(N, dtype=bool), (B, N, N))
    found_BNN = itself_BNN
    for _ in range(depth - 1):
        above_BNN = jnp.take_along_axis(found_BNN, parent_BN[..., None], axis=1)
        found_BNN = itself_BNN | above_BNN
    return found_BNN
