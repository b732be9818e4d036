"""Grows the tree that the target will verify, one level of nodes at a time.

The drafter is fed all nodes of a level at once. Each node sees its own ancestors, and gets
candidates for its children:

    static tree     a list of paths says which candidates become nodes, by their rank
    chain           the static tree in which every node is a first child
    dynamic tree    the b likeliest candidates of a level are fed next; of the candidates of all
                    levels, the M likeliest are verified

An example: a dynamic tree below the root 5, with depth 4, breadth b = 2 and M = 4. Nodes are shown
with the probability of the path that leads to them, in the order in which they were created:

    level 1      7 .5     8 .4
    level 2      1 .25    2 .15      children of 7, the 1st node of level 1
                 3 .36    4 .04      children of 8, the 2nd
    level 3      6 .288   9 .036     children of 3, the likeliest node of level 2
                 6 .175   2 .05      children of 1, the second likeliest

`Flat` lists them by place. A parent is 0 where it is the root, else 1 + its place:

    place        0    1    2    3    4    5    6     7     8     9
    tokens_BX    7    8    1    2    3    4    6     9     6     2
    score_BX     .5   .4   .25  .15  .36  .04  .288  .036  .175  .05    (log-probabilities)
    parent_BX    0    0    1    1    2    2    5     5     3     3

How level 3 came about: the b best candidates of level 2, which are at places 2 to 5, were fed.

    best_BW      2    0     the third candidate of the level and the first: the tokens 3 and 1
    slot_BW      1    0     best // 2, since each node has 2 candidates: their parents are the 2nd
                            node that was fed and the 1st, whose ancestors and path they take on
    place_BW     5    3     best + 1 + 2, since 2 candidates came earlier: their children's parent

What `select` makes of it. Node 0 is the root, so the i-th chosen place, from 0 on, is node i + 1:

    chosen_BN         0    1    4    6   the M best places, sorted, so that parents come first
    wanted_BN         0    0    2    5   their parents, as in `Flat`
    tokens_BN    5    7    8    3    6
    parent_BN    0    0    0    2    3   the last node: its 5 means place 4; the root and 2 chosen
    depth_BN     0    1    1    2    3   places come before that, so its parent is node 3

Scores are float32, and of equal scores the candidate that was created first wins, so no node is
chosen without its parent. References: paper section 4 and EAGLE-2 (2406.16858) for dynamic trees;
authors' inference/moa_spec.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import DraftShape
from moa_jax.drafters.api import Cache, Guide, Params, Shared, Tree
from moa_jax.model import masks, sharding
from moa_jax.model.pieces import top_k
from moa_jax.runtime.devices import traced_platform

Array = jax.Array


class Nodes(NamedTuple):
    """W nodes that are fed to a drafter at once, and the lengths of its caches.

    A tree with root r, its children a and b, and now c, the child of a: W is 1 and X is 4.

        cache row   0 ... known-1 | known ... length-1 | length   +1  +2  +3
                    verified      | fed to `go_on`     | r         a   b   c
        ancestor_BWX                                     x         x   .   x
    """

    tokens_BW: Array
    # Among the X nodes fed in this round, which these W end; with itself. A first axis of 1
    # serves all rows.
    ancestor_BWX: Array
    length_B: Array  # tokens before the root
    known_B: Array  # tokens whose target activations the drafter has seen
    depth: int | Array  # levels below the root: one number, or one for each node (W)

    @property
    def position_BW(self) -> Array:
        """The position of each node in the text."""
        return jnp.broadcast_to(self.length_B[:, None] + self.depth, self.tokens_BW.shape)

    @property
    def start_B(self) -> Array:
        """The cache row of the first of these nodes."""
        W, X = self.ancestor_BWX.shape[1:]
        return self.length_B + X - W

    @property
    def seen(self) -> masks.Sight:
        """Mask of self-attention: the tokens before the root, and ancestors."""
        return masks.sight(self.length_B, self.ancestor_BWX)

    @property
    def known(self) -> masks.Sight:
        """Mask of the attention to the target's activations."""
        return masks.sight(self.known_B)


