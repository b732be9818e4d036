"""What token follows a node: the target's law under sampling settings, and draws from it.

    logits -> bias, repetition penalty -> temperature -> top-k -> top-p -> min-p = log-law
    draw:   argmax(log-law + Gumbel noise); the noise belongs to (row's seed, position)

Because noise belongs to positions and not to rounds, drafts that are the drafter's likeliest
tokens change nothing at all: the same seed gives the same text as plain decoding, token for
token. A node's children are point masses then, and walking to the child that equals the draw
is multi-round rejection without replacement. Candidates that are drawn from the drafter are
accepted or refused one after the other, with what is left of both laws after each refusal;
the text differs from that of plain decoding, its law does not.

References: 2211.17192 and 2302.01318 (accept and residual); 2305.09781 (trees).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import Sampling
from moa_jax.drafters.api import NOTHING, Tree
from moa_jax.errors import InputError

Array = jax.Array

TARGET, DRAFT, ACCEPT = range(3)  # streams of noise that never meet


class Law(NamedTuple):
    """Sampling settings of every row; a setting that no row uses is None and costs nothing."""

    key_B: Array | None = None  # made of each row's seed; None: all rows are greedy
    temperature_B: Array | None = None  # 0 makes a row greedy
    top_k_B: Array | None = None
    top_p_B: Array | None = None
    min_p_B: Array | None = None
    repetition_B: Array | None = None  # above 1 makes what was seen less likely
    bias_BV: Array | None = None  # added to the logits


def law_of(rows: Sequence[Sampling], vocab_size: int, whole: bool = False) -> Law:
    """The arrays of a batch's settings; what no row uses is left out.

    A `whole` law keeps every setting but biases, so that one program serves them all. Raises
    InputError for a bias of an id outside the vocabulary.
    """
    bias_BV = None
    if any(row.logit_bias for row in rows):
        bias_BV = np.zeros((len(rows), vocab_size), np.float32)
        for bias_V, row in zip(bias_BV, rows, strict=True):
            for token, bias in row.logit_bias:
                if not is_id(token, vocab_size):
                    raise InputError(f"logit_bias names the id {token} of {vocab_size}: use others")
                bias_V[token] = bias

    def array(name: str, off: float, used: float | None = None) -> jax.Array | None:
        values = [getattr(row, name) for row in rows]
        if name == "top_k":
            values = [min(value, vocab_size) for value in values]
        if not whole and all(value == off for value in values):
            return None
        return jnp.array([used if used and value == off else value for value in values])

    law = Law(repetition_B=array("repetition_penalty", 1.0), bias_BV=bias_BV)
    if not whole and all(row.temperature == 0 for row in rows):
        return law
    return law._replace(
        key_B=jax.vmap(jax.random.key)(jnp.array([row.seed for row in rows], jnp.uint32)),
        temperature_B=jnp.array([row.temperature for row in rows], jnp.float32),
        top_k_B=array("top_k", 0, vocab_size),
        top_p_B=array("top_p", 1.0),
        min_p_B=array("min_p", 0.0),
    )


def is_id(token: Any, vocab_size: int) -> bool:
    """Whether this is a number that the vocabulary has."""
    return isinstance(token, int | np.integer) and 0 <= token < vocab_size


def adjust(law: Law, logits_BNV: Array, seen_BNV: Array | None, bias_BV: Array | None) -> Array:
    """Logits with bias and repetition penalty, which apply to target and drafter alike."""
    if bias_BV is not None:
        logits_BNV = logits_BNV + bias_BV[:, None]
    if law.repetition_B is None:
        return logits_BNV
    penalty_B11 = law.repetition_B[:, None, None]
    lowered_BNV = jnp.where(logits_BNV > 0, logits_BNV / penalty_B11, logits_BNV * penalty_B11)
    return jnp.where(seen_BNV, lowered_BNV, logits_BNV)


def after(law: Law, logits_BNV: Array, seen_BNV: Array | None) -> Array:
    """What the next token is chosen from: adjusted logits if greedy, else the log-law."""
    logits_BNV = adjust(law, logits_BNV, seen_BNV, law.bias_BV)
    return logits_BNV if law.key_B is None else log_law(law, logits_BNV)


def scores(
    law: Law,
    logits_BNU: Array,
    seen_BNV: Array | None,
    position_BN: Array,
    vocabulary: tuple[Array, int] | None = None,
) -> Array:
    """What the token at a position maximises: logits if greedy, else log-law plus noise.

    If only U tokens have logits, `vocabulary` holds their ids and the size of the whole
    vocabulary.
    """
    ids_U, vocab_size = vocabulary or (slice(None), logits_BNU.shape[-1])
    seen_BNU = None if seen_BNV is None else seen_BNV[..., ids_U]
    after_BNU = after(law, logits_BNU, seen_BNU)
    if law.key_B is None:
        return after_BNU
    return after_BNU + gumbel(law, TARGET, position_BN, vocab_size)[..., ids_U]


def nothing_seen(law: Law, batch: int, vocab_size: int) -> Array | None:
    """No token of (B, V) seen yet, for a repetition penalty; None where the law has none."""
    return None if law.repetition_B is None else jnp.zeros((batch, vocab_size), bool)


def seen_with(
    seen_BV: Array | None, tokens_BT: Array, count_B: Array | None = None
) -> Array | None:
    """Marks the first `count` tokens of each row, or all, as seen; negative ones are ignored."""
    if seen_BV is None:
        return None
    if count_B is not None:
        index_T = jnp.arange(tokens_BT.shape[1])
        tokens_BT = jnp.where(index_T < count_B[:, None], tokens_BT, NOTHING)
    return mark(seen_BV, tokens_BT[:, None])[:, 0]


def mark(seen_BV: Array, tokens_BNP: Array) -> Array:
    """Which tokens (B, N, V) were seen before or are among the P of a node; ignores negatives."""
    B, N, _ = tokens_BNP.shape
    V = seen_BV.shape[-1]
    seen_BNV = jnp.broadcast_to(seen_BV[:, None], (B, N, V))
    index = jnp.where(tokens_BNP < 0, V, tokens_BNP)
    return seen_BNV.at[jnp.arange(B)[:, None, None], jnp.arange(N)[:, None], index].set(
        True, mode="drop"
    )


def log_law(law: Law, logits_BNV: Array) -> Array:
    """Float32 log-probabilities after temperature, top-k, top-p and min-p, -inf where cut off.

    Tokens as likely as the last one kept are kept too. Rows of temperature 0 put all on the
    likeliest token.
    """
    row = lambda value_B: value_B[:, None, None]  # noqa: E731
    warm_B11 = jnp.where(law.temperature_B > 0, law.temperature_B, 1.0)[:, None, None]
    # The largest logit is subtracted first, because a tiny temperature would overflow.
    scaled_BNV = (logits_BNV - logits_BNV.max(axis=-1, keepdims=True)) / warm_B11
    log_BNV = jax.nn.log_softmax(scaled_BNV, axis=-1)
    V = log_BNV.shape[-1]
    if law.top_k_B is not None or law.top_p_B is not None:
        sorted_BNV = jnp.sort(log_BNV, axis=-1, descending=True)
        rank_V = jnp.arange(V)
        kept_BNV = jnp.ones_like(sorted_BNV, bool)
        if law.top_k_B is not None:
            kept_BNV = rank_V < row(law.top_k_B)
        if law.top_p_B is not None:
            mass_BNV = jnp.where(kept_BNV, jnp.exp(sorted_BNV), 0.0)
            before_BNV = jnp.cumsum(mass_BNV, axis=-1) - mass_BNV
            enough_BN1 = row(law.top_p_B) * mass_BNV.sum(axis=-1, keepdims=True)
            # A row without a limit keeps its tail, which the sum's rounding would cut off.
            kept_BNV &= (before_BNV < enough_BN1) | (row(law.top_p_B) >= 1)
        least_BN1 = jnp.min(jnp.where(kept_BNV, sorted_BNV, jnp.inf), axis=-1, keepdims=True)
        log_BNV = jnp.where(log_BNV >= least_BN1, log_BNV, -jnp.inf)
    if law.min_p_B is not None:
        best_BN1 = log_BNV.max(axis=-1, keepdims=True)
        log_BNV = jnp.where(log_BNV >= best_BN1 + jnp.log(row(law.min_p_B)), log_BNV, -jnp.inf)
    log_BNV = jax.nn.log_softmax(log_BNV, axis=-1)
    likeliest_BNV = jax.nn.one_hot(jnp.argmax(logits_BNV, axis=-1), V)
    return jnp.where(row(law.temperature_B) > 0, log_BNV, jnp.log(likeliest_BNV))


def gumbel(law: Law, stream: int, position_BN: Array, size: int) -> Array:
    """Gumbel noise (B, N, size) of a row's seed, the position and the stream alone."""
    return _noise(jax.random.gumbel, law, stream, position_BN, size)


