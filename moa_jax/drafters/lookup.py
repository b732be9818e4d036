"""Prompt lookup: drafts what followed the last tokens the last time they stood in the text.

    text        the cat sat . so the cat | sat . so      root: cat, at the end of what is known
                --- === ............ --- ===             the longest match ends earlier: what
                        sat . so the                     followed it is drafted

A match is the root with as many tokens before it as possible, from `longest_match` down to
`shortest_match`; among equally long ones the latest counts. Where what followed runs into the end
of the text, the draft goes on with its own tokens: a text that repeats is drafted to any depth.
For trees the continuations of several matches are merged. There are no weights, so there is
nothing to load and nothing to train, and no probabilities: candidates are never drawn, and a
shape's confidence leaves nothing out; it only lets the target verify no more than there is.

References: Saxena's prompt lookup decoding; 2304.04487 for drafts copied from text.
"""

from __future__ import annotations

from functools import partial
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
    """Continuations of D tokens, R of them, with what they begin alike counted once.

    continuations   a b c    tokens   a b c    new   x x x    rank   0 0 0
                    a d e             a d e          . x x           0 1 0
                    f b c             f b c          x x x           1 0 0
    """

    tokens_BRD: Array  # NOTHING in a row that is not there
    new_BRD: Array  # whether no continuation before it begins like this
    parent_BRD: Array  # the first continuation that begins as this one does, without its token
    rank_BRD: Array  # which child of its parent it is


