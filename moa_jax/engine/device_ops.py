"""The functions that an engine compiles: pure functions of one state, whose rows are slots.

    slot 0   | prompt . answer . . root |            a request in phase DECODE
    slot 1   | prompt . answer |                     free; a prefix for later prompts
    slot 2   | prompt . . |                          a request in phase PREFILL

    prefill    processes the next chunk of a prompt, and samples the token after the prompt
    decode     runs rounds of the slots of a batch, and leaves the other slots as they are
    copy       copies the first tokens of a slot to another slot
    catch_up   lets the drafter process the tokens of a slot that it has not processed

A slot has the tokens of a sequence, the keys and values of both models, and the sequence's length.
Programs read and write keys and values of a batch in place (`cache.SlotKV`), and gather and scatter
smaller arrays. On a mesh that splits slots over `data`, a batch of fewer rows than slots is moved
to separate arrays and back.

Sampling settings come with each call as `RowSettings` and are not part of the state.
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
from moa_jax.decode.sampling import BatchSampling, TokenCounts, host_batch_sampling
from moa_jax.decode.state import DecodeState, RoundState, StaticConfig, StopConditions, Weights
from moa_jax.errors import InputError
from moa_jax.model import llama
from moa_jax.model.cache import KV, SlotKV

Array = jax.Array

MOST_ROUNDS = 8  # of a decode call; the host sends tokens and admits requests between two calls
MOST_BIASES = 1024  # ids of a `logit_bias`


class SlotState(NamedTuple):
    """The state of all slots; a slot has R cache rows."""

    round: RoundState  # without token counts, which each call computes from the tokens
    tokens_BC: Array


class Biases(NamedTuple):
    """Values added to the logits of some ids per row; ids outside the vocabulary have no effect."""

    ids_BX: Array
    values_BX: Array


class RowSettings(NamedTuple):
    """Stop conditions and sampling settings of the rows of a call."""

    total_B: Array  # maximum number of tokens, prompt included
    prompt_length_B: Array
    stop_ids_BX: Array  # -1 matches nothing
    sampling: BatchSampling  # with key data instead of keys, and without biases
    biases: Biases | None  # None: all rows are greedy, without other parameters


class ChunkInput(NamedTuple):
    """T tokens of a prompt from `start` on; the first `count` are valid."""

    tokens_1T: Array
    after_1T: Array  # the prompt's token after each of them
    start_1: Array
    count_1: Array


class PrefillReport(NamedTuple):
    """The result of a chunk; only that of the last chunk has a root."""

    root_1: Array  # the first token of the answer
    done_1: Array  # whether the root ends the answer
    logprobs: LogProbs  # (1, 1) of the root
    prompt_logprobs: LogProbs | None  # (1, T) of the token after each token of the chunk


class DecodeReport(NamedTuple):
    """The result of a decode call; a row has at most W = MOST_ROUNDS * levels new tokens."""

    count_B: Array  # number of new tokens
    tokens_BW: Array  # the new tokens; later entries are undefined
    done_B: Array
    counts_B2R: Array  # per round: tokens committed and nodes drafted; 0 where a row was done
    logprobs: LogProbs | None  # of the W tokens, if the setup has `top_logprobs`


# ---- the state ----------------------------------------------------------------------------


def empty(setup: StaticConfig, weights: Weights, *, slots: int, rows: int) -> SlotState:
    """An empty state of `slots` slots with `rows` cache rows; every slot is marked done."""
    now = step.empty(setup, weights, slots, rows, BatchSampling())
    return SlotState(now._replace(done_B=~now.done_B), jnp.zeros((slots, rows + 1), jnp.int32))


def copy(
    setup: StaticConfig,
    weights: Weights,
    state: SlotState,
    source: Array,
    target: Array,
    length: Array,
) -> SlotState:
    """Copies the first `length` tokens of slot `source` to slot `target`."""

    def put(leaf: Array) -> Array:
        row = lax.dynamic_slice_in_dim(leaf, source, 1)
        return lax.dynamic_update_slice_in_dim(leaf, row, target, 0)

    state = jax.tree.map(put, state)
    now = state.round
    at = lambda values_B, value: values_B.at[target].set(value)
    lag = now.draft_lag
    if lag is not None:
        known = jnp.minimum(lag.draft_len_B[target], length)
        lag = lag._replace(draft_len_B=at(lag.draft_len_B, known))
    now = now._replace(
        length_B=at(now.length_B, length), done_B=at(now.done_B, False), draft_lag=lag
    )
    return state._replace(round=now)


def _batch_of(state: SlotState, slot_B: Array) -> SlotState:
    """The rows of a batch; keys and values are not copied."""
    if not _is_in_place() and len(slot_B) == len(state.tokens_BC):  # all slots, in order
        return state

    def part(leaf: Any) -> Any:
        if isinstance(leaf, KV) and _is_in_place():
            return SlotKV(leaf, slot_B)
        return jax.tree.map(lambda array: array[slot_B], leaf)

    return jax.tree.map(part, state, is_leaf=lambda leaf: isinstance(leaf, KV))


def _placed(state: SlotState, batch: SlotState, slot_B: Array) -> SlotState:
    """The state after the rows of a batch are written to their slots."""
    if not _is_in_place() and len(slot_B) == len(state.tokens_BC):
        return batch

    def part(leaf: Any, new: Any) -> Any:
        if isinstance(new, SlotKV):
            return new.kv
        return jax.tree.map(lambda array, rows: array.at[slot_B].set(rows), leaf, new)

    return jax.tree.map(part, state, batch, is_leaf=lambda leaf: isinstance(leaf, KV))


def _is_in_place() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.shape["data"] == 1


# ---- prefill and decode -------------------------------------------------------------------


def prefill(
    setup: StaticConfig,
    weights: Weights,
    state: SlotState,
    slot_1: Array,
    chunk: ChunkInput,
    settings: RowSettings,
    *,
    scored: bool = False,
) -> tuple[SlotState, PrefillReport]:
    """Processes a chunk of a prompt, and samples the token after the prompt.

    A drafter that may lag processes the chunk later, in `catch_up`. With `scored` the report has
    the log-probabilities of the token after each token of the chunk.
    """
    batch = _batch_of(state, slot_1)
    put = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    tokens_1C = put(batch.tokens_BC, chunk.tokens_1T, chunk.start_1)
    now, lag = batch.round, batch.round.draft_lag
    if lag is not None:
        lag = lag._replace(draft_len_B=jnp.minimum(lag.draft_len_B, chunk.start_1))
    now = now._replace(length_B=chunk.start_1, draft_lag=lag)
    now, hidden_1D, tapped = step.read(setup, weights, now, chunk.tokens_1T, chunk.count_1)
    if setup.catches_up:
        now = now._replace(draft_lag=step.set_aside(lag, tapped, chunk.start_1))
    elif setup.drafter is not None:
        now = now._replace(
            draft_cache=step.extend(
                setup, weights, now.draft_cache, chunk.tokens_1T, chunk.start_1, tapped
            )
        )
    found = None
    if scored:
        unembed = functools.partial(llama.unembed, weights.target)
        found = logprobs.logprobs_along(
            unembed, tapped.hidden_BTD, chunk.after_1T, setup.top_logprobs
        )
    sampling = _sampling_of(setup, settings)
    now = _with_counts(setup, sampling, now, tokens_1C, settings, settings.prompt_length_B)
    limits = StopConditions(settings.total_B, settings.stop_ids_BX)
    now, tokens_1C, root_1, root_logprobs = step.begin_answer(
        setup, weights, now, tokens_1C, settings.prompt_length_B, hidden_1D, limits, sampling
    )
    batch = SlotState(now._replace(token_counts=TokenCounts()), tokens_1C)
    report = PrefillReport(root_1, now.done_B, root_logprobs, found)
    return _placed(state, batch, slot_1), report


def decode(
    setup: StaticConfig,
    weights: Weights,
    state: SlotState,
    slot_B: Array,
    is_live_B: Array,
    settings: RowSettings,
    rounds: Array,
) -> tuple[SlotState, DecodeReport]:
    """Runs `rounds` rounds, at most MOST_ROUNDS, or fewer if all live rows are done before."""
    batch = _batch_of(state, slot_B)
    B, begin_B = len(slot_B), batch.round.length_B
    sampling = _sampling_of(setup, settings)
    now = batch.round._replace(done_B=batch.round.done_B | ~is_live_B)
    now = _with_counts(setup, sampling, now, batch.tokens_BC, settings, begin_B + 1)
    counts_B2R = jnp.zeros((B, 2, MOST_ROUNDS), jnp.int32)
    found = None
    if setup.top_logprobs is not None:
        found = logprobs.blank(*batch.tokens_BC.shape, setup.top_logprobs)
    run = DecodeState(now, batch.tokens_BC, jnp.zeros(B, jnp.int32), counts_B2R, found)
    limits = StopConditions(settings.total_B, settings.stop_ids_BX, rounds)
    run = step.decode(setup, weights, run, limits, sampling)
    now = run.round._replace(token_counts=TokenCounts())
    index_BW = begin_B[:, None] + 1 + jnp.arange(MOST_ROUNDS * setup.shape.levels)
    pick = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))
    report = DecodeReport(
        now.length_B - begin_B,
        pick(run.tokens_BC, index_BW),
        now.done_B,
        run.counts_B2R,
        jax.tree.map(lambda rows: pick(rows, index_BW), run.logprobs),
    )
    return _placed(state, SlotState(now, run.tokens_BC), slot_B), report


def catch_up(
    setup: StaticConfig,
    weights: Weights,
    state: SlotState,
    slot_1: Array,
    *,
    sizes: Sequence[int],
) -> SlotState:
    """Runs the drafter over tokens that it has not processed, see `step.sync_drafter`."""
    batch = _batch_of(state, slot_1)
    now = batch.round._replace(done_B=jnp.zeros_like(batch.round.done_B))
    now = step.sync_drafter(setup, weights, now, batch.tokens_BC, sizes)
    return _placed(
        state, SlotState(now._replace(done_B=batch.round.done_B), batch.tokens_BC), slot_1
    )


def _sampling_of(setup: StaticConfig, settings: RowSettings) -> BatchSampling:
    sampling = sampling_lib.with_keys(settings.sampling)
    if settings.biases is None:
        return sampling
    zero_BV = jnp.zeros((len(settings.total_B), setup.target.vocab_size), jnp.float32)
    row_B1 = jnp.arange(len(zero_BV))[:, None]
    bias_BV = zero_BV.at[row_B1, settings.biases.ids_BX].add(settings.biases.values_BX, mode="drop")
    return sampling._replace(bias_BV=bias_BV)


def _with_counts(
    setup: StaticConfig,
    sampling: BatchSampling,
    now: RoundState,
    tokens_BC: Array,
    settings: RowSettings,
    count_B: Array,
) -> RoundState:
    """The state with the counts of the first `count` tokens, which penalties use."""
    of_tokens = (tokens_BC, settings.prompt_length_B, setup.target.vocab_size, count_B)
    return now._replace(token_counts=sampling_lib.counts_in(sampling, *of_tokens))


# ---- settings, on the host ----------------------------------------------------------------


def is_sampled(sampling: Sampling) -> bool:
    """Whether settings need more than the target's argmax."""
    calm = dataclasses.replace(sampling, seed=0)
    if sampling.temperature == 0:  # top-k, top-p and min-p do not change the argmax
        calm = dataclasses.replace(calm, top_k=0, top_p=1.0, min_p=0.0)
    return calm != Sampling()


def row_settings(
    sampling: Sampling, prompt_length: int, total: int, stop_ids: Sequence[int], vocab_size: int
) -> RowSettings:
    """The settings of one row, as host arrays.

    A stop id outside the vocabulary has no effect. Raises InputError for too many stop ids or
    biases, and for a bias of an id outside the vocabulary.
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
    batch_sampling = host_batch_sampling([unbiased], vocab_size, whole=True)
    numbers = (np.array([value], np.int32) for value in (total, prompt_length))
    return RowSettings(*numbers, stops_1X, batch_sampling, Biases(ids_1X, values_1X))


def joined(rows: Sequence[RowSettings], sampled: bool) -> RowSettings:
    """Stacks the settings of several rows, for a program of greedy or of sampled rows."""
    if not sampled:
        rows = [row._replace(sampling=BatchSampling(), biases=None) for row in rows]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)
