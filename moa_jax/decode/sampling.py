"""Sampling of the token after a node from the target's distribution under sampling settings.

    logits -> bans, mask -> bias -> penalties -> temperature -> top-k -> top-p -> min-p
           = log-probabilities
    sample:  argmax(log-probabilities + Gumbel noise); the noise depends on (row's seed, position)

Penalties, in the order of vLLM's sampler (transformers has the same order of bias and repetition):

    repetition    prompt and answer    logit / penalty if logit > 0, else logit * penalty
    frequency     the answer           logit - penalty * occurrences in the answer
    presence      the answer           logit - penalty if the answer has the token

Because noise depends on positions and not on rounds, top-k drafts do not change the output: the
same seed gives the same tokens as plain decoding. A node's children are then point masses, and
walking to the child that equals the sample is multi-round rejection without replacement. Candidates
that are sampled from the drafter are accepted or rejected one after the other, with the residuals
of both distributions after each rejection; the tokens differ from those of plain decoding, their
distribution does not.

References: 2211.17192 and 2302.01318 (accept and residual); 2305.09781 (trees).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import Sampling
from moa_jax.config.checks import is_id
from moa_jax.decode.banned import Bans, no_recent, recent_after, without_banned
from moa_jax.drafters.api import NO_TOKEN, Tree
from moa_jax.errors import InputError
from moa_jax.model.topk import finite_argmax, in_pieces

Array = jax.Array

TARGET, DRAFT, ACCEPT = range(3)  # independent streams of noise


class BatchSampling(NamedTuple):
    """Sampling settings of every row; a setting that no row uses is None and costs nothing."""

    key_B: Array | None = None  # from each row's seed; None: all rows are greedy
    temperature_B: Array | None = None  # 0 makes a row greedy
    top_k_B: Array | None = None
    top_p_B: Array | None = None
    min_p_B: Array | None = None
    repetition_B: Array | None = None  # a value above 1 makes tokens of the row less likely
    presence_B: Array | None = None  # None if and only if `frequency_B` is None
    frequency_B: Array | None = None
    bias_BV: Array | None = None  # added to the logits
    bans: Bans | None = None
    # bool, the tokens that a grammar allows after each node of the call; drafts ignore it
    allowed_BNV: Array | None = None

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on a row's previous tokens."""
        return self.repetition_B is not None or self.presence_B is not None


LEAST_TOP_P = 1e-30  # keeps the argmax; smaller values may round to 0, which would keep no token


def make_batch_sampling(
    rows: Sequence[Sampling], vocab_size: int, whole: bool = False
) -> BatchSampling:
    """Returns the arrays of a batch's sampling settings; settings that no row uses are None.

    With `whole` every setting except the bias is kept, so that one program serves all batches.
    Raises InputError for a bias of an id outside the vocabulary.
    """
    batch_sampling = with_keys(host_batch_sampling(rows, vocab_size, whole))
    return jax.tree.map(jnp.asarray, batch_sampling)


def host_batch_sampling(
    rows: Sequence[Sampling], vocab_size: int, whole: bool = False
) -> BatchSampling:
    """Like `make_batch_sampling`, as host arrays whose key data `with_keys` makes keys."""
    bias_BV = None
    if any(row.logit_bias for row in rows):
        bias_BV = np.zeros((len(rows), vocab_size), np.float32)
        for bias_V, row in zip(bias_BV, rows, strict=True):
            for token, bias in row.logit_bias:
                if not is_id(token, vocab_size):
                    raise InputError(f"logit_bias names the id {token} of {vocab_size}; use others")
                bias_V[token] = bias

    def array(
        name: str, off: float, used: float | None = None, keep: bool = False
    ) -> np.ndarray | None:
        values = [getattr(row, name) for row in rows]
        if name == "top_k":
            values = [min(value, vocab_size) for value in values]
        if name == "top_p":
            values = [max(value, LEAST_TOP_P) for value in values]
        if not (whole or keep) and all(value == off for value in values):
            return None
        kind = np.int32 if name == "top_k" else np.float32
        return np.array([used if used and value == off else value for value in values], kind)

    both = any(row.presence_penalty or row.frequency_penalty for row in rows)
    batch_sampling = BatchSampling(
        repetition_B=array("repetition_penalty", 1.0),
        presence_B=array("presence_penalty", 0.0, keep=both),
        frequency_B=array("frequency_penalty", 0.0, keep=both),
        bias_BV=bias_BV,
    )
    if not whole and all(row.temperature == 0 for row in rows):
        return batch_sampling
    return batch_sampling._replace(
        key_B=np.array([(0, row.seed) for row in rows], np.uint32),  # as in `jax.random.key`
        temperature_B=np.array([row.temperature for row in rows], np.float32),
        top_k_B=array("top_k", 0, vocab_size),
        top_p_B=array("top_p", 1.0),
        min_p_B=array("min_p", 0.0),
    )