def uniform(law: Law, stream: int, position_BN: Array, size: int) -> Array:
    """The same, uniform from [0, 1): always below a chance of 1, never below a chance of 0."""
    return _noise(jax.random.uniform, law, stream, position_BN, size)


def _noise(
    kind: Callable[..., Array], law: Law, stream: int, position_BN: Array, size: int
) -> Array:
    def one(key: Array, position: Array) -> Array:
        return kind(jax.random.fold_in(key, position), (size,))

    keys_B = jax.vmap(lambda key: jax.random.fold_in(key, stream))(law.key_B)
    return jax.vmap(lambda key, row: jax.vmap(lambda at: one(key, at))(row))(keys_B, position_BN)


def draw(log_law_BNV: Array, noise_BNV: Array) -> Array:
    """One token (B, N) from each law."""
    return jnp.argmax(log_law_BNV + noise_BNV, axis=-1).astype(jnp.int32)


def accept(
    log_law_BNV: Array, draft_BNV: Array, child_BNk: Array, luck_BNk: Array, noise_BNV: Array
) -> Array:
    """The first sampled child (B, N) that is accepted, else a draw from what is left.

    `luck_BNk` is uniform from [0, 1); `noise_BNV` is Gumbel.
    """
    found = reject(jnp.exp(log_law_BNV), draft_BNV, child_BNk)
    accepted_BNk = luck_BNk < found.accept_BNk
    first_BN1 = jnp.argmax(accepted_BNk, axis=-1, keepdims=True)
    child_BN = jnp.take_along_axis(child_BNk, first_BN1, axis=-1)[..., 0]
    left_BN = draw(jnp.log(found.residual_BNV), noise_BNV)
    return jnp.where(accepted_BNk.any(axis=-1), child_BN, left_BN)


