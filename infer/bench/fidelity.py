"""Distances of a target's next-token distributions from a reference's, position by position.

    KL(reference || target)    in nats per token, at temperature 1
    agreement                  share of positions with the same argmax

Both sides process the same tokens, so an early difference does not affect later positions. The
reference is another target (to measure the effect of quantized weights), or logits from other
software (to compare this target with transformers).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import TargetConfig
from moa_jax.decode.programs import bucket
from moa_jax.model import llama, masks, sharding
from moa_jax.pretrained import Target
from moa_jax.runtime.precision import matmul_precision

Array = jax.Array
TOP = 5


class Fidelity(NamedTuple):
    """Distances of a target from its reference, over all compared positions."""

    tokens: int
    mean_kl: float  # nats
    worst_kl: float
    agreement: float  # 0 to 1
    top5_agreement: float  # share of the reference's top-5 tokens in the target's top 5
    logit_difference: float  # maximum


class TopLogits(NamedTuple):
    """Compact logits of T positions: the top-K tokens, and one entry for the rest.

    The rest counts as one token; its logit is the logsumexp of all other logits. KL between two
    such distributions is a lower bound of KL between the full distributions.
    """

    ids_TK: Any  # int32, most likely first
    logits_TN: Any  # float32 (T, K + 1), the last entry for the rest


class Closeness(NamedTuple):
    """Figures per position, (T,)."""

    kl_T: Any
    agrees_T: Any
    top5_T: Any
    difference_T: Any


def fidelity(
    stored: Target, quantized: Target, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]
) -> Fidelity:
    """Compares two targets on sequences: token ids, and a mask of the tokens to compare.

    Both targets are on one device, or on the same mesh. At least one token must be marked; the
    mask of a sequence's first token is ignored, because no position predicts it.
    """
    found = []
    for tokens, counts in texts:
        each = closeness(logits_of(stored, tokens), logits_of(quantized, tokens))
        kept = np.flatnonzero(counts[1:])  # position i predicts token i + 1
        found.append(Closeness(*(figure_T[kept] for figure_T in each)))
    return summary(found)


def summary(found: Sequence[Closeness]) -> Fidelity:
    """Aggregates the figures of all positions; requires at least one position."""
    kl_X, agrees_X, top5_X, difference_X = map(np.concatenate, zip(*found, strict=True))
    means = float(agrees_X.mean()), float(top5_X.mean())
    kls = float(kl_X.mean()), float(kl_X.max())
    return Fidelity(len(kl_X), *kls, *means, float(difference_X.max()))


def closeness(reference: Array | TopLogits, logits_XV: Array) -> Closeness:
    """Compares logits of X positions with a reference of T <= X positions; figures are (T,)."""
    rows = len(jax.tree.leaves(reference)[0])
    padding = ((0, len(logits_XV) - rows), (0, 0))
    padded = reference
    if any(map(any, padding)):  # padding limits the number of compiled shapes
        padded = jax.tree.map(lambda leaf: np.pad(leaf, padding), reference)
    return Closeness(*(np.asarray(figure_X)[:rows] for figure_X in _closeness(padded, logits_XV)))


def logits_of(target: Target, tokens: Sequence[int]) -> Array:
    """Float32 logits (X, V) after each token; rows past the last token are padding."""
    padded_1T = np.zeros((1, bucket(len(tokens))), np.int32)
    padded_1T[0, : len(tokens)] = tokens
    mesh = sharding.setting(sharding.mesh_of(target.params))
    with matmul_precision(target.params["embed"].dtype), mesh:
        return _logits(target.config, target.params, padded_1T)


@functools.partial(jax.jit, static_argnums=1)
def top_logits(logits_TV: Array, count: int) -> TopLogits:
    """Keeps the logits of the top `count` tokens; `count` must be below the vocabulary size."""
    _, ids_TK = lax.top_k(logits_TV, count)
    return TopLogits(ids_TK, _merged(logits_TV, ids_TK))


@functools.partial(jax.jit, static_argnums=0)
def _logits(cfg: TargetConfig, params: Any, tokens_1T: Array) -> Array:
    T = tokens_1T.shape[1]
    context = llama.Context(jnp.arange(T)[None], masks.causal_tree(T))
    return llama.unembed(params, llama.forward(cfg, params, tokens_1T, context).hidden_BTD)[0]


@jax.jit
def _closeness(reference: Array | TopLogits, ours_TV: Array) -> Closeness:
    if isinstance(reference, TopLogits):
        ids_TK, theirs_TN = reference
        ours_TN, num_tokens = _merged(ours_TV, ids_TK), ids_TK.shape[1]
    else:
        theirs_TN, ours_TN, num_tokens = reference, ours_TV, reference.shape[1]
        _, ids_TK = lax.top_k(reference, TOP)
    _, top_TK = lax.top_k(ours_TV, TOP)
    found_TKK = ids_TK[:, :TOP, None] == top_TK[:, None]
    difference_TN = jnp.abs(ours_TN - theirs_TN)[:, :num_tokens]
    return Closeness(
        _kl(theirs_TN, ours_TN),
        ids_TK[:, 0] == top_TK[:, 0],
        found_TKK.any(axis=2).mean(axis=1),
        difference_TN.max(axis=1),
    )


def _kl(theirs_TN: Array, ours_TN: Array) -> Array:
    """KL(theirs || ours) as the sum of q - p - p log(q / p), a sum of terms >= 0.

    The sum of p log(p / q) is equal, but its terms cancel: in float32 the result is 1e-7 or
    negative for a true value of 1e-11.
    """
    p_TN, q_TN = jax.nn.softmax(theirs_TN), jax.nn.softmax(ours_TN)
    log_TN = jax.nn.log_softmax(ours_TN) - jax.nn.log_softmax(theirs_TN)
    near_TN = p_TN * (jnp.expm1(log_TN) - log_TN)
    return jnp.where(jnp.abs(log_TN) < 1, near_TN, q_TN - p_TN - p_TN * log_TN).sum(axis=1)


def _merged(logits_TV: Array, ids_TK: Array) -> Array:
    """The logits of tokens `ids_TK`, then the logsumexp of all others; (T, K + 1)."""
    kept_TK = jnp.take_along_axis(logits_TV, ids_TK, axis=1)
    row_T1 = jnp.arange(len(ids_TK))[:, None]
    rest_TV = logits_TV.at[row_T1, ids_TK].set(-jnp.inf)
    return jnp.concatenate([kept_TK, jax.nn.logsumexp(rest_TV, axis=1, keepdims=True)], axis=1)
