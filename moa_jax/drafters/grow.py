"""How a drafter that predicts one level at a time grows what the target will verify.

A level's tokens are fed together, each seeing its own ancestors, and every one gets children:

    static tree     children by their rank among the candidates, as a list of paths says
    chain           the static tree whose nodes are first children
    dynamic tree    the b likeliest candidates of each node; the b likeliest of all of a level
                    are fed next, and the M likeliest of all levels are what is verified

References: paper section 4 and EAGLE-2 (2406.16858) for dynamic trees; authors'
inference/moa_spec.py. Ties go to the candidate that stands first, in float32, so that a
parent is never left out for its child.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import DraftShape
from moa_jax.drafters.api import NOTHING, Cache, Guide, Tree
from moa_jax.model.branch import when

Array = jax.Array

# (cache, tokens_BW, ancestor_BWX, level) -> (logits_BWU, cache): X are the tokens fed so far,
# in order, these W last; `level` is their depth, the root's 0
Step = Callable[[Cache, Array, Array, int], tuple[Array, Any]]


class Candidates(NamedTuple):
    """The k first candidates for children of each node of a level, best first."""

    tokens_BWk: Array
    log_prob_BWk: Array
    best_BW: Array  # log-probability of the likeliest token, drawn or not
    draft_BWV: Array | None  # the law they were sampled from


def grow(
    step: Step, cache: Cache, root_B: Array, shape: DraftShape, guide: Guide
) -> tuple[Tree, Cache]:
    """The tree that `shape` asks for, from the root, and the cache with its rows written."""
    how = _grow_dynamic if shape.is_dynamic else _grow_static
    return how(step, cache, root_B, shape, guide)


# ---- candidates ---------------------------------------------------------------------------


def _expand(
    step: Step, cache: Cache, level: Level, count: int, guide: Guide, wanted_B: Array | None
) -> tuple[Candidates, Cache]:
    """Feeds one level; where no active row wants it, nothing is computed."""

    def feed(cache: Cache) -> tuple[Candidates, Cache]:
        logits_BWU, cache = step(cache, level.tokens_BW, level.ancestor_BWX, level.depth)
        return _choose(logits_BWU, level, count, guide), cache

    if wanted_B is None:
        return feed(cache)
    shapes, _ = jax.eval_shape(feed, cache)
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    wanted = jnp.any(wanted_B & guide.active_B)
    return when(wanted, lambda carry: feed(carry[1]), (nothing, cache))


def _choose(logits_BWU: Array, level: Level, count: int, guide: Guide) -> Candidates:
    """Best first; noise makes it a draw without replacement from the drafter's law."""
    log_law_BWU = guide.log_law(logits_BWU.astype(jnp.float32), level.path_BWP)
    W, U = log_law_BWU.shape[1:]
    order_BWU = log_law_BWU
    if guide.noise is not None:
        order_BWU = log_law_BWU + guide.noise(W, level.depth + 1, U)
    if count == 1:
        index_BWk = jnp.argmax(order_BWU, axis=-1, keepdims=True).astype(jnp.int32)
    else:
        index_BWk = lax.top_k(order_BWU, count)[1].astype(jnp.int32)
    log_prob_BWk = jnp.take_along_axis(log_law_BWU, index_BWk, axis=-1)
    draft_BWV = None if guide.noise is None else jnp.exp(log_law_BWU)
    if guide.ids_U is not None:
        index_BWk = guide.ids_U[index_BWk]
        if draft_BWV is not None:
            blank = jnp.zeros((*draft_BWV.shape[:2], guide.vocab_size))
            draft_BWV = blank.at[..., guide.ids_U].set(draft_BWV)
    return Candidates(index_BWk, log_prob_BWk, log_law_BWU.max(axis=-1), draft_BWV)


class Level(NamedTuple):
    """The nodes that are fed together."""

    tokens_BW: Array
    ancestor_BWX: Array  # X tokens fed so far, these last
    path_BWP: Array  # the tokens from the root to the node itself
    score_BW: Array  # log-probability of the path, by the drafter
    depth: int


def _root(root_B: Array) -> Level:
    one = jnp.ones((root_B.shape[0], 1, 1), bool)
    score_B1 = jnp.zeros((root_B.shape[0], 1), jnp.float32)
    return Level(root_B[:, None], one, root_B[:, None, None], score_B1, 0)


# ---- static trees -------------------------------------------------------------------------