class Rejection(NamedTuple):
    """What becomes of a node's sampled children, tried in the order in which they were drawn."""

    accept_BNk: Array  # chance that the k-th is accepted once it is tried; 0 for none
    residual_BNV: Array  # the law of the next token if all are refused


def reject(law_BNV: Array, draft_BNV: Array, child_BNk: Array) -> Rejection:
    """Recursive rejection of candidates that were drawn without replacement.

    `child_BNk` holds tokens, negative where there is no child. After a refusal the drafter's
    law is subtracted from the target's, and the refused token leaves the drafter's. If the
    drafter's law holds fewer tokens than there are children, the last children were not drawn from
    it: they are not tried, and are taken only if the draw of the next token happens to equal
    them.
    """
    tokens_V = jnp.arange(law_BNV.shape[-1])
    accepts = []
    for k in range(child_BNk.shape[-1]):
        token_BN1 = child_BNk[..., k : k + 1]
        at = jnp.maximum(token_BN1, 0)
        wanted_BN1 = jnp.take_along_axis(law_BNV, at, axis=-1)
        drafted_BN1 = jnp.take_along_axis(draft_BNV, at, axis=-1)
        drawn_BN1 = (token_BN1 >= 0) & (drafted_BN1 > 0)
        ratio_BN1 = wanted_BN1 / jnp.where(drawn_BN1, drafted_BN1, 1.0)
        accepts.append(jnp.where(drawn_BN1, jnp.minimum(ratio_BN1, 1.0), 0.0))
        left_BNV = jnp.maximum(law_BNV - draft_BNV, 0.0)
        law_BNV = jnp.where(drawn_BN1, _normalised(left_BNV, law_BNV), law_BNV)
        others_BNV = jnp.where(tokens_V == token_BN1, 0.0, draft_BNV)
        draft_BNV = jnp.where(drawn_BN1, _normalised(others_BNV, others_BNV), draft_BNV)
    return Rejection(jnp.concatenate(accepts, axis=-1), law_BNV)


def _normalised(mass_BNV: Array, otherwise_BNV: Array) -> Array:
    total_BN1 = mass_BNV.sum(axis=-1, keepdims=True)
    return jnp.where(
        total_BN1 > 0, mass_BNV / jnp.where(total_BN1 > 0, total_BN1, 1), otherwise_BNV
    )


def children(tree: Tree, most: int) -> Array:
    """The tokens (B, N, most) of every node's children in order; negative where there is none."""
    N = tree.tokens_BN.shape[1]
    index_N = jnp.arange(N)
    child_BNN = (tree.parent_BN[:, None, :] == index_N[:, None]) & (index_N > 0)
    rank_BNN = jnp.cumsum(child_BNN, axis=-1) - 1
    tokens_B1N = tree.tokens_BN[:, None, :]
    pick = lambda rank: child_BNN & (rank_BNN == rank)  # noqa: E731
    of_rank = lambda rank: jnp.max(jnp.where(pick(rank), tokens_B1N, NOTHING), axis=-1)  # noqa: E731
    return jnp.stack([of_rank(rank) for rank in range(most)], axis=-1)