def with_keys(batch_sampling: BatchSampling) -> BatchSampling:
    """Replaces key data (B, 2) by typed keys (B,)."""
    if batch_sampling.key_B is None:
        return batch_sampling
    return batch_sampling._replace(
        key_B=jax.random.wrap_key_data(batch_sampling.key_B, impl="threefry2x32")
    )


def apply_penalties(
    batch_sampling: BatchSampling,
    logits_BNV: Array,
    token_counts: TokenCounts,
    bias_BV: Array | None,
) -> Array:
    """Applies bias and penalties to logits, both for the target and for the drafter.

    `token_counts` counts the tokens before each node.
    """
    if bias_BV is not None:
        logits_BNV = logits_BNV + bias_BV[:, None]
    row = lambda value_B: value_B[:, None, None]
    if batch_sampling.repetition_B is not None:
        penalty_B11 = row(batch_sampling.repetition_B)
        lowered_BNV = jnp.where(logits_BNV > 0, logits_BNV / penalty_B11, logits_BNV * penalty_B11)
        logits_BNV = jnp.where(token_counts.seen, lowered_BNV, logits_BNV)
    if batch_sampling.presence_B is not None:
        logits_BNV = logits_BNV - row(batch_sampling.frequency_B) * token_counts.times
        logits_BNV = logits_BNV - row(batch_sampling.presence_B) * (token_counts.times > 0)
    return logits_BNV


def after(batch_sampling: BatchSampling, logits_BNV: Array, token_counts: TokenCounts) -> Array:
    """Returns adjusted logits if all rows are greedy, else log-probabilities of the next token."""
    if batch_sampling.allowed_BNV is not None:
        logits_BNV = jnp.where(batch_sampling.allowed_BNV, logits_BNV, -jnp.inf)
    logits_BNV = apply_penalties(batch_sampling, logits_BNV, token_counts, batch_sampling.bias_BV)
    return logits_BNV if batch_sampling.key_B is None else log_probs(batch_sampling, logits_BNV)


def perturbed_logits(
    batch_sampling: BatchSampling,
    logits_BNU: Array,
    token_counts: TokenCounts,
    position_BN: Array,
    vocabulary: tuple[Array, int] | None = None,
) -> Array:
    """Returns scores whose argmax is the next token: logits if greedy, else log-probs plus noise.

    If only U tokens have logits, `vocabulary` holds their ids and the size of the whole
    vocabulary; `token_counts` always spans the whole vocabulary.
    """
    ids_U, vocab_size = vocabulary or (slice(None), logits_BNU.shape[-1])
    if batch_sampling.bans is not None:
        recent = (token_counts.recent, position_BN)
        logits_BNU = without_banned(batch_sampling.bans, logits_BNU, *recent)
    after_BNU = after(batch_sampling, logits_BNU, token_counts.of(ids_U))
    if batch_sampling.key_B is None:
        return after_BNU
    return after_BNU + gumbel(batch_sampling, TARGET, position_BN, vocab_size)[..., ids_U]


class TokenCounts(NamedTuple):
    """Token counts for penalties, of rows (B, V) or nodes (B, N, V); unused counts are None.

    The counts include a row's newest token, although no cache holds that token yet.
    """

    seen: Array | None = None  # whether prompt or answer has the token, for a repetition penalty
    times: Array | None = None  # occurrences in the answer, for the other penalties
    recent: Array | None = None  # the answer's last R tokens, for bans; NO_TOKEN before the answer

    def of(self, ids_U: Array | slice) -> TokenCounts:
        """Returns the counts of these tokens only, without the last tokens."""
        return jax.tree.map(lambda leaf: leaf[..., ids_U], self._replace(recent=None))

    def each(self) -> TokenCounts:
        """Returns the counts of rows (B, V) as those of one node per row (B, 1, V)."""
        return jax.tree.map(lambda leaf_BV: leaf_BV[:, None], self)


