"""The target's log-probabilities of generated tokens, the same with and without speculation.

Log-probabilities are those of the raw logits, before biases, penalties and temperature, as vLLM's
`raw_logprobs`. Each value has the index of its token in the row:

    index          0 ....... prompt-1 | prompt ... length | length+1 ...
    own_BC         zeros              | of the answer     | left-overs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.errors import InputError
from moa_jax.model.topk import top_k

Array = jax.Array

MOST = 20  # largest number of top log-probabilities: OpenAI's limit
PIECE = 32  # tokens whose logits are in memory together: 16 MB for a vocabulary of 128k


class TokenLogprob(NamedTuple):
    """Log-probability of one generated token, in nats, and of the most likely tokens."""

    logprob: float
    top: list[tuple[int, float]]  # (id, log-probability), most likely first


class LogProbs(NamedTuple):
    """Log-probabilities of many tokens on the device, with the top k per token."""

    own_BC: Array
    top_BCk: Array
    id_BCk: Array


def check(count: int | None, vocab_size: int) -> None:
    """Raises InputError for a number of top tokens that is not supported."""
    if count is not None and not 0 <= count <= min(MOST, vocab_size):
        raise InputError(
            f"{count} top tokens; choose from 0 to {min(MOST, vocab_size)}, or none at all"
        )


def blank(batch: int, width: int, count: int) -> LogProbs:
    """Returns zeros for rows of `width` tokens."""
    top_BCk = jnp.zeros((batch, width, count), jnp.float32)
    return LogProbs(jnp.zeros((batch, width), jnp.float32), top_BCk, top_BCk.astype(jnp.int32))


def logprobs_of(logits_BDV: Array, tokens_BD: Array, count: int) -> LogProbs:
    """Returns log-probabilities of the tokens chosen after these logits, and the top `count`."""
    logits_BDV = logits_BDV.astype(jnp.float32)
    total_BD1 = jax.nn.logsumexp(logits_BDV, axis=-1, keepdims=True)
    own_BD1 = jnp.take_along_axis(logits_BDV, tokens_BD[..., None], axis=-1) - total_BD1
    if not count:
        none_BD0 = own_BD1[..., :0]
        return LogProbs(own_BD1[..., 0], none_BD0, none_BD0.astype(jnp.int32))
    top_BDk, id_BDk = top_k(logits_BDV, count)
    return LogProbs(own_BD1[..., 0], top_BDk - total_BD1, id_BDk)


def logprobs_along(
    unembed: Callable[[Array], Array], hidden_BTD: Array, tokens_BT: Array, count: int
) -> LogProbs:
    """Returns `logprobs_of` the tokens that follow hidden states, PIECE positions at a time."""
    B, T = tokens_BT.shape
    size = min(PIECE, T)
    X = -(-T // size)

    def cut(x_BT: Array) -> Array:
        rest = [(0, 0)] * (x_BT.ndim - 2)
        wide_BT = jnp.pad(x_BT, [(0, 0), (0, X * size - T), *rest])
        return jnp.moveaxis(wide_BT.reshape(B, X, size, *x_BT.shape[2:]), 1, 0)

    def joined(x_XBP: Array) -> Array:
        return jnp.moveaxis(x_XBP, 0, 1).reshape(B, X * size, *x_XBP.shape[3:])[:, :T]

    def of_piece(piece: tuple[Array, Array]) -> LogProbs:
        hidden_BPD, tokens_BP = piece
        return logprobs_of(unembed(hidden_BPD), tokens_BP, count)

    return jax.tree.map(joined, lax.map(of_piece, (cut(hidden_BTD), cut(tokens_BT))))


def placed(rows: LogProbs, new: LogProbs, start_B: Array) -> LogProbs:
    """Returns the rows with the values of D new tokens written from `start` on."""

    def place(row: Array, new: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(row, new, (start, *(0,) * (row.ndim - 1)))

    return jax.tree.map(lambda row, new: jax.vmap(place)(row, new, start_B), rows, new)


def as_list(
    rows: LogProbs, row: int, tokens: slice, count: int | None = None
) -> list[TokenLogprob]:
    """Converts some tokens of one row, from host arrays, with all top tokens or `count` of them."""
    own_D = np.asarray(rows.own_BC[row])[tokens].tolist()
    leaves = (rows.top_BCk, rows.id_BCk)
    top_Dk, id_Dk = (np.asarray(leaf[row])[tokens, :count].tolist() for leaf in leaves)
    return [
        TokenLogprob(own, list(zip(ids, top, strict=True)))
        for own, top, ids in zip(own_D, top_Dk, id_Dk, strict=True)
    ]