def _grow_static(
    step: Step, cache: Cache, root_B: Array, shape: DraftShape, guide: Guide
) -> tuple[Tree, Cache]:
    """Nodes at fixed places; below a path that is not confident they are NOTHING."""
    paths = ((), *shape.tree_paths)
    index = {path: i for i, path in enumerate(paths)}
    parent_N = np.array([index[path[:-1]] for path in paths], np.int32)
    ancestor_NN = np.array([[path[: len(above)] == above for above in paths] for path in paths])
    has_children = set(parent_N[1:].tolist())
    bound = np.log(shape.confidence) if shape.confidence else None
    level, tokens, drafts = _root(root_B), [root_B[:, None]], []
    fed = [0]  # nodes with children, in the order in which they were fed
    for depth in range(1, shape.levels):
        wanted_B = None if bound is None else jnp.any(level.score_BW >= bound, axis=1)
        new = [i for i, path in enumerate(paths) if len(path) == depth]
        slot = np.array([fed[-level.tokens_BW.shape[1] :].index(parent_N[i]) for i in new])
        rank = np.array([paths[i][-1] for i in new])
        found, cache = _expand(step, cache, level, int(rank.max()) + 1, guide, wanted_B)
        tokens_BW = found.tokens_BWk[:, slot, rank]
        score_BW = level.score_BW[:, slot] + found.log_prob_BWk[:, slot, rank]
        if bound is not None:
            # Siblings stay or go together, by the likeliest token: never by what was drawn, for
            # a choice that depends on luck changes the law.
            best_BW = found.best_BW + level.score_BW
            keep_BW = (best_BW >= bound)[:, slot] & (level.tokens_BW[:, slot] != NOTHING)
            tokens_BW = jnp.where(keep_BW, tokens_BW, NOTHING)
            score_BW = jnp.where(keep_BW, score_BW, -jnp.inf)
        tokens.append(tokens_BW)
        drafts.append(found.draft_BWV)
        inner = [k for k, i in enumerate(new) if i in has_children]
        fed += [new[k] for k in inner]
        level = _below(level, tokens_BW, score_BW, np.array(inner, int), slot, ancestor_NN, fed)
    return _tree(tokens, parent_N, ancestor_NN, _laws(drafts, paths, fed)), cache


def _below(
    level: Level,
    tokens_BW: Array,
    score_BW: Array,
    inner: np.ndarray,
    slot: np.ndarray,
    ancestor_NN: np.ndarray,
    fed: list[int],
) -> Level:
    """The next level: those of its nodes that have children."""
    B = tokens_BW.shape[0]
    here = fed[len(fed) - len(inner) :]
    ancestor_WX = ancestor_NN[np.ix_(here, fed)]
    path_BWP = level.path_BWP[:, slot[inner]]
    return Level(
        tokens_BW[:, inner],
        jnp.broadcast_to(ancestor_WX, (B, *ancestor_WX.shape)),
        jnp.concatenate([path_BWP, tokens_BW[:, inner, None]], axis=-1),
        score_BW[:, inner],
        level.depth + 1,
    )


def _laws(drafts: list[Array | None], paths: tuple, fed: list[int]) -> Array | None:
    """The drafter's law at every node, zeros at leaves, for sampled drafts."""
    if not drafts or drafts[0] is None:
        return None
    fed_BXV = jnp.concatenate(drafts, axis=1)
    blank_BNV = jnp.zeros((fed_BXV.shape[0], len(paths), fed_BXV.shape[-1]))
    return blank_BNV.at[:, np.array(fed)].set(fed_BXV)


def _tree(
    tokens: list[Array], parent_N: np.ndarray, ancestor_NN: np.ndarray, draft_BNV: Array | None
) -> Tree:
    tokens_BN = jnp.concatenate(tokens, axis=1)
    spread = lambda row_N: jnp.broadcast_to(jnp.asarray(row_N), tokens_BN.shape)  # noqa: E731
    depth_N = ancestor_NN.sum(axis=1, dtype=np.int32) - 1
    return Tree(tokens_BN, spread(parent_N), spread(depth_N), ancestor_NN[None], draft_BNV)


# ---- dynamic trees ------------------------------------------------------------------------


class Flat(NamedTuple):
    """All candidates so far, in order of creation."""

    tokens_BX: Array
    score_BX: Array
    parent_BX: Array  # 0 the root, else 1 + the place of the parent in this list
    depth: tuple[int, ...]


