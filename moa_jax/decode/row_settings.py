"""Settings of one request as arrays, so that one program serves requests of any settings.

row_settings(sampling, ...)     host arrays of one row, made when a request arrives
joined(rows)                    the rows of a call
prepared(setup, state, ...)     on the device: keys from seeds, biases and masks over ids,
                                and token counts for penalties
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import Sampling
from moa_jax.config.checks import is_id
from moa_jax.decode.banned import bans_of, has_bans
from moa_jax.decode.limits import MOST_STOPS, check_stops
from moa_jax.decode.sampling import BatchSampling, counts_in, host_batch_sampling, with_keys
from moa_jax.decode.state import RoundState, StaticConfig, StopConditions
from moa_jax.errors import InputError

MOST_BIASES = 1024  # ids of a `logit_bias`
WORD = 32  # bits of a word of a bitmask


class Biases(NamedTuple):
    """Values added to the logits of some ids per row; ids outside the vocabulary have no effect."""

    ids_BX: jax.Array
    values_BX: jax.Array


class RowSettings(NamedTuple):
    """Stop conditions and sampling settings of the rows of a call."""

    total_B: jax.Array  # maximum number of tokens, prompt included
    prompt_length_B: jax.Array
    stop_ids_BX: jax.Array  # -1 matches nothing
    sampling: BatchSampling  # with key data instead of keys, and without biases
    biases: Biases | None  # None: all rows are greedy, without other parameters
    # int32 words whose bits are the tokens that are allowed after each of N nodes; None: all are
    bitmask_BNW: jax.Array | None = None

    def batch_sampling(self, vocab_size: int) -> BatchSampling:
        """Returns the sampling settings with keys, masks and biases."""
        sampling = with_keys(self.sampling)
        if self.bitmask_BNW is not None:
            bits_BNWb = self.bitmask_BNW[..., None] >> jnp.arange(WORD) & 1
            bits_BNX = bits_BNWb.reshape(*bits_BNWb.shape[:2], -1)
            sampling = sampling._replace(allowed_BNV=bits_BNX[..., :vocab_size] > 0)
        if self.biases is None:
            return sampling
        zero_BV = jnp.zeros((len(self.total_B), vocab_size), jnp.float32)
        row_B1 = jnp.arange(len(zero_BV))[:, None]
        bias_BV = zero_BV.at[row_B1, self.biases.ids_BX].add(self.biases.values_BX, mode="drop")
        return sampling._replace(bias_BV=bias_BV)

    def prepared(
        self, setup: StaticConfig, now: RoundState, tokens_BC: jax.Array, count_B: jax.Array
    ) -> tuple[RoundState, StopConditions, BatchSampling]:
        """The settings of a call, and the state with counts of the first `count` tokens."""
        vocab_size = setup.target.vocab_size
        sampling = self.batch_sampling(vocab_size)
        of_tokens = (tokens_BC, self.prompt_length_B, vocab_size, count_B)
        now = now._replace(token_counts=counts_in(sampling, *of_tokens))
        return now, StopConditions(self.total_B, self.stop_ids_BX), sampling


def is_sampled(sampling: Sampling) -> bool:
    """Returns whether settings need more than the target's argmax."""
    calm = dataclasses.replace(sampling, seed=0)
    if sampling.temperature == 0:  # top-k, top-p and min-p do not change the argmax
        calm = dataclasses.replace(calm, top_k=0, top_p=1.0, min_p=0.0)
    return calm != Sampling()


def row_settings(
    sampling: Sampling,
    prompt_length: int,
    total: int,
    stop_ids: Sequence[int],
    vocab_size: int,
    bitmask_W: np.ndarray | None = None,
) -> RowSettings:
    """Returns the settings of one row, as host arrays.

    `bitmask_W` has the tokens that a grammar allows after the prompt, by default all. A stop id
    outside the vocabulary has no effect. Raises InputError for too many stop ids, biases or bad
    words, for a bias or a bad word outside the vocabulary, and for bans beside a grammar, which
    could leave no token.
    """
    check_stops(stop_ids)
    if len(sampling.logit_bias) > MOST_BIASES:
        raise InputError(
            f"logit_bias has {len(sampling.logit_bias)} ids; give at most {MOST_BIASES}"
        )
    stops_1X = np.full((1, MOST_STOPS), -1, np.int32)
    stops_1X[0, : len(stop_ids)] = [id if is_id(id, vocab_size) else -1 for id in stop_ids]
    ids_1X = np.full((1, MOST_BIASES), vocab_size, np.int32)
    values_1X = np.zeros((1, MOST_BIASES), np.float32)
    for place, (token, bias) in enumerate(sampling.logit_bias):
        if not is_id(token, vocab_size):
            raise InputError(f"logit_bias names the id {token} of {vocab_size}; use others")
        ids_1X[0, place], values_1X[0, place] = token, bias
    unbiased = dataclasses.replace(sampling, logit_bias=())
    total_1, length_1 = (np.array([value], np.int32) for value in (total, prompt_length))
    batch_sampling = host_batch_sampling([unbiased], vocab_size, whole=True)._replace(
        bans=bans_of([sampling], length_1, stops_1X, vocab_size)
    )
    if bitmask_W is None:
        bitmask_W = full_bitmask(vocab_size)
    elif has_bans(sampling):
        raise InputError("a grammar goes without min_tokens and bad_words; leave them out")
    biases = Biases(ids_1X, values_1X)
    return RowSettings(total_1, length_1, stops_1X, batch_sampling, biases, bitmask_W[None, None])


def full_bitmask(vocab_size: int, *axes: int) -> np.ndarray:
    """Returns words (*axes, W) that allow all tokens."""
    return np.full((*axes, -(-vocab_size // WORD)), -1, np.int32)


def joined(
    rows: Sequence[RowSettings], sampled: bool, bitmask_BNW: np.ndarray | None = None
) -> RowSettings:
    """Stacks the settings of several rows, for a program of greedy or of sampled rows.

    The masks are those of the call, since the masks of the rows are only for the first token.
    """
    rows = [row._replace(bitmask_BNW=None) for row in rows]
    if not sampled:
        rows = [row._replace(sampling=BatchSampling(), biases=None) for row in rows]
    found = jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
    return found._replace(bitmask_BNW=bitmask_BNW)
