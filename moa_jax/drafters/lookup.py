"""Prompt lookup: drafts what followed the last tokens the last time they occurred in the text.

    text        the cat sat . so the cat | sat . so      root: cat, the last token that is known
                --- ===          --- ===                 its longest match is earlier in the
                        ........                         text; what followed that is drafted

A match is the root with as many tokens before it as possible, from `longest_match` down to
`shortest_match`; of equally long matches the latest counts. Where what followed a match runs into
the end of the text, it goes on with its own tokens, so a text that repeats is drafted to any depth.
For trees the continuations of several matches are merged. There are no weights, so there is nothing
to load and nothing to train. There are no probabilities either, so candidates are never drawn.

An example: a tree of depth D + 1 = 3 from the R = 2 best matches. The root is the token 1 at place
6, the end of the text; what stands behind it is left over from an earlier round:

    place            0  1  2  3  4  5  6 | 7
    text_BS          1  4  6  1  4  5  1 | 9
    count_BS         1  0  0  1  0  0  0   0     places 0 and 3 match by one token: nothing is
                                                 before 0, and before 3 is a 6, not a 5
    score_BS         8 -1 -1 11 -1 -1 -1  -1     count * 8 + place: the longest, then the latest

What follows place i is at i + 1, i + 2, ..., as long as this is in the text. The places i + 1 to 6
are 6 - i tokens, which then repeat: token j, from 0 on, is the one at i + 1 + j % (6 - i):

    place 0          1  2                        4 6
    place 3          4  5                        4 5
    place 5          6  6                        1 1: no match, but it shows how the root repeats

`merge` puts the continuations into a `Trie`, the best first, and tells which tokens are new nodes:

    tokens_BRD       4  5   4  6                 what follows place 3, then what follows place 0
    new_BRD          1  1   0  1                 both begin with 4: it is one node
    parent_BRD       0  0   0  0                 the first 4 is the parent of 5 and 6,
    rank_BRD         0  0   0  1                 and 6 is its second child

For a dynamic tree these are candidates of `grow.Flat`, at place r * D + d. A parent there is 1 +
its place: the parent of (r, d) is at place parent_BRD * D + d - 1, so it is parent_BRD * D + d:

    tokens_BX        4  5  4  6
    worth_BX         0 -1  - -2                  -(r + d), for tokens that are new nodes
    parent_BX        0  1  0  1                  0 is the root
    tokens_BN        1  4  5  6                  the tree of four nodes: 4 follows the root,
    parent_BN        0  0  1  1                  5 and 6 follow the 4

References: Saxena's prompt lookup decoding; 2304.04487 for drafts copied from text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import DraftShape, LookupConfig, Objective, TargetConfig
from moa_jax.drafters import grow
from moa_jax.drafters.api import NOTHING, Drafter, Guide, Params, Shared, Taps, Tree
from moa_jax.errors import InputError
from moa_jax.files.kinds import DrafterKind, FileLayout

Array = jax.Array


class Trie(NamedTuple):
    """R continuations of D tokens as a tree: tokens that begin alike are one node.

    continuations   a b c    new   x x x    parent   0 0 0    rank   0 0 0
                    a d e          . x x             0 0 1           0 1 0
                    f b c          x x x             0 2 2           1 0 0
    """

    tokens_BRD: Array  # NOTHING in a continuation that is not there
    new_BRD: Array  # whether no better continuation begins like this, up to and with this token
    parent_BRD: Array  # the first continuation that begins like this one, up to the token before
    rank_BRD: Array  # which child of its parent the token is


def make(
    cfg: LookupConfig, target_cfg: TargetConfig, objective: Objective | None = None
) -> Drafter:
    """The drafter as pure functions. Raises InputError where there is an objective to train for."""
    if objective is not None:
        _untrained()
    return Drafter(
        taps=Taps(),
        borrow=lambda params: {},
        init=lambda key: {},
        init_cache=lambda batch, rows, dtype: jnp.zeros((batch, rows), jnp.int32),
        extend=extend,
        propose=make_propose(cfg),
        digest=lambda params, length_B, tapped: (),
        loss=_untrained,
        teacher_forced=_untrained,
        head=_untrained,
        own_head=True,  # a draft vocabulary has nothing to slice
    )


def _untrained(*_: Any) -> NoReturn:
    raise InputError("prompt lookup needs no training: choose another drafter to train")


def extend(
    params: Params,
    shared: Shared,
    text_BS: Array,
    tokens_BT: Array,
    length_B: Array,
    digest: tuple[()],
) -> Array:
    """The text of each row, with these tokens written from its length on."""
    write = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    return write(text_BS, tokens_BT, length_B)


def make_propose(cfg: LookupConfig) -> Callable[..., tuple[Tree, Array]]:
    """The tree of a shape, with NOTHING in nodes for which the text has no continuation."""

    def propose(
        params: Params,
        shared: Shared,
        text_BS: Array,
        root_B: Array,
        length_B: Array,
        shape: DraftShape,
        guide: Guide,
    ) -> tuple[Tree, Array]:
        text_BS = extend(params, shared, text_BS, root_B[:, None], length_B, ())
        depth, parents = shape.levels - 1, {path[:-1] for path in shape.tree_paths}
        num_leaves = sum(path not in parents for path in shape.tree_paths)
        many = shape.breadth if shape.is_dynamic else num_leaves
        trie = merge(continuations(cfg, text_BS, length_B, many, depth))
        if not shape.is_dynamic:
            return _by_rank(root_B, trie, shape), text_BS
        found, least_worth = candidates(trie, shape.num_drafted), -float(many + depth)
        return grow.select(root_B, found, shape, least_worth), text_BS

    return propose


# ---- search -------------------------------------------------------------------------------


def match_lengths(cfg: LookupConfig, text_BS: Array, length_B: Array) -> Array:
    """For each place before the root, how many tokens that end there equal those at the root.

    At most `longest_match` are counted; fewer than `shortest_match` are 0.
    """
    S = text_BS.shape[1]
    index_S, same_BS = jnp.arange(S), True
    count_BS = jnp.zeros(text_BS.shape, jnp.int32)
    for back in range(cfg.longest_match):  # `same_BS`: the last `back` + 1 tokens are the same
        at_root_B1 = jnp.take_along_axis(text_BS, jnp.maximum(length_B[:, None] - back, 0), axis=1)
        same_BS &= (jnp.roll(text_BS, back, axis=1) == at_root_B1) & (index_S >= back)
        count_BS += same_BS
    earlier_BS = index_S < length_B[:, None]
    return jnp.where(earlier_BS & (count_BS >= cfg.shortest_match), count_BS, 0)


def continuations(
    cfg: LookupConfig, text_BS: Array, length_B: Array, many: int, depth: int
) -> Array:
    """What followed the best matches, (B, many, depth), no two alike; NOTHING past the last."""
    S = text_BS.shape[1]
    index_S = jnp.arange(S)
    # 1. What follows each place; the tokens from there to the root repeat.
    period_BS1 = jnp.maximum(length_B[:, None] - index_S, 1)[..., None]
    follows_BSD = index_S[:, None] + 1 + jnp.arange(depth) % period_BS1
    follows_BSD = jnp.minimum(follows_BSD, S - 1).reshape(text_BS.shape[0], -1)
    next_BSD = jnp.take_along_axis(text_BS, follows_BSD, axis=1).reshape(-1, S, depth)
    # 2. The order of places: the longest match, then the latest.
    count_BS = match_lengths(cfg, text_BS, length_B)
    score_BS = jnp.where(count_BS > 0, count_BS * S + index_S, -1)

    # 3. The best place, `many` times. It takes with it all places that the same tokens follow.
    def best(score_BS: Array, _: None) -> tuple[Array, Array]:
        place_B1 = jnp.argmax(score_BS, axis=1)[:, None]
        found_B1D = jnp.take_along_axis(next_BSD, place_B1[..., None], axis=1)
        there_B1 = jnp.take_along_axis(score_BS, place_B1, axis=1) >= 0
        taken_BS = jnp.all(next_BSD == found_B1D, axis=-1)
        return jnp.where(taken_BS, -1, score_BS), jnp.where(there_B1, found_B1D[:, 0], NOTHING)

    _, found_RBD = lax.scan(best, score_BS, None, length=many)
    return found_RBD.swapaxes(0, 1)


# ---- trees --------------------------------------------------------------------------------


def merge(tokens_BRD: Array) -> Trie:
    """The trie of R continuations, the best first."""
    R = tokens_BRD.shape[1]
    # 1. Which pairs of continuations are the same up to and with a token, and up to the one before.
    same_BRRD = tokens_BRD[:, :, None] == tokens_BRD[:, None]
    alike_BRRD = jnp.cumprod(same_BRRD, axis=-1).astype(bool)
    above_BRRD = jnp.concatenate([jnp.ones_like(alike_BRRD[..., :1]), alike_BRRD[..., :-1]], -1)
    # 2. A token is a new node in the first continuation of those that begin alike.
    first_BRD = jnp.argmax(alike_BRRD, axis=2)
    new_BRD = first_BRD == jnp.arange(R)[:, None]
    # 3. Its rank is the number of elder siblings: new nodes of better continuations that have the
    # same parent. A token that is not new has the rank of its node.
    better_RR1 = (jnp.arange(R) < jnp.arange(R)[:, None])[..., None]
    elder_BRRD = above_BRRD & better_RR1 & new_BRD[:, None]
    rank_BRD = jnp.take_along_axis(jnp.sum(elder_BRRD, axis=2), first_BRD, axis=1)
    new_BRD &= tokens_BRD != NOTHING
    return Trie(tokens_BRD, new_BRD, jnp.argmax(above_BRRD, axis=2), rank_BRD)


def _by_rank(root_B: Array, trie: Trie, shape: DraftShape) -> Tree:
    """A chain or static tree: each node takes the child of its rank, where there is one.

    A node of depth d with the path (1, 0) is token d - 1 of the first continuation whose ranks
    begin with 1 0; its ranks from d on are free.
    """
    paths, D = shape.tree_paths, shape.levels - 1
    depth_N = np.array([len(path) for path in paths], np.int32)
    rank_ND = np.array([path + (0,) * (D - len(path)) for path in paths])
    free_ND = np.arange(D) >= depth_N[:, None]
    fits_BNRD = (trie.rank_BRD[:, None] == rank_ND[:, None]) | free_ND[:, None]
    fits_BNR = jnp.all(fits_BNRD, axis=-1)
    tokens_BNR = trie.tokens_BRD[..., depth_N - 1].swapaxes(1, 2)
    first_BN1 = jnp.argmax(fits_BNR, axis=-1)[..., None]
    found_BN = jnp.take_along_axis(tokens_BNR, first_BN1, axis=-1)[..., 0]
    found_BN = jnp.where(fits_BNR.any(axis=-1), found_BN, NOTHING)
    return grow.static_tree(jnp.concatenate([root_B[:, None], found_BN], axis=1), paths)


def candidates(trie: Trie, count: int) -> grow.Flat:
    """The nodes of a trie as candidates of a dynamic tree, at least `count` of them."""
    B, R, D = trie.tokens_BRD.shape
    flat = lambda x_BRD: x_BRD.reshape(B, R * D)
    # 1. A node is worth less the further from the root and the worse its match, in equal steps.
    step_D = jnp.arange(D)
    worth_RD = -(jnp.arange(R)[:, None] + step_D).astype(jnp.float32)
    worth_BX = flat(jnp.where(trie.new_BRD, worth_RD, -jnp.inf))
    # 2. Parents: 1 + the place of (parent, d - 1), or the root where d is 0.
    parent_BX = flat(jnp.where(trie.new_BRD & (step_D > 0), trie.parent_BRD * D + step_D, 0))
    # 3. A tree of more nodes than these is filled with NOTHING.
    blank = ((0, 0), (0, max(count - R * D, 0)))
    return grow.Flat(
        jnp.pad(flat(trie.tokens_BRD), blank, constant_values=NOTHING),
        jnp.pad(worth_BX, blank, constant_values=-jnp.inf),
        jnp.pad(parent_BX, blank).astype(jnp.int32),
        (*range(1, D + 1),) * R + (1,) * blank[1][1],
    )


# ---- files: none --------------------------------------------------------------------------


def write_config(
    cfg: LookupConfig, target_cfg: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """Always raises InputError: there is nothing to write."""
    raise InputError("prompt lookup has no files: name it as it is, `lookup`")


KIND = DrafterKind(
    LookupConfig,
    lambda config, names: False,
    lambda files, target_cfg, reused: (LookupConfig(), ()),
    lambda cfg, target_cfg: {},
    write_config,
    make,
    without_files=LookupConfig(),
)
