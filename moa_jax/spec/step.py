"""One round of speculative decoding as a pure function, and the loop of rounds.

    prefill   prompt -> caches, first token = root
    round     propose: tree from the root      (drafter)
              verify:  one target pass over the tree
              commit:  the accepted path and a bonus token, cut at a stop or at the limit
              extend:  the drafter reads the target's activations of the path

Every shape is fixed; rows of a batch advance by their own counts. Row b of `tokens_BC`:

    index    0 ........ length-1 | length | length+1 ...
             verified, in caches | root   | left-overs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moa_jax import masks, target
from moa_jax.config import DraftShape, TargetConfig
from moa_jax.drafters.api import Cache, Drafter, Tapped, Tree, chain
from moa_jax.spec.verify import Verdict, verify_greedy

Array = jax.Array


class Setup(NamedTuple):
    """Static: who decodes and how much a round drafts. Without a drafter decoding is plain."""

    target: TargetConfig
    drafter: Drafter | None
    shape: DraftShape


class Weights(NamedTuple):
    """The parameters of both models; the drafter's are None in plain decoding."""

    target: Any
    drafter: Any


class Limits(NamedTuple):
    """Where generation ends; arrays, so that no value compiles anew."""

    total_B: Array  # tokens a row may hold, prompt included
    stop_ids_X: Array  # a token of these ends its row and is kept; -1 matches nothing


class DecodeState(NamedTuple):
    """Everything a generation carries from round to round."""

    tokens_BC: Array
    length_B: Array  # verified tokens, in all caches alike; the root stands at this index
    done_B: Array
    target_caches: target.Caches
    draft_cache: Cache
    rounds_B: Array  # verifications so far
    accept_lengths_BR: Array  # tokens committed by each round


def prefill(
    setup: Setup,
    weights: Weights,
    prompt_BT: Array,
    prompt_length_B: Array,
    limits: Limits,
    capacity: int,
) -> DecodeState:
    """Reads prompts, right-padded to T, and commits their first token.

    `capacity` bounds the tokens of a row; the caches get room for a last round beyond it.
    """
    B, T = prompt_BT.shape
    rows = capacity + setup.shape.depth
    dtype = weights.target["embed"].dtype
    caches = target.init_caches(setup.target, B, rows, dtype)
    zero_B = jnp.zeros(B, jnp.int32)
    with jax.named_scope("prefill"):
        found = _target_pass(setup, weights, chain(prompt_BT), caches, zero_B)
        last_B1 = (prompt_length_B - 1)[:, None]
        hidden_B1D = jnp.take_along_axis(found.hidden_BTD, last_B1[..., None], axis=1)
        logits_B1V = target.unembed(weights.target, hidden_B1D)
        root_B = jnp.argmax(logits_B1V[:, 0], axis=-1).astype(jnp.int32)
    draft_cache = None
    if setup.drafter is not None:
        draft_cache = setup.drafter.init_cache(B, rows, dtype)
        draft_cache = _extend(setup, weights, draft_cache, prompt_BT, zero_B, found)
    tokens_BC = jnp.zeros((B, rows + 1), jnp.int32).at[:, :T].set(prompt_BT)
    tokens_BC = tokens_BC.at[jnp.arange(B), prompt_length_B].set(root_B)
    done_B = _is_stop(root_B[:, None], limits)[:, 0] | (prompt_length_B + 1 >= limits.total_B)
    accepted_BR = jnp.zeros((B, capacity), jnp.int32)
    return DecodeState(
        tokens_BC, prompt_length_B, done_B, found.caches, draft_cache, zero_B, accepted_BR
    )


def advance(setup: Setup, weights: Weights, state: DecodeState, limits: Limits) -> DecodeState:
    """Propose, verify, commit, extend. Rows that are done stay as they are."""
    root_B = jnp.take_along_axis(state.tokens_BC, state.length_B[:, None], axis=1)[:, 0]
    tree, draft_cache = _propose(setup, weights, state, root_B)
    with jax.named_scope("verify"):
        found = _target_pass(setup, weights, tree, state.target_caches, state.length_B)
        verdict = verify_greedy(tree, target.unembed(weights.target, found.hidden_BTD))
    if setup.drafter is not None:
        draft_cache = _extend(setup, weights, draft_cache, tree.tokens_BN, state.length_B, found)
    state = state._replace(target_caches=found.caches, draft_cache=draft_cache)
    with jax.named_scope("commit"):
        return _commit(state, verdict, limits)


def decode(setup: Setup, weights: Weights, state: DecodeState, limits: Limits) -> DecodeState:
    """Rounds until every row is done, without leaving the device."""
    return lax.while_loop(
        lambda state: ~jnp.all(state.done_B),
        lambda state: advance(setup, weights, state, limits),
        state,
    )


def _propose(
    setup: Setup, weights: Weights, state: DecodeState, root_B: Array
) -> tuple[Tree, Cache]:
    if setup.drafter is None:
        return chain(root_B[:, None]), None
    with jax.named_scope("draft"):
        shared = setup.drafter.borrow(weights.target)
        return setup.drafter.propose(
            weights.drafter, shared, state.draft_cache, root_B, state.length_B, setup.shape
        )


def _target_pass(
    setup: Setup, weights: Weights, tree: Tree, caches: target.Caches, length_B: Array
) -> target.Pass:
    """The target over all nodes at once; their rows are written behind the verified ones."""
    rows = caches[0].k_BKSE.shape[2]
    return target.forward(
        setup.target,
        weights.target,
        tree.tokens_BN,
        length_B[:, None] + tree.depth_BN,
        masks.cached(tree.ancestor_BNN, length_B, rows),
        caches,
        length_B,
        tap=setup.drafter.taps.streams if setup.drafter else (),
    )


def _extend(
    setup: Setup,
    weights: Weights,
    cache: Cache,
    tokens_BT: Array,
    length_B: Array,
    found: target.Pass,
) -> Cache:
    with jax.named_scope("extend"):
        tapped = Tapped(found.rows_LBKTE, found.tapped, found.hidden_BTD)
        shared = setup.drafter.borrow(weights.target)
        return setup.drafter.extend(weights.drafter, shared, cache, tokens_BT, length_B, tapped)


def _commit(state: DecodeState, verdict: Verdict, limits: Limits) -> DecodeState:
    """Appends each row's emitted tokens up to its first stop and its limit."""
    B, N = verdict.emitted_BN.shape
    stop_BN = _is_stop(verdict.emitted_BN, limits)
    first_stop_B = jnp.where(stop_BN.any(axis=1), jnp.argmax(stop_BN, axis=1), N)
    room_B = limits.total_B - state.length_B - 1
    count_B = jnp.minimum(verdict.count_B, jnp.minimum(first_stop_B + 1, room_B))
    count_B = jnp.where(state.done_B, 0, count_B)
    place = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    return state._replace(
        tokens_BC=place(state.tokens_BC, verdict.emitted_BN, state.length_B + 1),
        length_B=state.length_B + count_B,
        done_B=state.done_B | (count_B == room_B) | (first_stop_B < count_B),
        rounds_B=state.rounds_B + (count_B > 0),
        accept_lengths_BR=state.accept_lengths_BR.at[jnp.arange(B), state.rounds_B].add(count_B),
    )


def _is_stop(tokens_BN: Array, limits: Limits) -> Array:
    return jnp.any(tokens_BN[..., None] == limits.stop_ids_X, axis=-1)
