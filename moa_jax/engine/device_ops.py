"""The functions that an engine compiles: (state, arrays) -> (state, report), rows are slots.

    slot 0   | prompt . answer . . root |            a request in phase DECODE
    slot 1   | prompt . answer |                     free; a prefix for later prompts
    slot 2   | prompt . . |                          a request in phase PREFILL

    prefill    processes the next chunk of a prompt, and samples the token after the prompt
    decode     runs rounds of the slots of a batch, and leaves the other slots as they are
    copy       copies the first tokens of a slot to another slot
    catch_up   lets the drafter process the tokens of a slot that it has not processed

A slot has the tokens of a sequence, the keys and values of both models, and the sequence's length.
Programs read and write the caches of a batch in place (`cache.SlotCache`), and gather and scatter
smaller arrays. On a mesh that splits slots over `data`, a batch of fewer rows than slots is moved
to separate arrays and back.

Sampling settings come with each call as `RowSettings` and are not part of the state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moa_jax.decode import logprobs, step
from moa_jax.decode.logprobs import LogProbs
from moa_jax.decode.row_settings import RowSettings
from moa_jax.decode.sampling import BatchSampling, TokenCounts, counts_in
from moa_jax.decode.state import DecodeState, RoundState, StaticConfig, StopConditions, Weights
from moa_jax.model import llama
from moa_jax.model.cache import SlotCache, is_cache
from moa_jax.speculation.controller import ROUNDS

Array = jax.Array


class SlotState(NamedTuple):
    """The state of all slots; a slot has R cache rows."""

    round: RoundState  # without token counts, which each call computes from the tokens
    tokens_BC: Array


class PrefillInput(NamedTuple):
    """T tokens of a prompt from `start` on, and the token after them; `count` of T are valid."""

    slot_1: Array
    tokens_1T1: Array
    start_1: Array
    count_1: Array
    settings: RowSettings


class PrefillReport(NamedTuple):
    """The result of a chunk; only that of the last chunk has a root."""

    root_1: Array  # the first token of the answer
    done_1: Array  # whether the root ends the answer
    logprobs: LogProbs  # (1, 1) of the root
    prompt_logprobs: LogProbs | None  # (1, T) of the token after each token of the chunk


class DecodeInput(NamedTuple):
    """The rows of a decode call; those that are not live are padding."""

    slot_B: Array
    is_live_B: Array
    settings: RowSettings
    rounds: Array  # at most ROUNDS


class DecodeReport(NamedTuple):
    """The result of a decode call; a row has at most W = ROUNDS * levels new tokens."""

    tokens_BW: Array  # the new tokens; later entries are undefined
    done_B: Array
    counts_B2R: Array  # per round: tokens committed and nodes drafted; 0 where a row was done
    logprobs: LogProbs | None  # of the W tokens, if the setup has `top_logprobs`


# ---- the state ----------------------------------------------------------------------------


def empty(
    setup: StaticConfig, weights: Weights, state: None = None, *, slots: int, rows: int
) -> tuple[SlotState, None]:
    """An empty state of `slots` slots with `rows` cache rows; every slot is marked done."""
    now = step.empty(setup, weights, slots, rows, BatchSampling())
    now = now._replace(done_B=~now.done_B)
    return SlotState(now, jnp.zeros((slots, rows + 1), jnp.int32)), None


def copy(
    setup: StaticConfig,
    weights: Weights,
    state: SlotState,
    source: Array,
    target: Array,
    length: Array,
) -> tuple[SlotState, None]:
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
    return state._replace(round=now), None


def _batch_of(state: SlotState, slot_B: Array) -> SlotState:
    """The rows of a batch; caches are not copied."""
    if not _is_in_place() and len(slot_B) == len(state.tokens_BC):  # all slots, in order
        return state

    def part(leaf: Any) -> Any:
        if is_cache(leaf) and _is_in_place():
            return SlotCache(leaf, slot_B)
        return jax.tree.map(lambda array: array[slot_B], leaf)

    return jax.tree.map(part, state, is_leaf=is_cache)


def _placed(state: SlotState, batch: SlotState, slot_B: Array) -> SlotState:
    """The state after the rows of a batch are written to their slots."""
    if not _is_in_place() and len(slot_B) == len(state.tokens_BC):
        return batch

    def part(leaf: Any, new: Any) -> Any:
        if isinstance(new, SlotCache):
            return new.arrays
        return jax.tree.map(lambda array, rows: array.at[slot_B].set(rows), leaf, new)

    return jax.tree.map(part, state, batch, is_leaf=is_cache)


def _is_in_place() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.shape["data"] == 1


# ---- prefill and decode -------------------------------------------------------------------


def prefill(
    setup: StaticConfig,
    weights: Weights,
    state: SlotState,
    chunk: PrefillInput,
    scored: bool = False,
) -> tuple[SlotState, PrefillReport]:
    """Processes a chunk of a prompt, and samples the token after the prompt.

    A drafter that may lag processes the chunk later, in `catch_up`. With `scored` the report has
    the log-probabilities of the token after each token of the chunk.
    """
    batch, tokens_1T = _batch_of(state, chunk.slot_1), chunk.tokens_1T1[:, :-1]
    put = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    tokens_1C = put(batch.tokens_BC, tokens_1T, chunk.start_1)
    now, lag = batch.round, batch.round.draft_lag
    if lag is not None:
        lag = lag._replace(draft_len_B=jnp.minimum(lag.draft_len_B, chunk.start_1))
    now = now._replace(length_B=chunk.start_1, draft_lag=lag)
    now, hidden_1D, tapped = step.read(setup, weights, now, tokens_1T, chunk.count_1)
    if setup.catches_up:
        now = now._replace(draft_lag=step.set_aside(lag, tapped, chunk.start_1))
    elif setup.drafter is not None:
        extended = (now.draft_cache, tokens_1T, chunk.start_1, tapped)
        now = now._replace(draft_cache=step.extend(setup, weights, *extended))
    found = None
    if scored:
        unembed = functools.partial(llama.unembed, weights.target)
        after = (tapped.hidden_BTD, chunk.tokens_1T1[:, 1:], setup.top_logprobs)
        found = logprobs.logprobs_along(unembed, *after)
    length_1 = chunk.settings.prompt_length_B
    now, *limits = _prepared(setup, chunk.settings, now, tokens_1C, length_1)
    now, tokens_1C, root_1, root_logprobs = step.begin_answer(
        setup, weights, now, tokens_1C, length_1, hidden_1D, *limits
    )
    batch = SlotState(now._replace(token_counts=TokenCounts()), tokens_1C)
    report = PrefillReport(root_1, now.done_B, root_logprobs, found)
    return _placed(state, batch, chunk.slot_1), report


score = functools.partial(prefill, scored=True)


def decode(
    setup: StaticConfig, weights: Weights, state: SlotState, call: DecodeInput
) -> tuple[SlotState, DecodeReport]:
    """Runs `rounds` rounds, or fewer if all live rows are done before."""
    batch = _batch_of(state, call.slot_B)
    B, begin_B = len(call.slot_B), batch.round.length_B
    now = batch.round._replace(done_B=batch.round.done_B | ~call.is_live_B)
    now, limits, sampling = _prepared(setup, call.settings, now, batch.tokens_BC, begin_B + 1)
    counts_B2R, found = jnp.zeros((B, 2, ROUNDS), jnp.int32), None
    if setup.top_logprobs is not None:
        found = logprobs.blank(*batch.tokens_BC.shape, setup.top_logprobs)
    run = DecodeState(now, batch.tokens_BC, jnp.zeros(B, jnp.int32), counts_B2R, found)
    run = step.decode(setup, weights, run, limits._replace(pause=call.rounds), sampling)
    now = run.round._replace(token_counts=TokenCounts())
    index_BW = begin_B[:, None] + 1 + jnp.arange(ROUNDS * setup.shape.levels)
    pick = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))
    report = DecodeReport(
        pick(run.tokens_BC, index_BW),
        now.done_B,
        run.counts_B2R,
        jax.tree.map(lambda rows: pick(rows, index_BW), run.logprobs),
    )
    return _placed(state, SlotState(now, run.tokens_BC), call.slot_B), report


def catch_up(
    setup: StaticConfig, weights: Weights, state: SlotState, slot_1: Array, *, sizes: Sequence[int]
) -> tuple[SlotState, None]:
    """Runs the drafter over tokens that it has not processed, see `step.sync_drafter`."""
    batch = _batch_of(state, slot_1)
    now = step.sync_drafter(setup, weights, batch.round, batch.tokens_BC, sizes)
    return _placed(state, SlotState(now, batch.tokens_BC), slot_1), None


def _prepared(
    setup: StaticConfig, settings: RowSettings, now: RoundState, tokens_BC: Array, count_B: Array
) -> tuple[RoundState, StopConditions, BatchSampling]:
    """The settings, and the state with counts of the first `count` tokens for penalties."""
    vocab_size = setup.target.vocab_size
    sampling = settings.batch_sampling(vocab_size)
    of_tokens = (tokens_BC, settings.prompt_length_B, vocab_size, count_B)
    now = now._replace(token_counts=counts_in(sampling, *of_tokens))
    return now, StopConditions(settings.total_B, settings.stop_ids_BX), sampling
