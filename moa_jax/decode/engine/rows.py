"""Rows of an engine's state, on the device: texts that are decoded side by side.

    row 0   | prompt . answer . . root |           |     one text: its tokens, its caches
    row 1   | nobody                               |     done, so a call leaves it as it is
    row 2   | prompt . root |                      |

`call` decodes some rounds of all rows. A prompt is read in a state of its own, which has one row:
`restart` gives it its tokens, `read` reads a chunk of them and `first` chooses what follows. Then
`insert` puts it among the others; `take` is the way back. `resized` copies a row into longer or
shorter caches, which may be done as no row of a cache depends on those behind it. In an engine that
may decode plainly the drafter's caches are late: `catch_up` has it read, so that it drafts well.

What a program needs to know of a row comes with each call, as `RowSettings`. No setting is part of
the state, so one state serves all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import Sampling
from moa_jax.config.checks import is_id
from moa_jax.decode import logprobs, step
from moa_jax.decode import sampling as sampling_lib
from moa_jax.decode.limits import MOST_STOPS, check_stops
from moa_jax.decode.logprobs import LogProbs
from moa_jax.decode.programs import scalar_batch
from moa_jax.decode.sampling import BatchSampling, TokenCounts, host_batch_sampling
from moa_jax.decode.state import DecodeState, RoundState, StaticConfig, StopConditions, Weights
from moa_jax.errors import InputError
from moa_jax.model import llama

Array = jax.Array

MOST_ROUNDS = 8  # of a call
MOST_BIASES = 1024  # ids that a row's settings name
GREEDY, WARM, WHOLE = range(3)  # laws: none, a temperature and nothing else, every setting


class Live(NamedTuple):
    """A state between two calls: `B` rows."""

    now: RoundState  # without what was said, which is gathered from the texts where a law asks
    tokens_BC: Array


class Biases(NamedTuple):
    """What is added to a few logits of each row; ids past the vocabulary add nothing."""

    ids_BX: Array
    values_BX: Array


class RowSettings(NamedTuple):
    """What the host says of each row."""

    total_B: Array  # tokens that the row may hold, prompt included
    prompt_length_B: Array
    stop_ids_BX: Array  # -1 matches nothing
    law: BatchSampling  # with the data of keys in their place, and without biases
    biases: Biases | None


class Report(NamedTuple):
    """What the host hears of a call; W = most rounds * levels, the most that a row can get."""

    count_B: Array  # new tokens
    tokens_BW: Array  # these, and then whatever stands there
    done_B: Array
    counts_B2R: Array  # of each round: tokens committed, nodes drafted; 0 where a row was done
    logprobs: LogProbs | None  # of the W tokens, where the setup asks for them


class PromptLogProbs(NamedTuple):
    """What the target thought of tokens of a prompt; those behind its end are of nothing."""

    begin_B: Array  # index of the first
    logprobs: LogProbs


# ---- a text comes and goes ----------------------------------------------------------------


def empty(setup: StaticConfig, weights: Weights, *, slots: int, rows: int) -> Live:
    """A state in which nobody is; all rows are done."""
    now = step.empty(setup, weights, slots, rows, BatchSampling())
    return Live(now._replace(done_B=~now.done_B), jnp.zeros((slots, rows + 1), jnp.int32))


def restart(
    setup: StaticConfig, weights: Weights, live: Live, tokens_BC: Array, length_B: Array
) -> Live:
    """The rows with other texts, whose first `length` tokens the target's caches hold already."""
    now, behind = live.now, live.now.draft_lag
    if behind is not None:
        behind = behind._replace(draft_len_B=jnp.minimum(behind.draft_len_B, length_B))
    now = now._replace(length_B=length_B, done_B=jnp.zeros_like(now.done_B), draft_lag=behind)
    return Live(now, tokens_BC)


def insert(setup: StaticConfig, weights: Weights, live: Live, row: Live, index: Array) -> Live:
    """The state with another one's only row at an index; both have the same number of rows."""
    put = lambda leaf, one: lax.dynamic_update_index_in_dim(leaf, one, index, 0)
    return jax.tree.map(put, live, row)


def take(setup: StaticConfig, weights: Weights, live: Live, index: Array) -> Live:
    """A copy of one row, as a state."""
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, index, 1), live)


