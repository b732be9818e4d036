"""The state of all slots of an engine, and the rows of a batch in it.

    slot 0   | prompt . answer . . root |            a request in phase DECODE
    slot 1   | prompt . answer |                     free; a prefix for later prompts
    slot 2   | prompt . . |                          a request in phase PREFILL

A slot has the tokens of a sequence, the keys and values of both models, and the sequence's length.
Programs read and write the caches of a batch in place (`cache.SlotCache`), and gather and scatter
smaller arrays. On a mesh that splits slots over `data`, a batch of fewer rows than slots is moved
to separate arrays and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.decode import step
from moa_jax.decode.sampling import BatchSampling
from moa_jax.decode.state import RoundState, StaticConfig, TreePass, Weights
from moa_jax.drafters.api import Tree
from moa_jax.model.cache import SlotCache, is_cache

Array = jax.Array


# (tokens of a slot, a prompt, number of tokens written to the slot) -> length of the longest common
# prefix, or 0 if the slot has lost rows that the token after this prefix sees
Usable = Callable[[np.ndarray, np.ndarray, int], int]


class SlotState(NamedTuple):
    """The state of all slots; a slot has R cache rows."""

    round: RoundState  # without token counts, which each call computes from the tokens
    tokens_BC: Array
    passed: TreePass | None = None  # of a batch, for the masked call that follows


class Drafts(NamedTuple):
    """The trees that the next masked call of a batch verifies; roots are undefined."""

    slot_B: Array
    tree: Tree


def empty(
    setup: StaticConfig, weights: Weights, state: None = None, *, slots: int, rows: int
) -> tuple[SlotState, None]:
    """An empty state of `slots` slots with `rows` cache rows; every slot is marked done."""
    now = step.empty(setup, weights, slots, rows, BatchSampling())
    now = now._replace(done_B=~now.done_B)
    return SlotState(now, jnp.zeros((slots, rows + 1), jnp.int32)), None


def verify(
    setup: StaticConfig, weights: Weights, state: SlotState, drafts: Drafts
) -> tuple[SlotState, None]:
    """Runs the target over the trees of a batch, before the host has made their masks."""
    batch = batch_of(state, drafts.slot_B)
    root_B = jnp.take_along_axis(batch.tokens_BC, batch.round.length_B[:, None], axis=1)[:, 0]
    now, passed = step.tree_pass(setup, weights, batch.round, drafts.tree, root_B)
    return placed(state, batch._replace(round=now), drafts.slot_B)._replace(passed=passed), None


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


def catch_up(
    setup: StaticConfig, weights: Weights, state: SlotState, slot_1: Array, *, sizes: Sequence[int]
) -> tuple[SlotState, None]:
    """Runs the drafter over tokens that it has not processed, see `step.sync_drafter`."""
    batch = batch_of(state, slot_1)
    now = step.sync_drafter(setup, weights, batch.round, batch.tokens_BC, sizes)
    return placed(state, SlotState(now, batch.tokens_BC), slot_1), None


def common_prefix(held: np.ndarray, wanted: np.ndarray, written: int) -> int:
    """The length of the longest common prefix; a `Usable` for caches that keep all rows."""
    size = min(len(held), len(wanted))
    differ = np.flatnonzero(held[:size] != wanted[:size])
    return int(differ[0]) if len(differ) else size


def batch_of(state: SlotState, slot_B: Array, used_B: Array | None = None) -> SlotState:
    """The rows of a batch; caches are not copied, unless a mesh splits slots.

    Copies have zeros after the first `used` rows, if given: a slot may hold an earlier NaN, which
    attention without a `SlotCache` would multiply by 0.
    """
    if not _is_in_place() and len(slot_B) == len(state.tokens_BC):  # all slots, in order
        return state

    def part(leaf: Any) -> Any:
        if is_cache(leaf) and _is_in_place():
            return SlotCache(leaf, slot_B)
        rows = jax.tree.map(lambda array: array[slot_B], leaf)
        if is_cache(leaf) and used_B is not None:
            is_used_BS = jnp.arange(rows[0].shape[2]) < used_B[:, None]
            rows = jax.tree.map(lambda row: jnp.where(is_used_BS[:, None, :, None], row, 0), rows)
        return rows

    return jax.tree.map(part, state, is_leaf=is_cache)


def placed(state: SlotState, batch: SlotState, slot_B: Array) -> SlotState:
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