def counts_in(
    batch_sampling: BatchSampling,
    tokens_BC: Array,
    prompt_length_B: Array,
    vocab_size: int,
    count_B: Array | None = None,
) -> TokenCounts:
    """Counts the first `count` tokens of each row, or all tokens; rows begin with their prompts.

    `count` includes the newest token. Negative tokens are ignored.
    """
    token_counts = empty_counts(batch_sampling, len(tokens_BC), vocab_size)
    if not jax.tree.leaves(token_counts):
        return token_counts
    is_prompt_BC = jnp.arange(tokens_BC.shape[1]) < prompt_length_B[:, None]
    answer_BC = jnp.where(is_prompt_BC, NO_TOKEN, tokens_BC)
    token_counts = add_prompt_tokens(
        token_counts, tokens_BC, count_B
    )  # marks the answer too, which is harmless
    return add_answer_tokens(token_counts, answer_BC, count_B)


def empty_counts(batch_sampling: BatchSampling, batch: int, vocab_size: int) -> TokenCounts:
    """Returns counts of 0 for empty rows; counts that no penalty uses are None."""
    blank = lambda penalty_B, dtype: (
        None if penalty_B is None else jnp.zeros((batch, vocab_size), dtype)
    )
    bans = batch_sampling.bans
    return TokenCounts(
        blank(batch_sampling.repetition_B, bool),
        blank(batch_sampling.presence_B, jnp.int32),
        None if bans is None else no_recent(bans, batch),
    )


def add_prompt_tokens(
    token_counts: TokenCounts, tokens_BT: Array, count_B: Array | None = None
) -> TokenCounts:
    """Marks the first `count` tokens, or all, as seen in the prompts; negative tokens are ignored.

    Marking the same tokens twice is harmless.
    """
    return token_counts._replace(
        seen=add_answer_tokens(TokenCounts(token_counts.seen), tokens_BT, count_B).seen
    )


def add_answer_tokens(
    token_counts: TokenCounts, tokens_BT: Array, count_B: Array | None = None
) -> TokenCounts:
    """Adds the first `count` tokens, or all, to the answers; negative tokens are ignored."""
    if not jax.tree.leaves(token_counts):
        return token_counts
    recent = token_counts.recent
    if recent is not None:
        recent = recent_after(recent, tokens_BT, count_B)
    if count_B is not None:
        index_T = jnp.arange(tokens_BT.shape[1])
        tokens_BT = jnp.where(index_T < count_B[:, None], tokens_BT, NO_TOKEN)
    along = along_paths(token_counts, tokens_BT[:, None])
    return jax.tree.map(lambda leaf_BNV: leaf_BNV[:, 0], along)._replace(recent=recent)


def along_paths(token_counts: TokenCounts, path_BNP: Array) -> TokenCounts:
    """Returns the counts per node: those of the node's row plus the P tokens of the node's path.

    A path does not include the root, because the row already counts the root. Negative tokens are
    ignored. The result has no last tokens.
    """
    seen_BV, times_BV, _ = token_counts
    return TokenCounts(
        None if seen_BV is None else _at(seen_BV, path_BNP).set(True, mode="drop"),
        None if times_BV is None else _at(times_BV, path_BNP).add(1, mode="drop"),
    )


def _at(rows_BV: Array, tokens_BNP: Array) -> Any:
    """Indexes the tokens in a copy of the rows per node; negative tokens are out of range."""
    B, N, _ = tokens_BNP.shape
    V = rows_BV.shape[-1]
    nodes_BNV = jnp.broadcast_to(rows_BV[:, None], (B, N, V))
    index = jnp.where(tokens_BNP < 0, V, tokens_BNP)
    return nodes_BNV.at[jnp.arange(B)[:, None, None], jnp.arange(N)[:, None], index]


def log_probs(batch_sampling: BatchSampling, logits_BNV: Array) -> Array:
    """Returns float32 log-probabilities after temperature, top-k, top-p and min-p.

    Tokens that are cut off get -inf. Tokens as likely as the last kept token are kept too. Rows of
    temperature 0 put all probability on the argmax.
    """
    row = lambda value_B: value_B[:, None, None]
    warm_B11 = jnp.where(batch_sampling.temperature_B > 0, batch_sampling.temperature_B, 1.0)[
        :, None, None
    ]
    # The largest logit is subtracted first, because a tiny temperature would overflow.
    scaled_BNV = (logits_BNV - logits_BNV.max(axis=-1, keepdims=True)) / warm_B11
    log_BNV = jax.nn.log_softmax(scaled_BNV, axis=-1)
    if batch_sampling.top_k_B is not None or batch_sampling.top_p_B is not None:
        log_BNV = jnp.where(_kept(batch_sampling, log_BNV), log_BNV, -jnp.inf)
    if batch_sampling.min_p_B is not None:
        best_BN1 = log_BNV.max(axis=-1, keepdims=True)
        log_BNV = jnp.where(
            log_BNV >= best_BN1 + jnp.log(row(batch_sampling.min_p_B)), log_BNV, -jnp.inf
        )
    log_BNV = jax.nn.log_softmax(log_BNV, axis=-1)
    one_hot_BNV = jax.nn.one_hot(finite_argmax(logits_BNV), logits_BNV.shape[-1])
    return jnp.where(row(batch_sampling.temperature_B) > 0, log_BNV, jnp.log(one_hot_BNV))