def resized(setup: StaticConfig, weights: Weights, live: Live, *, rows: int) -> Live:
    """A copy with caches of so many rows: what fits of the old ones, then nothing.

    The axis of rows is the one that such a state has in another length.
    """
    B = len(live.tokens_BC)
    form = jax.eval_shape(lambda weights: empty(setup, weights, slots=B, rows=rows), weights)

    def fitted(leaf: Array, like: Any) -> Array:
        part = leaf[tuple(map(slice, np.minimum(leaf.shape, like.shape)))]
        wide = [(0, more) for more in np.subtract(like.shape, part.shape)]
        return jnp.copy(jnp.pad(part, wide))  # never the same buffer, which may be given away

    return jax.tree.map(fitted, live, form)


# ---- read ---------------------------------------------------------------------------------


def read(
    setup: StaticConfig, weights: Weights, live: Live, prompt_length_B: Array, *, chunk: int
) -> tuple[Live, Array, PromptLogProbs | None]:
    """Reads the next chunk of the prompts; also the last state (B, D) that was read.

    A drafter that may be late leaves it to `catch_up`. What the target thought of the next tokens
    comes with it where the setup asks for it.
    """
    now, hidden_BD, tapped = step.read_chunk(
        setup, weights, live.now, live.tokens_BC, prompt_length_B, chunk, late=setup.catches_up
    )
    live = Live(now, live.tokens_BC)
    if setup.top_logprobs is None:
        return live, hidden_BD, None
    T = tapped.hidden_BTD.shape[1]
    begin_B = now.length_B - jnp.minimum(prompt_length_B, T) + 1  # a chunk may have gone back
    tokens_BT = _picked(live.tokens_BC, begin_B[:, None] + jnp.arange(T))
    unembed = functools.partial(llama.unembed, weights.target)
    found = logprobs.logprobs_along(unembed, tapped.hidden_BTD, tokens_BT, setup.top_logprobs)
    return live, hidden_BD, PromptLogProbs(begin_B, found)


def first(
    setup: StaticConfig, weights: Weights, live: Live, hidden_BD: Array, given: RowSettings
) -> tuple[Live, Array, Array, LogProbs | None]:
    """The first token of each answer behind its prompt; also these (B,), and who is done.

    Log-probabilities (B, 1) come with it where the setup asks for them.
    """
    law = _law(setup, given)
    now = _with_said(setup, law, live, given, given.prompt_length_B)
    limits = StopConditions(given.total_B, given.stop_ids_BX)
    now, tokens_BC, root_B, found = step.begin_answer(
        setup, weights, now, live.tokens_BC, given.prompt_length_B, hidden_BD, limits, law
    )
    return Live(now._replace(token_counts=TokenCounts()), tokens_BC), root_B, now.done_B, found


# ---- decode -------------------------------------------------------------------------------


def call(
    setup: StaticConfig,
    weights: Weights,
    live: Live,
    given: RowSettings,
    ended_B: Array,
    rounds: Array,
) -> tuple[Live, Report]:
    """Decodes at most `rounds` rounds, at most MOST_ROUNDS, of the rows that are not done.

    Rows that the host has ended are done from now on.
    """
    live = _without(live, ended_B)
    B, begin_B = len(ended_B), live.now.length_B
    law = _law(setup, given)
    now = _with_said(setup, law, live, given, begin_B + 1)
    counts_B2R = jnp.zeros((B, 2, MOST_ROUNDS), jnp.int32)
    found = None
    if setup.top_logprobs is not None:
        found = logprobs.blank(*live.tokens_BC.shape, setup.top_logprobs)
    state = DecodeState(now, live.tokens_BC, jnp.zeros(B, jnp.int32), counts_B2R, found)
    limits = StopConditions(given.total_B, given.stop_ids_BX, rounds)
    state = step.decode(setup, weights, state, limits, law)
    now = state.round._replace(token_counts=TokenCounts())
    index_BW = begin_B[:, None] + 1 + jnp.arange(MOST_ROUNDS * setup.shape.levels)
    report = Report(
        now.length_B - begin_B,
        _picked(state.tokens_BC, index_BW),
        now.done_B,
        state.counts_B2R,
        jax.tree.map(lambda rows: _picked(rows, index_BW), state.logprobs),
    )
    return Live(now, state.tokens_BC), report


def catch_up(
    setup: StaticConfig,
    weights: Weights,
    live: Live,
    ended_B: Array,
    most_turns: Array,
    *,
    sizes: Sequence[int],
) -> Live:
    """The drafter reads what `read` and rounds of plain decoding have left, in some turns.

    Rows that the host has ended are not waited for.
    """
    live = _without(live, ended_B)
    now = step.sync_drafter(setup, weights, live.now, live.tokens_BC, sizes, most_turns)
    return Live(now, live.tokens_BC)