def _grow_dynamic(
    step: Step, cache: Cache, root_B: Array, shape: DraftShape, guide: Guide
) -> tuple[Tree, Cache]:
    """Breadth candidates a node, the best of each level fed, the best of all verified."""
    b, bound = shape.breadth, np.log(shape.confidence) if shape.confidence else None
    level, place_BW = _root(root_B), jnp.zeros((root_B.shape[0], 1), jnp.int32)
    flats: list[Flat] = []
    for depth in range(1, shape.depth):
        wanted_B = None if bound is None else jnp.any(level.score_BW >= bound, axis=1)
        found, cache = _expand(step, cache, level, b, guide, wanted_B)
        flat = _candidates(level, place_BW, found)
        offset = sum(len(earlier.depth) for earlier in flats)
        flats.append(flat)
        if depth < shape.depth - 1:
            level, best_BW = _frontier(level, flat, b)
            place_BW = 1 + offset + best_BW
    return select(root_B, _joined(flats), shape, bound), cache


def _candidates(level: Level, place_BW: Array, found: Candidates) -> Flat:
    B, W, k = found.tokens_BWk.shape
    score_BX = (level.score_BW[..., None] + found.log_prob_BWk).reshape(B, W * k)
    parent_BX = jnp.repeat(place_BW, k, axis=1)
    depth = (level.depth + 1,) * (W * k)
    return Flat(found.tokens_BWk.reshape(B, W * k), score_BX, parent_BX, depth)


def _frontier(level: Level, flat: Flat, breadth: int) -> tuple[Level, Array]:
    """The best candidates of a level as the next one, and where they stand in it."""
    score_BW, best_BW = lax.top_k(flat.score_BX, breadth)
    W = level.tokens_BW.shape[1]
    slot_BW1 = (best_BW // (flat.score_BX.shape[1] // W))[..., None]
    tokens_BW = jnp.take_along_axis(flat.tokens_BX, best_BW, axis=1)
    above_BWX = jnp.take_along_axis(level.ancestor_BWX, slot_BW1, axis=1)
    itself_BWW = jnp.broadcast_to(jnp.eye(breadth, dtype=bool), (*best_BW.shape, breadth))
    path_BWP = jnp.take_along_axis(level.path_BWP, slot_BW1, axis=1)
    return Level(
        tokens_BW,
        jnp.concatenate([above_BWX, itself_BWW], axis=-1),
        jnp.concatenate([path_BWP, tokens_BW[..., None]], axis=-1),
        score_BW,
        level.depth + 1,
    ), best_BW.astype(jnp.int32)


def _joined(flats: list[Flat]) -> Flat:
    arrays = (jnp.concatenate(parts, axis=1) for parts in list(zip(*flats, strict=True))[:3])
    return Flat(*arrays, sum((flat.depth for flat in flats), ()))


def select(root_B: Array, flat: Flat, shape: DraftShape, bound: float | None) -> Tree:
    """The likeliest candidates in order of creation, behind the root."""
    B, X = flat.tokens_BX.shape
    score_BN, chosen_BN = lax.top_k(flat.score_BX, shape.num_drafted)
    if bound is not None:  # those that are not there come last
        chosen_BN = jnp.where(score_BN >= bound, chosen_BN, chosen_BN + X)
    chosen_BN = jnp.sort(chosen_BN, axis=1)
    there_BN, chosen_BN = chosen_BN < X, chosen_BN % X
    tokens_BN = jnp.take_along_axis(flat.tokens_BX, chosen_BN, axis=1)
    tokens_BN = jnp.where(there_BN, tokens_BN, NOTHING)
    wanted_BN = jnp.take_along_axis(flat.parent_BX, chosen_BN, axis=1)
    before_BNN = (chosen_BN + 1)[:, None, :] < wanted_BN[..., None]
    row_BN = 1 + jnp.sum(before_BNN & there_BN[:, None, :], axis=-1, dtype=jnp.int32)
    parent_BN = jnp.where(wanted_BN == 0, 0, jnp.minimum(row_BN, shape.num_drafted))
    depth_BN = jnp.asarray(np.array(flat.depth, np.int32))[chosen_BN]
    first = lambda value, rows_BN: jnp.concatenate([value, rows_BN], axis=1)  # noqa: E731
    zero_B1 = jnp.zeros((B, 1), jnp.int32)
    parent_BN = first(zero_B1, parent_BN)
    return Tree(
        first(root_B[:, None], tokens_BN),
        parent_BN,
        first(zero_B1, depth_BN),
        ancestors(parent_BN, shape.depth),
    )


def ancestors(parent_BN: Array, depth: int) -> Array:
    """The ancestor matrix (B, N, N) of a tree of `depth` levels from its parents."""
    B, N = parent_BN.shape
    itself_BNN = jnp.broadcast_to(jnp.eye(N, dtype=bool), (B, N, N))
    found_BNN = itself_BNN
    for _ in range(depth - 1):
        above_BNN = jnp.take_along_axis(found_BNN, parent_BN[..., None], axis=1)
        found_BNN = itself_BNN | above_BNN
    return found_BNN