def _kept(batch_sampling: BatchSampling, log_BNV: Array) -> Array:
    """Marks the tokens that top-k keeps and, among those, the tokens that top-p keeps.

    Top-p keeps a token if the sum of all more likely tokens is below the limit, so tokens of equal
    probability are kept or cut together.
    """
    kept_BNV, mass_BNV = jnp.ones_like(log_BNV, bool), jnp.exp(log_BNV)
    total_BN1 = mass_BNV.sum(axis=-1, keepdims=True)
    if batch_sampling.top_k_B is not None:
        k_B11 = jnp.minimum(batch_sampling.top_k_B, log_BNV.shape[-1])[:, None, None]
        kept_BNV = _first(log_BNV, jnp.ones_like(log_BNV), k_B11)
        mass_BNV = jnp.where(kept_BNV, mass_BNV, 0.0)
        # Among tokens tied for the last place, top-p counts only those that fit into k.
        least_BN1 = jnp.min(jnp.where(kept_BNV, mass_BNV, 1.0), axis=-1, keepdims=True)
        too_many_BN1 = kept_BNV.sum(axis=-1, keepdims=True) - k_B11
        total_BN1 = mass_BNV.sum(axis=-1, keepdims=True) - too_many_BN1 * least_BN1
    if batch_sampling.top_p_B is not None:
        p_B11 = batch_sampling.top_p_B[:, None, None]
        # A row with top-p 1 keeps its tail, which rounding of the sum would cut off.
        kept_BNV &= _first(log_BNV, mass_BNV, p_B11 * total_BN1) | (p_B11 >= 1)
    return kept_BNV


STEP = 3  # bits per step: more bits are fewer launches on a GPU, and more work on a CPU