# (params, shared, cache, nodes) -> (logits_BWU, cache with the rows of these nodes)
Step = Callable[[Params, Shared, Cache, Nodes], tuple[Array, Cache]]


def by_level(step: Step) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`propose` and `go_on` of a `Drafter` that predicts the children of all nodes it is fed."""

    def propose(
        params: Params,
        shared: Shared,
        cache: Cache,
        root_B: Array,
        length_B: Array,
        shape: DraftShape,
        guide: Guide,
    ) -> tuple[Tree, Cache]:
        def feed(
            cache: Cache, tokens_BW: Array, ancestor_BWX: Array, depth: int
        ) -> tuple[Array, Cache]:
            nodes = Nodes(tokens_BW, ancestor_BWX, length_B, length_B, depth)
            return step(params, shared, cache, nodes)

        return grow(feed, cache, root_B, shape, guide)

    def go_on(
        params: Params,
        shared: Shared,
        cache: Cache,
        token_B: Array,
        length_B: Array,
        known_B: Array,
    ) -> tuple[Array, Cache]:
        node = Nodes(token_B[:, None], masks.line(1), length_B, known_B, depth=0)
        logits_B1U, cache = step(params, shared, cache, node)
        return logits_B1U[:, 0], cache

    return propose, go_on


# (cache, tokens_BW, ancestor_BWX, depth) -> (logits_BWU, cache), as in `Nodes`
Feed = Callable[[Cache, Array, Array, int], tuple[Array, Any]]


def grow(
    feed: Feed, cache: Cache, root_B: Array, shape: DraftShape, guide: Guide
) -> tuple[Tree, Cache]:
    """The tree that `shape` asks for, from the root, and the cache with its rows written."""
    how = _grow_dynamic if shape.is_dynamic else _grow_static
    return how(feed, cache, root_B, shape, guide)


# ---- one level ----------------------------------------------------------------------------


class Level(NamedTuple):
    """The nodes that are fed together."""

    tokens_BW: Array
    ancestor_BWX: Array  # see `Nodes`
    path_BWP: Array  # the tokens from the root to the node itself
    depth: int


class Candidates(NamedTuple):
    """The first k candidates for children of each node of a level, best first."""

    tokens_BWk: Array
    log_prob_BWk: Array
    draft_BWV: Array | None  # the law that they were drawn from


def _root(root_B: Array) -> Level:
    return Level(root_B[:, None], masks.line(1), root_B[:, None, None], 0)


def _expand(
    feed: Feed, cache: Cache, level: Level, count: int, guide: Guide
) -> tuple[Candidates, Cache]:
    """Feeds one level and chooses candidates for the children of its nodes."""
    logits_BWU, cache = feed(cache, level.tokens_BW, level.ancestor_BWX, level.depth)
    return _choose(logits_BWU, level, count, guide), cache


def _choose(logits_BWU: Array, level: Level, count: int, guide: Guide) -> Candidates:
    """The `count` best, best first; Gumbel noise makes them a draw without replacement."""
    adjusted_BWU = guide.adjusted(logits_BWU.astype(jnp.float32), level.path_BWP)
    if guide.noise is None:
        index_BWk, log_prob_BWk = _likeliest(adjusted_BWU, count)
        draft_BWV = None
    else:
        W, U = adjusted_BWU.shape[1:]
        _, index_BWk = top_k(adjusted_BWU + guide.noise(W, level.depth + 1, U), count)
        log_prob_BWk = jnp.take_along_axis(adjusted_BWU, index_BWk, axis=-1)
        draft_BWV = jnp.exp(adjusted_BWU)
    # Ids of the draft vocabulary become the target's.
    if guide.ids_U is not None:
        index_BWk = guide.ids_U[index_BWk]
        if draft_BWV is not None:
            blank = jnp.zeros((*draft_BWV.shape[:2], guide.vocab_size))
            draft_BWV = blank.at[..., guide.ids_U].set(draft_BWV)
    return Candidates(index_BWk, log_prob_BWk, draft_BWV)


def _likeliest(logits_BWU: Array, count: int) -> tuple[Array, Array]:
    """The places of the `count` largest logits, and their entries of `jax.nn.log_softmax`.

    The rest of that is never made. What is made is made with the same arithmetic.
    """
    logit_BWk, index_BWk = top_k(logits_BWU, count)
    # Else XLA cuts the first from a sort of all logits, in 3 ms; of a cut vocabulary it has none.
    if traced_platform() == "cpu" and not sharding.is_cut():
        logit_BWk, index_BWk = lax.optimization_barrier((logit_BWk, index_BWk))
    most_BW1 = logit_BWk[..., :1]
    sum_BW1 = jnp.exp(logits_BWU - most_BW1).sum(axis=-1, keepdims=True)
    return index_BWk, (logit_BWk - most_BW1) - jnp.log(sum_BW1)


# ---- static trees -------------------------------------------------------------------------


class StaticLevel(NamedTuple):
    """Which candidates become the nodes of a level, and which of these are fed next.

    The levels below the root for the paths (0) (1) (1, 0) (1, 1), which are the nodes 1 to 4:

        level          1       2
        node           1  2    3  4
        slot           0  0    0  0     which node of the level above, of those that were fed
        rank           0  1    0  1     which of its candidates
        fed            1                which nodes of this level have children: the second
        ancestor_WX    1  1             it sees the root and itself; node 1 is not fed

    The slot of nodes 3 and 4 is 0 although their parent is the second of its level: it is the
    only one that was fed, so its candidates are the only ones.
    """

    slot: np.ndarray
    rank: np.ndarray
    fed: np.ndarray
    ancestor_WX: np.ndarray  # of the nodes fed next, among all X fed by then


def static_levels(paths: tuple[tuple[int, ...], ...]) -> list[StaticLevel]:
    """The levels of a static tree below its root, from all its paths but ()."""
    parents = {path[:-1] for path in paths}
    above: list[tuple[int, ...]] = [()]  # what was fed of the level above
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
    feed: Feed, cache: Cache, root_B: Array, shape: DraftShape, guide: Guide
) -> tuple[Tree, Cache]:
    """Nodes at fixed places."""
    level, tokens, laws = _root(root_B), [root_B[:, None]], []
    for slot, rank, fed, ancestor_WX in static_levels(shape.tree_paths):
        # 1. Feed the level above: each node of this one is a candidate of its parent.
        found, cache = _expand(feed, cache, level, int(rank.max()) + 1, guide)
        tokens_BW = found.tokens_BWk[:, slot, rank]
        tokens.append(tokens_BW)
        laws.append(found.draft_BWV)
        # 2. The nodes that have children are fed next.
        path_BWP = level.path_BWP[:, slot[fed]]
        level = Level(
            tokens_BW[:, fed],
            ancestor_WX[None],
            jnp.concatenate([path_BWP, tokens_BW[:, fed, None]], axis=-1),
            level.depth + 1,
        )
    tree = static_tree(jnp.concatenate(tokens, axis=1), shape.tree_paths)
    return tree._replace(draft_BNV=_laws(laws, shape.tree_paths)), cache


def static_tree(tokens_BN: Array, paths: tuple[tuple[int, ...], ...]) -> Tree:
    """The tree of a root and these paths below it, with its tokens in that order."""
    all_paths = ((), *paths)
    node_of = {path: node for node, path in enumerate(all_paths)}
    parent_N = np.array([node_of[path[:-1]] for path in all_paths], np.int32)
    depth_N = np.array([len(path) for path in all_paths], np.int32)
    ancestor_NN = np.array([[path[: len(a)] == a for a in all_paths] for path in all_paths])
    spread = lambda row_N: jnp.broadcast_to(jnp.asarray(row_N), tokens_BN.shape)
    return Tree(tokens_BN, spread(parent_N), spread(depth_N), ancestor_NN[None])


def _laws(fed: list[Array | None], paths: tuple[tuple[int, ...], ...]) -> Array | None:
    """For sampled drafts, the drafter's law at every node (B, N, V): zeros at leaves."""
    if not fed or fed[0] is None:
        return None
    fed_BXV = jnp.concatenate(fed, axis=1)
    blank_BNV = jnp.zeros((fed_BXV.shape[0], 1 + len(paths), fed_BXV.shape[-1]))
    parents = {path[:-1] for path in paths}
    fed_X = np.array([node for node, path in enumerate(((), *paths)) if path in parents])
    return blank_BNV.at[:, fed_X].set(fed_BXV)


