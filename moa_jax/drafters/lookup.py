"""Prompt lookup: drafts the tokens after the latest earlier occurrence of the last tokens.

    tokens      the cat sat . so the cat | sat . so      root: cat, the newest committed token
                --- ===          --- ===                 its longest match is earlier in the
                        ........                         sequence; its continuation is drafted

A match is the longest suffix ending in the root that occurs earlier, of `longest_match` down to
`shortest_match` tokens; the latest of equally long matches is used. A continuation that reaches the
root repeats its own tokens, so a repeating sequence is drafted to any depth. Prompt lookup drafts
chains, has no weights and needs no training. Candidates have no probabilities, so they are never
sampled.

An example: a chain of D = 2 tokens. The root is the token 1 at position 6; the row after the root
is left over from an earlier round:

    position         0  1  2  3  4  5  6 | 7
    text_BS          1  4  6  1  4  5  1 | 9
    count_BS         1  0  0  1  0  0  0   0     positions 0 and 3 match by one token: no token is
                                                 before position 0; a 6, not a 5, is before 3
    score_BS         8 -1 -1 11 -1 -1 -1  -1     count * 8 + position: the longest, then the latest
    tokens_BD        4  5                        the tokens after position 3

The positions i + 1 to 6 are a period of 6 - i tokens: token j of the continuation of position i is
the token at position i + 1 + j % (6 - i). The continuation of position 5 is 1 1, a repeated root.

References: Saxena's prompt lookup decoding; 2304.04487 for drafts copied from the context.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from moa_jax.config import DraftShape, LookupConfig, Objective, TargetConfig
from moa_jax.drafters import api
from moa_jax.drafters.api import NO_TOKEN, CandidateSampler, Drafter, Params, Shared, TapSpec, Tree
from moa_jax.errors import InputError
from moa_jax.files.registry import DrafterKind, FileLayout

Array = jax.Array


def make(
    cfg: LookupConfig, target_cfg: TargetConfig, objective: Objective | None = None
) -> Drafter:
    """The drafter as pure functions; raises InputError if a training `objective` is given."""
    if objective is not None:
        _untrained()
    return Drafter(
        taps=TapSpec(),
        shared_params=lambda params: {},
        init=lambda key: {},
        init_cache=lambda batch, rows, dtype: jnp.zeros((batch, rows), jnp.int32),
        extend=extend,
        propose=make_propose(cfg),
        condense=lambda params, length_B, tapped: (),
        loss=_untrained,
        teacher_forced=_untrained,
        head=_untrained,
        own_head=True,  # a draft vocabulary has no head to slice
        chains_only=True,
    )


def _untrained(*_: Any) -> NoReturn:
    raise InputError("prompt lookup needs no training; choose another drafter to train")


def extend(
    params: Params,
    shared: Shared,
    text_BS: Array,
    tokens_BT: Array,
    length_B: Array,
    digest: tuple[()],
) -> Array:
    """The sequences (B, S), with `tokens_BT` written from position `length` on."""
    write = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    return write(text_BS, tokens_BT, length_B)


def make_propose(cfg: LookupConfig) -> Callable[..., tuple[Tree, Array]]:
    """A `propose` that drafts a chain, NO_TOKEN without a match; raises InputError for a tree."""

    def propose(
        params: Params,
        shared: Shared,
        text_BS: Array,
        root_B: Array,
        length_B: Array,
        shape: DraftShape,
        sampler: CandidateSampler,
    ) -> tuple[Tree, Array]:
        if not shape.is_chain:
            raise InputError("prompt lookup drafts chains, no trees; use --mode chain")
        text_BS = extend(params, shared, text_BS, root_B[:, None], length_B, ())
        tokens_BD = continuation(cfg, text_BS, length_B, shape.levels - 1)
        return api.chain(jnp.concatenate([root_B[:, None], tokens_BD], axis=1)), text_BS

    return propose


def match_lengths(cfg: LookupConfig, text_BS: Array, length_B: Array) -> Array:
    """The number of tokens up to each position that equal the tokens up to the root, (B, S).

    Values are 0, or from `shortest_match` to `longest_match`; 0 from the root's position on.
    """
    S = text_BS.shape[1]
    index_S, same_BS = jnp.arange(S), True
    count_BS = jnp.zeros(text_BS.shape, jnp.int32)
    for back in range(cfg.longest_match):  # `same_BS`: the last `back` + 1 tokens are equal
        at_root_B1 = jnp.take_along_axis(text_BS, jnp.maximum(length_B[:, None] - back, 0), axis=1)
        same_BS &= (jnp.roll(text_BS, back, axis=1) == at_root_B1) & (index_S >= back)
        count_BS += same_BS
    earlier_BS = index_S < length_B[:, None]
    return jnp.where(earlier_BS & (count_BS >= cfg.shortest_match), count_BS, 0)


def continuation(cfg: LookupConfig, text_BS: Array, length_B: Array, depth: int) -> Array:
    """The tokens after the best match, (B, depth); NO_TOKEN without a match."""
    S = text_BS.shape[1]
    count_BS = match_lengths(cfg, text_BS, length_B)
    score_BS = jnp.where(count_BS > 0, count_BS * S + jnp.arange(S), -1)
    best_B1 = jnp.argmax(score_BS, axis=1)[:, None]
    period_B1 = jnp.maximum(length_B[:, None] - best_B1, 1)
    after_BD = jnp.minimum(best_B1 + 1 + jnp.arange(depth) % period_B1, S - 1)
    tokens_BD = jnp.take_along_axis(text_BS, after_BD, axis=1)
    return jnp.where(jnp.max(score_BS, axis=1)[:, None] >= 0, tokens_BD, NO_TOKEN)


def write_config(
    cfg: LookupConfig, target_cfg: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """Always raises InputError: prompt lookup has no files."""
    raise InputError("prompt lookup has no files; name it as it is, `lookup`")


KIND = DrafterKind(
    LookupConfig,
    lambda config, names: False,
    lambda files, target_cfg, reused: (LookupConfig(), ()),
    lambda cfg, target_cfg: {},
    write_config,
    make,
    without_files=LookupConfig(),
)