def _without(live: Live, ended_B: Array) -> Live:
    """The state in which these rows are done, and empty: a CPU reads as far as any row goes."""
    now, behind = live.now, live.now.draft_lag
    none_if_ended = lambda count_B: jnp.where(ended_B, 0, count_B)
    if behind is not None:
        behind = behind._replace(draft_len_B=none_if_ended(behind.draft_len_B))
    length_B = none_if_ended(now.length_B)
    now = now._replace(length_B=length_B, done_B=now.done_B | ended_B, draft_lag=behind)
    return live._replace(now=now)


def _picked(rows_BC: Array, index_BW: Array) -> Array:
    return jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(rows_BC, index_BW)


def _law(setup: StaticConfig, given: RowSettings) -> BatchSampling:
    law = sampling_lib.with_keys(given.law)
    if given.biases is None:
        return law
    zero_BV = jnp.zeros((len(given.total_B), setup.target.vocab_size), jnp.float32)
    row_B1 = jnp.arange(len(zero_BV))[:, None]
    bias_BV = zero_BV.at[row_B1, given.biases.ids_BX].add(given.biases.values_BX, mode="drop")
    return law._replace(bias_BV=bias_BV)


def _with_said(
    setup: StaticConfig, law: BatchSampling, live: Live, given: RowSettings, count_B: Array
) -> RoundState:
    """What a round reads, with what a law wants to know of the first `count` tokens."""
    of_text = (live.tokens_BC, given.prompt_length_B, setup.target.vocab_size, count_B)
    return live.now._replace(token_counts=sampling_lib.counts_in(law, *of_text))


# ---- what the host gives ------------------------------------------------------------------


class Kind(NamedTuple):
    """Which settings a call serves."""

    law: int  # GREEDY, WARM or WHOLE
    likely: bool = False  # with log-probabilities

    def servers(self) -> list[Kind]:
        """The kinds that serve this one, those first that do least besides."""
        laws = range(self.law, WHOLE + 1)
        return [Kind(law, likely) for likely in sorted({self.likely, True}) for law in laws]


EVERY = Kind(WHOLE)  # but for log-probabilities
LIKELY = Kind(WHOLE, likely=True)


def kind_of(sampling: Sampling, likely: bool = False) -> Kind:
    """The least kind that serves these settings, with log-probabilities or without."""
    calm = dataclasses.replace(sampling, seed=0)
    if sampling.temperature == 0:  # cuts keep the likeliest token
        calm = dataclasses.replace(calm, top_k=0, top_p=1.0, min_p=0.0)
    if calm == Sampling():
        return Kind(GREEDY, likely)
    is_warm = dataclasses.replace(calm, temperature=0.0) == Sampling()
    return Kind(WARM if is_warm else WHOLE, likely)


def given_of(
    sampling: Sampling, prompt_length: int, total: int, stop_ids: Sequence[int], vocab_size: int
) -> RowSettings:
    """One row's settings, as a call of every kind is given them; the device is not asked.

    A stop id that the vocabulary does not have stops nothing.
    Raises InputError for too many stop ids or biases, and for a bias outside the vocabulary.
    """
    check_stops(stop_ids)
    if len(sampling.logit_bias) > MOST_BIASES:
        raise InputError(f"logit_bias names {len(sampling.logit_bias)} ids: at most {MOST_BIASES}")
    stops_1X = np.full((1, MOST_STOPS), -1, np.int32)
    stops_1X[0, : len(stop_ids)] = [id if is_id(id, vocab_size) else -1 for id in stop_ids]
    biases = Biases(np.full((1, MOST_BIASES), vocab_size, np.int32), np.zeros((1, MOST_BIASES)))
    for place, (token, bias) in enumerate(dict(sampling.logit_bias).items()):
        if not is_id(token, vocab_size):
            raise InputError(f"logit_bias names the id {token} of {vocab_size}; use others")
        biases.ids_BX[0, place], biases.values_BX[0, place] = token, bias
    law = host_batch_sampling(
        [dataclasses.replace(sampling, logit_bias=())], vocab_size, whole=True
    )
    biases = biases._replace(values_BX=biases.values_BX.astype(np.float32))
    return RowSettings(scalar_batch(total), scalar_batch(prompt_length), stops_1X, law, biases)


def together(rows: Sequence[RowSettings], kind: Kind) -> RowSettings:
    """The settings of several rows side by side, as calls of this kind are given them."""
    return jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *(_narrowed(row, kind) for row in rows)
    )


def _narrowed(given: RowSettings, kind: Kind) -> RowSettings:
    if kind.law == WHOLE:
        return given
    warm = BatchSampling(given.law.key_B, given.law.temperature_B)
    return given._replace(law=warm if kind.law == WARM else BatchSampling(), biases=None)