# ---- dynamic trees ------------------------------------------------------------------------


class Flat(NamedTuple):
    """All candidates so far, in order of creation; the example above shows one."""

    tokens_BX: Array
    score_BX: Array  # log-probability of the path
    parent_BX: Array  # 0 the root, else 1 + the parent's place in this list
    depth: tuple[int, ...]


def _grow_dynamic(
    feed: Feed, cache: Cache, root_B: Array, shape: DraftShape, guide: Guide
) -> tuple[Tree, Cache]:
    """`breadth` candidates a node; the best of each level are fed, the best of all verified."""
    B, b = root_B.shape[0], shape.breadth
    level, place_BW = _root(root_B), jnp.zeros((B, 1), jnp.int32)
    score_BW = jnp.zeros((B, 1), jnp.float32)  # log-probability of each node's path
    flats: list[Flat] = []
    for depth in range(1, shape.depth):
        # 1. Feed the level: every node gets b candidates.
        found, cache = _expand(feed, cache, level, b, guide)
        # 2. Append them to the list.
        num_earlier = sum(len(flat.depth) for flat in flats)
        score_BX = (score_BW[..., None] + found.log_prob_BWk).reshape(B, -1)
        parent_BX = jnp.repeat(place_BW, b, axis=1)
        depths = (depth,) * score_BX.shape[1]
        flats.append(Flat(found.tokens_BWk.reshape(B, -1), score_BX, parent_BX, depths))
        # 3. The b best of them are fed next.
        if depth < shape.depth - 1:
            level, score_BW, best_BW = _frontier(level, flats[-1], b)
            place_BW = 1 + num_earlier + best_BW
    # 4. The best of all levels are the tree.
    arrays = (jnp.concatenate(parts, axis=1) for parts in list(zip(*flats, strict=True))[:3])
    flat = Flat(*arrays, sum((flat.depth for flat in flats), ()))
    return select(root_B, flat, shape), cache


