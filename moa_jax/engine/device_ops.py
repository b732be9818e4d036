"""The functions that an engine compiles: (state, arrays) -> (state, report), rows are slots.

    prefill    processes the next chunk of a prompt, and samples the token after the prompt
    decode     runs rounds of the slots of a batch, and leaves the other slots as they are
    verify     runs the target over the drafts of a masked call
    copy       copies the first tokens of a slot to another slot
    catch_up   lets the drafter process the tokens of a slot that it has not processed

`decode/slots.py` has the state. Sampling settings come with each call as `RowSettings` and are not
part of the state.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moa_jax.decode import logprobs, slots, step
from moa_jax.decode.logprobs import LogProbs
from moa_jax.decode.row_settings import RowSettings
from moa_jax.decode.sampling import TokenCounts
from moa_jax.decode.slots import SlotState, batch_of, placed
from moa_jax.decode.state import DecodeState, StaticConfig, Weights
from moa_jax.drafters.api import Tree
from moa_jax.model import llama
from moa_jax.speculation.controller import ROUNDS

Array = jax.Array
empty, copy, catch_up, verify = slots.empty, slots.copy, slots.catch_up, slots.verify


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
    rounds: Array  # at most ROUNDS; a masked call runs one


class DecodeReport(NamedTuple):
    """The result of a decode call; a row has at most W = ROUNDS * levels new tokens."""

    tokens_BW: Array  # the new tokens; later entries are undefined
    done_B: Array
    counts_B2R: Array  # per round: tokens committed and nodes drafted; 0 where a row was done
    logprobs: LogProbs | None  # of the W tokens, if the setup has `top_logprobs`
    drafted: Tree | None  # of the next masked call


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
    batch, tokens_1T = batch_of(state, chunk.slot_1, chunk.start_1), chunk.tokens_1T1[:, :-1]
    put = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    tokens_1C = put(batch.tokens_BC, tokens_1T, chunk.start_1)
    now, lag = batch.round, batch.round.draft_lag
    if lag is not None:
        lag = lag._replace(draft_len_B=jnp.minimum(lag.draft_len_B, chunk.start_1))
    now = now._replace(length_B=chunk.start_1, draft_lag=lag)
    now, hidden_1D, tapped = step.read(setup, weights, now, tokens_1T, chunk.count_1)
    if setup.catches_up:
        now = step.lagging(setup, weights, now, tapped, chunk.start_1, tokens_1C)
    elif setup.drafter is not None:
        extended = (now.draft_cache, tokens_1T, chunk.start_1, tapped)
        now = now._replace(draft_cache=step.extend(setup, weights, *extended))
    found = None
    if scored:
        after = (tapped.hidden_BTD, chunk.tokens_1T1[:, 1:], setup.top_logprobs)
        found = logprobs.logprobs_along(functools.partial(llama.unembed, weights.target), *after)
    length_1 = chunk.settings.prompt_length_B
    now, *limits = chunk.settings.prepared(setup, now, tokens_1C, length_1)
    now, tokens_1C, root_1, root_logprobs = step.begin_answer(
        setup, weights, now, tokens_1C, length_1, hidden_1D, *limits
    )
    batch = SlotState(now._replace(token_counts=TokenCounts()), tokens_1C)
    report = PrefillReport(root_1, now.done_B, root_logprobs, found)
    return placed(state, batch, chunk.slot_1), report


score = functools.partial(prefill, scored=True)


def decode(
    setup: StaticConfig, weights: Weights, state: SlotState, call: DecodeInput
) -> tuple[SlotState, DecodeReport]:
    """Runs `rounds` rounds, or fewer if all live rows are done before; after `verify` one round."""
    passed, batch = state.passed, batch_of(state._replace(passed=None), call.slot_B)
    B, begin_B = len(call.slot_B), batch.round.length_B
    now = batch.round._replace(done_B=batch.round.done_B | ~call.is_live_B)
    now, limits, sampling = call.settings.prepared(setup, now, batch.tokens_BC, begin_B + 1)
    counts_B2R, found, drafted = jnp.zeros((B, 2, ROUNDS), jnp.int32), None, None
    if setup.top_logprobs is not None:
        found = logprobs.blank(*batch.tokens_BC.shape, setup.top_logprobs)
    run = DecodeState(now, batch.tokens_BC, jnp.zeros(B, jnp.int32), counts_B2R, found)
    if passed is None:
        run = step.decode(setup, weights, run, limits._replace(pause=call.rounds), sampling)
    else:
        run, drafted = step.masked_round(setup, weights, run, limits, sampling, passed)
    now = run.round._replace(token_counts=TokenCounts())
    index_BW = begin_B[:, None] + 1 + jnp.arange(ROUNDS * setup.shape.levels)
    pick = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))
    report = DecodeReport(
        pick(run.tokens_BC, index_BW),
        now.done_B,
        run.counts_B2R,
        jax.tree.map(lambda rows: pick(rows, index_BW), run.logprobs),
        drafted,
    )
    state = placed(state._replace(passed=None), SlotState(now, run.tokens_BC), call.slot_B)
    return state._replace(passed=passed), report  # a donated array needs an output
