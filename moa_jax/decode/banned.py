"""Tokens that a row must not choose: vLLM's `min_tokens` and `bad_words`.

    setting                       token   the tokens before it   while the answer is shorter than
    min_tokens 5, stop id 2       2       any                    5 tokens
    bad_words ((7, 8, 9),)        9       7 8                    always

The tokens before it are those of the answer, not of the prompt. The token after a node of a draft
is banned by the path to that node, so drafted text equals plain text. Candidates are not banned: a
banned candidate is rejected like any other token that the target does not choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import Sampling
from moa_jax.config.checks import is_id
from moa_jax.drafters.api import NO_TOKEN, Tree
from moa_jax.errors import InputError

Array = jax.Array

MOST_BAD_WORDS = 64  # token sequences per answer
MOST_WORD_TOKENS = 16  # of one sequence
ANY = NO_TOKEN - 1  # matches every token before a banned token
ALWAYS = np.int32(2**31 - 1)


class Bans(NamedTuple):
    """Banned tokens per row; an unused entry has an `end` of 0."""

    token_BX: Array
    before_BXR: Array  # the R tokens before the token, the newest last; ANY matches every token
    end_BX: Array  # index in the row from which on the token is allowed


def has_bans(sampling: Sampling) -> bool:
    """Returns whether the settings ban tokens."""
    return bool(sampling.min_tokens or sampling.bad_words)


def bans_of(
    rows: Sequence[Sampling],
    prompt_length_B: np.ndarray,
    stop_ids_BX: np.ndarray,
    vocab_size: int,
) -> Bans:
    """Returns the bans of a batch as host arrays; negative stop ids are padding.

    Raises InputError for too many or too long bad words, and for ids outside the vocabulary.
    """
    B, X = stop_ids_BX.shape
    token_BX, end_BX = np.zeros((2, B, X + MOST_BAD_WORDS), np.int32)
    before_BXR = np.full((*token_BX.shape, MOST_WORD_TOKENS - 1), ANY, np.int32)
    least_B = prompt_length_B + np.array([row.min_tokens for row in rows])
    token_BX[:, :X] = np.maximum(stop_ids_BX, 0)
    end_BX[:, :X] = np.where(stop_ids_BX < 0, 0, least_B[:, None])
    for b, row in enumerate(rows):
        _check(row.bad_words, vocab_size)
        for x, (*before, token) in enumerate(row.bad_words, X):
            token_BX[b, x], end_BX[b, x] = token, ALWAYS
            before_BXR[b, x, MOST_WORD_TOKENS - 1 - len(before) :] = before
    return Bans(token_BX, before_BXR, end_BX)


def _check(words: Sequence[Sequence[int]], vocab_size: int) -> None:
    longest = max(map(len, words), default=1)
    if len(words) > MOST_BAD_WORDS or longest > MOST_WORD_TOKENS:
        raise InputError(
            f"bad_words has {len(words)} token sequences, the longest of {longest} tokens; give at "
            f"most {MOST_BAD_WORDS} of at most {MOST_WORD_TOKENS} tokens"
        )
    if not all(word and all(is_id(token, vocab_size) for token in word) for word in words):
        raise InputError(f"bad_words is {words!r:.60}; give sequences of ids below {vocab_size}")


def without_banned(bans: Bans, logits_BNV: Array, recent_BNR: Array, position_BN: Array) -> Array:
    """Returns the logits with -inf for banned tokens.

    `recent_BNR` has the last tokens before the choice, and `position_BN` the choice's index.
    """
    before_B1XR, recent_BN1R = bans.before_BXR[:, None], recent_BNR[:, :, None]
    is_banned_BNX = jnp.all((before_B1XR == ANY) | (before_B1XR == recent_BN1R), axis=-1)
    is_banned_BNX &= position_BN[..., None] < bans.end_BX[:, None]
    B, N, _ = is_banned_BNX.shape
    places = (jnp.arange(B)[:, None, None], jnp.arange(N)[:, None], bans.token_BX[:, None])
    return logits_BNV.at[places].min(jnp.where(is_banned_BNX, -jnp.inf, jnp.inf))


# ---- the last tokens of an answer ---------------------------------------------------------


def no_recent(bans: Bans, batch: int) -> Array:
    """Returns the last tokens of empty answers."""
    return jnp.full((batch, bans.before_BXR.shape[-1]), NO_TOKEN, jnp.int32)


def recent_after(recent_BR: Array, tokens_BT: Array, count_B: Array | None) -> Array:
    """Returns the last tokens after the first `count` of more tokens, or after all of them."""
    R = recent_BR.shape[1]
    whole_BX = jnp.concatenate([recent_BR, tokens_BT], axis=1)
    if count_B is None:
        return whole_BX[:, -R:]
    return jax.vmap(lambda row, start: lax.dynamic_slice(row, (start,), (R,)))(whole_BX, count_B)


def recent_at(tree: Tree, recent_BR: Array, levels: int) -> Array:
    """Returns the last tokens (B, N, R) up to each node; the root is the last of `recent_BR`."""
    B, N = tree.tokens_BN.shape
    R = recent_BR.shape[1]
    is_at_BNDN = tree.depth_BN[:, None, None, :] == jnp.arange(1, levels)[:, None]
    is_at_BNDN &= tree.ancestor_BNN[:, :, None, :]
    path_BND = jnp.where(is_at_BNDN, tree.tokens_BN[:, None, None, :], 0).sum(axis=-1)
    row_BNR = jnp.broadcast_to(recent_BR[:, None], (B, N, R))
    whole_BNX = jnp.concatenate([row_BNR, path_BND], axis=-1)
    return jnp.take_along_axis(whole_BNX, tree.depth_BN[..., None] + jnp.arange(R), axis=-1)
