"""Settings, weights and state of a round of speculative decoding.

Row b of a state's `tokens_BC`:

    index    0 ........ length-1 | length | length+1 ...
             verified, in caches | root   | left-overs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import DraftShape, TargetConfig
from moa_jax.decode.logprobs import LogProbs
from moa_jax.decode.sampling import TokenCounts
from moa_jax.decode.verify import VerifyResult
from moa_jax.drafters.api import Cache, Drafter, TargetActivations, Tree
from moa_jax.model import llama
from moa_jax.model.cache import HiddenCache
from moa_jax.model.quantize import Matrix

Array = jax.Array

NEVER = np.int32(2**31 - 1)  # a `StopConditions.pause` that no row reaches


class StaticConfig(NamedTuple):
    """Static settings of a program: the models' configs, and the shape of a draft.

    Without a drafter the depth is 1. If the drafter's caches may lag (`catches_up`), rounds of
    depth 1 leave `extend` to `sync_drafter`.
    """

    target: TargetConfig
    drafter: Drafter | None
    shape: DraftShape
    # (setup, batch_sampling, round, tree, logits_BNV) -> choice_BN, instead of `step.choose`
    token_chooser: Callable[..., Array] | None = None
    catches_up: bool = False  # whether the drafter's caches may lag
    # Number of top log-probabilities kept beside each token's own; None: no log-probabilities
    top_logprobs: int | None = None
    # Rows that calls may have written after the tokens of a sequence, see `cache.ring_rows`; None:
    # all layers' caches have all rows
    ahead: int | None = None

    @property
    def lag_limit(self) -> int | None:
        """Lag in tokens at which a drafter that reads the rows of all layers has to catch up.

        The rows of the smallest window are still in the caches then. None: no limit.
        """
        windows = [window for window in self.target.sliding_windows if window]
        reads = self.drafter is not None and self.drafter.taps.rows
        return min(windows) if windows and reads and self.ahead is not None else None


class Weights(NamedTuple):
    """The parameters of both models; parts that a driver does not use are None."""

    target: Any
    drafter: Any
    vocabulary: Vocabulary | None = None
    shared: Any = None  # the target parameters that a drafter borrows, if `target` is elsewhere


class Vocabulary(NamedTuple):
    """A draft vocabulary: the drafter's head is this slice of the target's head."""

    ids_U: Array  # the target's ids
    head_DU: Matrix


class StopConditions(NamedTuple):
    """Stop conditions of generation; arrays, so that a new value does not recompile."""

    total_B: Array  # maximum tokens of a row, prompt included
    stop_ids_BX: Array  # a token among these ends its row and is kept; -1 is padding
    pause: Array = NEVER  # value of `rounds_B` at which the loop returns to its caller


class DraftLag(NamedTuple):
    """Draft lag: activations of the verified tokens from `draft_len` on, in rows like the caches'.

    The target's keys and values are in its own caches and not in this state.

        position   0 ... draft_len-1   | draft_len .... length-1 | length
                   in drafter's cache  | pending `sync_drafter`  | root
        rows here  undefined           | of these tokens         | left-overs
    """

    draft_len_B: Array
    streams: tuple[HiddenCache, ...]
    hidden: HiddenCache | None  # None if the drafter does not read the hidden state


class RoundState(NamedTuple):
    """The part of the state that one round reads and replaces."""

    length_B: (
        Array  # verified tokens: in the target's caches; in the drafter's except for `draft_lag`
    )
    done_B: Array  # rows that rounds leave unchanged
    token_counts: TokenCounts = TokenCounts()  # counts of committed tokens, for penalties
    target_caches: llama.Caches = ()
    draft_cache: Cache = None
    draft_lag: DraftLag | None = None  # None if every round extends


class DecodeState(NamedTuple):
    """The state that a generation carries from round to round."""

    round: RoundState
    tokens_BC: Array
    rounds_B: Array  # rounds so far that committed a token
    counts_B2R: Array  # per round: tokens committed, and nodes proposed without the root
    logprobs: LogProbs | None = None  # of the answers' tokens; None if not requested

    @property
    def accept_lengths_BR(self) -> Array:
        """Tokens committed by each round."""
        return self.counts_B2R[:, 0]

    @property
    def drafted_BR(self) -> Array:
        """Nodes proposed in each round, without the root."""
        return self.counts_B2R[:, 1]

    @property
    def root_B(self) -> Array:
        """Each row's newest token, which is committed and not yet in any cache."""
        return jnp.take_along_axis(self.tokens_BC, self.round.length_B[:, None], axis=1)[:, 0]


class TreePass(NamedTuple):
    """A target pass over a tree whose nodes are not chosen yet."""

    tree: Tree
    found: llama.ForwardOutput  # without caches, which have the rows


class Verified(NamedTuple):
    """Results of one target pass over a tree, with the accepted path's activations."""

    result: VerifyResult
    tapped: TargetActivations
    caches: llama.Caches
    logprobs: LogProbs | None = None  # of the emitted tokens