def make(
    cfg: LookupConfig, target_cfg: TargetConfig, objective: Objective | None = None
) -> Drafter:
    """The drafter as pure functions; InputError where one wants to train it."""
    if objective is not None:
        _untrained()
    return Drafter(
        taps=Taps(),
        borrow=lambda params: {},
        init=lambda key: {},
        init_cache=lambda batch, rows, dtype: jnp.zeros((batch, rows), jnp.int32),
        extend=extend,
        propose=partial(propose, cfg),
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
    """The text of each row with tokens written from its length on."""
    write = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    return write(text_BS, tokens_BT, length_B)


def propose(
    cfg: LookupConfig,
    params: Params,
    shared: Shared,
    text_BS: Array,
    root_B: Array,
    length_B: Array,
    shape: DraftShape,
    guide: Guide,
) -> tuple[Tree, Array]:
    """The tree of `shape`, NOTHING in the nodes for which the text has no continuation."""
    text_BS = extend(params, shared, text_BS, root_B[:, None], length_B, ())
    many = shape.breadth if shape.is_dynamic else _leaves(shape)
    trie = merge(continuations(cfg, text_BS, length_B, many, shape.levels - 1))
    fill = _likeliest if shape.is_dynamic else _by_rank
    return fill(root_B, trie, shape), text_BS


def _leaves(shape: DraftShape) -> int:
    """Continuations that a static tree can hold."""
    above = {path[:-1] for path in shape.tree_paths}
    return sum(path not in above for path in shape.tree_paths)


# ---- search -------------------------------------------------------------------------------


def match_lengths(cfg: LookupConfig, text_BS: Array, length_B: Array) -> Array:
    """How many tokens up to each place are those up to the root; 0 for too few, and from the
    root on."""
    S = text_BS.shape[1]
    index_S, same_BS = jnp.arange(S), True
    count_BS = jnp.zeros(text_BS.shape, jnp.int32)
    for back in range(cfg.longest_match):
        last_B1 = jnp.take_along_axis(text_BS, jnp.maximum(length_B[:, None] - back, 0), axis=1)
        same_BS &= (jnp.roll(text_BS, back, axis=1) == last_B1) & (index_S >= back)
        count_BS += same_BS
    earlier_BS = index_S < length_B[:, None]
    return jnp.where(earlier_BS & (count_BS >= cfg.shortest_match), count_BS, 0)


def continuations(
    cfg: LookupConfig, text_BS: Array, length_B: Array, many: int, depth: int
) -> Array:
    """What followed the best matches, (B, many, depth), no two alike; NOTHING past the last."""
    S = text_BS.shape[1]
    index_S = jnp.arange(S)
    period_BS1 = jnp.maximum(length_B[:, None] - index_S, 1)[..., None]
    follows_BSD = index_S[:, None] + 1 + jnp.arange(depth) % period_BS1
    follows_BSD = jnp.minimum(follows_BSD, S - 1).reshape(text_BS.shape[0], -1)
    next_BSD = jnp.take_along_axis(text_BS, follows_BSD, axis=1).reshape(-1, S, depth)
    count_BS = match_lengths(cfg, text_BS, length_B)
    score_BS = jnp.where(count_BS > 0, count_BS * S + index_S, -1)

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
    same_BRRD = tokens_BRD[:, :, None] == tokens_BRD[:, None]
    alike_BRRD = jnp.cumprod(same_BRRD, axis=-1).astype(bool)  # up to and with this token
    above_BRRD = jnp.concatenate([jnp.ones_like(alike_BRRD[..., :1]), alike_BRRD[..., :-1]], -1)
    first_BRD = jnp.argmax(alike_BRRD, axis=2)
    new_BRD = first_BRD == jnp.arange(R)[:, None]
    before_RR1 = (jnp.arange(R) < jnp.arange(R)[:, None])[..., None]
    elder_BRRD = above_BRRD & before_RR1 & new_BRD[:, None]
    # The elder siblings of the first that begins like this are those of all that do.
    rank_BRD = jnp.take_along_axis(jnp.sum(elder_BRRD, axis=2), first_BRD, axis=1)
    new_BRD &= tokens_BRD != NOTHING
    return Trie(tokens_BRD, new_BRD, jnp.argmax(above_BRRD, axis=2), rank_BRD)


def _by_rank(root_B: Array, trie: Trie, shape: DraftShape) -> Tree:
    """A chain or static tree: each node the child of its rank, if there are as many."""
    paths = ((), *shape.tree_paths)
    index = {path: node for node, path in enumerate(paths)}
    depth_N = np.array([len(path) for path in paths], np.int32)
    parent_N = np.array([index[path[:-1]] for path in paths], np.int32)
    D = shape.levels - 1
    rank_ND = np.array([path + (0,) * (D - len(path)) for path in paths[1:]])
    beyond_ND = np.arange(D) >= depth_N[1:, None]
    fits_BNRD = (trie.rank_BRD[:, None] == rank_ND[:, None]) | beyond_ND[:, None]
    fits_BNR = jnp.all(fits_BNRD, axis=-1)
    tokens_BNR = trie.tokens_BRD[..., depth_N[1:] - 1].swapaxes(1, 2)
    first_BN1 = jnp.argmax(fits_BNR, axis=-1)[..., None]
    found_BN = jnp.take_along_axis(tokens_BNR, first_BN1, axis=-1)[..., 0]
    found_BN = jnp.where(fits_BNR.any(axis=-1), found_BN, NOTHING)
    tokens_BN = jnp.concatenate([root_B[:, None], found_BN], axis=1)
    spread = lambda row_N: jnp.broadcast_to(jnp.asarray(row_N), tokens_BN.shape)  # noqa: E731
    ancestor_1NN = grow.ancestors(jnp.asarray(parent_N)[None], shape.levels)
    return Tree(tokens_BN, spread(parent_N), spread(depth_N), ancestor_1NN)


def _likeliest(root_B: Array, trie: Trie, shape: DraftShape) -> Tree:
    """A dynamic tree: the nodes nearest to the root, of the best matches; then NOTHING."""
    B, R, D = trie.tokens_BRD.shape
    flat = lambda x_BRD: x_BRD.reshape(B, R * D)  # noqa: E731
    step_D = jnp.arange(D)
    # A token is worth less the further from the root and the worse its match: equal steps.
    worth_RD = -(jnp.arange(R)[:, None] + step_D).astype(jnp.float32)
    score_BX = flat(jnp.where(trie.new_BRD, worth_RD, -jnp.inf))
    parent_BX = flat(jnp.where(trie.new_BRD & (step_D > 0), trie.parent_BRD * D + step_D, 0))
    blank = ((0, 0), (0, max(shape.num_drafted - R * D, 0)))
    candidates = grow.Flat(
        jnp.pad(flat(trie.tokens_BRD), blank, constant_values=NOTHING),
        jnp.pad(score_BX, blank, constant_values=-jnp.inf),
        jnp.pad(parent_BX, blank).astype(jnp.int32),
        (*range(1, D + 1),) * R + (1,) * blank[1][1],
    )
    return grow.select(root_B, candidates, shape, bound=-float(R + D))


# ---- files: none --------------------------------------------------------------------------


def write_config(
    cfg: LookupConfig, target_cfg: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """Refused: there is nothing to write."""
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