def _frontier(level: Level, flat: Flat, breadth: int) -> tuple[Level, Array, Array]:
    """The best candidates below a level as the next level, their scores, and their places.

    The places (B, W) are those within `flat`, which holds the candidates of this level alone.
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


def select(root_B: Array, flat: Flat, shape: DraftShape) -> Tree:
    """The tree of the most likely candidates."""
    # 1. The best places in order of creation.
    _, chosen_BN = lax.top_k(flat.score_BX, shape.num_drafted)
    chosen_BN = jnp.sort(chosen_BN, axis=1)
    tokens_BN = jnp.take_along_axis(flat.tokens_BX, chosen_BN, axis=1)
    # 2. Parents as nodes of the tree. Before a parent's node come the root and all chosen places
    # that are smaller than its own; for these 1 + place < wanted.
    wanted_BN = jnp.take_along_axis(flat.parent_BX, chosen_BN, axis=1)
    before_BNN = (chosen_BN + 1)[:, None, :] < wanted_BN[..., None]
    node_BN = 1 + jnp.sum(before_BNN, axis=-1, dtype=jnp.int32)
    parent_BN = jnp.where(wanted_BN == 0, 0, jnp.minimum(node_BN, shape.num_drafted))
    # 3. The root in front.
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

    Each turn copies every parent's row of the turn before, and so reaches one level further up.
    """
    B, N = parent_BN.shape
    itself_BNN = jnp.broadcast_to(jnp.eye(N, dtype=bool), (B, N, N))
    found_BNN = itself_BNN
    for _ in range(depth - 1):
        above_BNN = jnp.take_along_axis(found_BNN, parent_BN[..., None], axis=1)
        found_BNN = itself_BNN | above_BNN
    return found_BNN