def _first(log_BNV: Array, weight_BNV: Array, enough_BN1: Array) -> Array:
    """Marks the tokens (B, N, V) whose more likely tokens weigh less than `enough`, which is > 0.

    The bits of a float <= 0, read as an integer, increase as the float decreases. The sum of
    weights grows with those bits, so the bits of the last marked token are found from the highest
    bit on, without sorting.
    """
    bits_BNV = lax.bitcast_convert_type(log_BNV, jnp.uint32) & 0x7FFFFFFF  # 0.0 as -0.0
    bits_BNXP, weight_BNXP = in_pieces(bits_BNV, 0), in_pieces(weight_BNV, 0)
    digit_T = jnp.arange(1, 1 << STEP, dtype=jnp.uint32)

    def refine(step: Array, last_BN1: Array) -> Array:
        low = jnp.maximum(31 - STEP * (step + 1), 0).astype(jnp.uint32)
        tried_BNT = last_BN1 + (digit_T << low)
        likelier = lambda t: bits_BNXP < tried_BNT[..., t, None, None]
        weigh = lambda t: jnp.where(likelier(t), weight_BNXP, 0).sum(axis=-1)
        weight_BNTX = jnp.stack([weigh(t) for t in range(len(digit_T))], axis=2)
        less_BNT = weight_BNTX.sum(axis=-1) < enough_BN1
        return last_BN1 + (less_BNT.sum(axis=-1, keepdims=True, dtype=jnp.uint32) << low)

    none_BN1 = jnp.zeros((*log_BNV.shape[:-1], 1), jnp.uint32)
    return bits_BNV <= lax.fori_loop(0, -(-31 // STEP), refine, none_BN1)


def gumbel(batch_sampling: BatchSampling, stream: int, position_BN: Array, size: int) -> Array:
    """Returns Gumbel noise (B, N, size), a function of the row's seed, position and stream only."""
    return _noise(jax.random.gumbel, batch_sampling, stream, position_BN, size)


def uniform(batch_sampling: BatchSampling, stream: int, position_BN: Array, size: int) -> Array:
    """Returns uniform noise (B, N, size) from [0, 1), so probabilities 0 and 1 are exact."""
    return _noise(jax.random.uniform, batch_sampling, stream, position_BN, size)


def _noise(
    kind: Callable[..., Array],
    batch_sampling: BatchSampling,
    stream: int,
    position_BN: Array,
    size: int,
) -> Array:
    def one(key: Array, position: Array) -> Array:
        return kind(jax.random.fold_in(key, position), (size,))

    keys_B = jax.vmap(lambda key: jax.random.fold_in(key, stream))(batch_sampling.key_B)
    return jax.vmap(lambda key, row: jax.vmap(lambda at: one(key, at))(row))(keys_B, position_BN)


def sample(log_probs_BNV: Array, noise_BNV: Array) -> Array:
    """Samples one token (B, N) per distribution; -1 if the largest score is not finite."""
    return finite_argmax(log_probs_BNV + noise_BNV)


def accept(
    log_probs_BNV: Array, draft_BNV: Array, child_BNk: Array, uniform_BNk: Array, noise_BNV: Array
) -> Array:
    """Returns the first sampled child (B, N) that is accepted, else a sample from the residual.

    `uniform_BNk` is uniform from [0, 1); `noise_BNV` is Gumbel.
    """
    found = reject(jnp.exp(log_probs_BNV), draft_BNV, child_BNk)
    accepted_BNk = uniform_BNk < found.accept_BNk
    first_BN1 = jnp.argmax(accepted_BNk, axis=-1, keepdims=True)
    child_BN = jnp.take_along_axis(child_BNk, first_BN1, axis=-1)[..., 0]
    left_BN = sample(jnp.log(found.residual_BNV), noise_BNV)
    return jnp.where(accepted_BNk.any(axis=-1), child_BN, left_BN)


class Rejection(NamedTuple):
    """Acceptance of a node's sampled children, tried in the order in which they were drawn."""

    accept_BNk: Array  # probability that the k-th child is accepted once tried; 0 if not drawn
    residual_BNV: Array  # the distribution of the next token if all children are rejected


def reject(probs_BNV: Array, draft_BNV: Array, child_BNk: Array) -> Rejection:
    """Recursive rejection of candidates that were drawn without replacement.

    `child_BNk` holds tokens, negative for an absent child. After a rejection the drafter's
    distribution is subtracted from the target's, and the rejected token is removed from the
    drafter's. If the drafter's distribution has fewer tokens than children, the last children were
    not drawn from that distribution: they are not tried, and are accepted only if the sample of
    the next token equals them.
    """
    tokens_V = jnp.arange(probs_BNV.shape[-1])
    accepts = []
    for k in range(child_BNk.shape[-1]):
        token_BN1 = child_BNk[..., k : k + 1]
        at = jnp.maximum(token_BN1, 0)
        wanted_BN1 = jnp.take_along_axis(probs_BNV, at, axis=-1)
        drafted_BN1 = jnp.take_along_axis(draft_BNV, at, axis=-1)
        drawn_BN1 = (token_BN1 >= 0) & (drafted_BN1 > 0)
        ratio_BN1 = wanted_BN1 / jnp.where(drawn_BN1, drafted_BN1, 1.0)
        accepts.append(jnp.where(drawn_BN1, jnp.minimum(ratio_BN1, 1.0), 0.0))
        left_BNV = jnp.maximum(probs_BNV - draft_BNV, 0.0)
        probs_BNV = jnp.where(drawn_BN1, _normalised(left_BNV, probs_BNV), probs_BNV)
        others_BNV = jnp.where(tokens_V == token_BN1, 0.0, draft_BNV)
        draft_BNV = jnp.where(drawn_BN1, _normalised(others_BNV, others_BNV), draft_BNV)
    return Rejection(jnp.concatenate(accepts, axis=-1), probs_BNV)


def _normalised(mass_BNV: Array, otherwise_BNV: Array) -> Array:
    total_BN1 = mass_BNV.sum(axis=-1, keepdims=True)
    return jnp.where(
        total_BN1 > 0, mass_BNV / jnp.where(total_BN1 > 0, total_BN1, 1), otherwise_BNV
    )


def children(tree: Tree, most: int) -> Array:
    """Returns the tokens (B, N, most) of each node's children in order; negative if absent."""
    N = tree.tokens_BN.shape[1]
    index_N = jnp.arange(N)
    child_BNN = (tree.parent_BN[:, None, :] == index_N[:, None]) & (index_N > 0)
    rank_BNN = jnp.cumsum(child_BNN, axis=-1) - 1
    tokens_B1N = tree.tokens_BN[:, None, :]
    pick = lambda rank: child_BNN & (rank_BNN == rank)
    of_rank = lambda rank: jnp.max(jnp.where(pick(rank), tokens_B1N, NO_TOKEN), axis=-1)
    return jnp.stack([of_rank(rank) for rank in range(most)], axis=-1)
