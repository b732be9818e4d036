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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moa_jax.config import DraftShape, TargetConfig
from moa_jax.decode import sample
from moa_jax.decode.sample import Law
from moa_jax.decode.verify import Verdict, verify
from moa_jax.drafters.api import NOTHING, Cache, Drafter, Guide, Tapped, Tree, chain
from moa_jax.model import cache, llama, masks
from moa_jax.model.branch import when

Array = jax.Array


class Setup(NamedTuple):
    """Static: who decodes and how much a round drafts; without a drafter the depth is 1."""

    target: TargetConfig
    drafter: Drafter | None
    shape: DraftShape
    # (setup, law, state, tree, logits_BNV) -> choice_BN, instead of the target's own
    choose: Callable[..., Array] | None = None


class Weights(NamedTuple):
    """The parameters of both models; what plain decoding does without is None."""

    target: Any
    drafter: Any
    vocabulary: Vocabulary | None = None


class Vocabulary(NamedTuple):
    """A draft vocabulary: the drafter's head is this slice of the target's."""

    ids_U: Array  # the target's ids
    head_DU: Array


class Limits(NamedTuple):
    """Where generation ends; arrays, so that no value compiles anew."""

    total_B: Array  # tokens a row may hold, prompt included
    stop_ids_BX: Array  # a token of these ends its row and is kept; -1 matches nothing
    pause: Array  # rounds after which the loop returns to its caller


class DecodeState(NamedTuple):
    """Everything a generation carries from round to round."""

    tokens_BC: Array
    length_B: Array  # verified tokens, in all caches alike; the root stands at this index
    done_B: Array
    target_caches: llama.Caches
    draft_cache: Cache
    rounds_B: Array  # verifications so far
    accept_lengths_BR: Array  # tokens committed by each round
    drafted_BR: Array  # nodes proposed in each round, the root apart
    seen_BV: Array | None  # committed tokens, for a repetition penalty


class Verified(NamedTuple):
    """What one target pass over a tree gives: the verdict, and the accepted path's activations."""

    verdict: Verdict
    tapped: Tapped
    caches: llama.Caches


def prefill(
    setup: Setup,
    weights: Weights,
    prompt_BT: Array,
    prompt_length_B: Array,
    limits: Limits,
    law: Law,
    capacity: int,
) -> DecodeState:
    """Reads prompts, right-padded to T, and commits their first token.

    `capacity` bounds the tokens of a row; the caches get room for a last round beyond it.
    """
    B, T = prompt_BT.shape
    rows = capacity + setup.shape.num_rows
    dtype = weights.target["embed"].dtype
    caches = llama.init_caches(setup.target, B, rows, dtype)
    zero_B = jnp.zeros(B, jnp.int32)
    with jax.named_scope("prefill"):
        found = target_pass(setup, weights, chain(prompt_BT), caches, zero_B)
        seen_BV = sample.seen_in(law, prompt_BT, prompt_length_B, setup.target.vocab_size)
        last_B = prompt_length_B - 1
        root_B = token_after(weights, law, found.hidden_BTD, last_B, prompt_length_B, seen_BV)
        if seen_BV is not None:
            seen_BV = seen_BV.at[jnp.arange(B), root_B].set(True)
    draft_cache = None
    if setup.drafter is not None:
        draft_cache = setup.drafter.init_cache(B, rows, dtype)
        tapped = Tapped(llama.stack_rows(found.rows), found.tapped, found.hidden_BTD)
        draft_cache = extend(setup, weights, draft_cache, prompt_BT, zero_B, tapped)
    tokens_BC = jnp.zeros((B, rows + 1), jnp.int32).at[:, :T].set(prompt_BT)
    tokens_BC = tokens_BC.at[jnp.arange(B), prompt_length_B].set(root_B)
    done_B = _is_stop(root_B[:, None], limits)[:, 0] | (prompt_length_B + 1 >= limits.total_B)
    zero_BR = jnp.zeros((B, capacity), jnp.int32)
    return DecodeState(
        *(tokens_BC, prompt_length_B, done_B, found.caches, draft_cache),
        *(zero_B, zero_BR, zero_BR, seen_BV),
    )


def token_after(
    weights: Weights,
    law: Law,
    hidden_BTD: Array,
    index_B: Array,
    position_B: Array,
    seen_BV: Array | None,
) -> Array:
    """What the target chooses after the `index`-th token of a pass, for that position."""
    hidden_B1D = jnp.take_along_axis(hidden_BTD, index_B[:, None, None], axis=1)
    logits_B1V = llama.unembed(weights.target, hidden_B1D)
    seen_B1V = None if seen_BV is None else seen_BV[:, None]
    score_B1V = sample.scores(law, logits_B1V, seen_B1V, position_B[:, None])
    return jnp.argmax(score_B1V[:, 0], axis=-1).astype(jnp.int32)


def advance(
    setup: Setup, weights: Weights, state: DecodeState, limits: Limits, law: Law
) -> DecodeState:
    """Propose, verify, commit, extend. Rows that are done stay as they are."""
    root_B = jnp.take_along_axis(state.tokens_BC, state.length_B[:, None], axis=1)[:, 0]
    tree, draft_cache = propose(setup, weights, state, law, root_B)
    with jax.named_scope("verify"):
        found = verify_tree(setup, weights, state, law, tree)
    if setup.drafter is not None:
        tokens_BD = jnp.take_along_axis(tree.tokens_BN, found.verdict.path_BD, axis=1)
        draft_cache = extend(setup, weights, draft_cache, tokens_BD, state.length_B, found.tapped)
    state = state._replace(target_caches=found.caches, draft_cache=draft_cache)
    with jax.named_scope("commit"):
        return commit(state, tree, found.verdict, limits)


def decode(
    setup: Setup, weights: Weights, state: DecodeState, limits: Limits, law: Law
) -> DecodeState:
    """Rounds until every row is done, or until the pause, without leaving the device."""
    return lax.while_loop(
        lambda state: ~jnp.all(state.done_B) & (jnp.max(state.rounds_B) < limits.pause),
        lambda state: advance(setup, weights, state, limits, law),
        state,
    )


# ---- propose and extend -------------------------------------------------------------------


def propose(
    setup: Setup, weights: Weights, state: DecodeState, law: Law, root_B: Array
) -> tuple[Tree, Cache]:
    """The drafter's tree from each root, the root alone without a drafter."""
    if setup.drafter is None:
        return chain(root_B[:, None]), None
    with jax.named_scope("draft"):
        shared = setup.drafter.borrow(weights.target)
        if weights.vocabulary is not None:
            shared = shared | {"lm_head": weights.vocabulary.head_DU}
        return setup.drafter.propose(
            weights.drafter,
            shared,
            state.draft_cache,
            root_B,
            state.length_B,
            setup.shape,
            guide(setup, weights, state, law),
        )


def guide(setup: Setup, weights: Weights, state: DecodeState, law: Law) -> Guide:
    """Candidates under the same bias and penalty as the target; its whole law if sampled."""
    shape = setup.shape
    sampled = shape.sampled and law.key_B is not None
    own = setup.drafter.draft_ids
    ids_U = None if own is None else jnp.array(own)
    if weights.vocabulary is not None:
        ids_U = weights.vocabulary.ids_U
    narrow = (lambda row_V: row_V) if ids_U is None else (lambda row_V: row_V[..., ids_U])

    def log_law(logits_BWU: Array, path_BWP: Array) -> Array:
        seen_BWU = bias_BU = None
        if law.repetition_B is not None:
            seen_BWU = narrow(sample.mark(state.seen_BV, path_BWP))
        if law.bias_BV is not None:
            bias_BU = narrow(law.bias_BV)
        logits_BWU = sample.adjust(law, logits_BWU, seen_BWU, bias_BU)
        if sampled:
            return sample.log_law(law, logits_BWU)
        if shape.is_dynamic or shape.confidence:
            return jax.nn.log_softmax(logits_BWU, axis=-1)
        return logits_BWU  # only their order matters

    def noise(nodes: int, depth: int, size: int) -> Array:
        position_B1 = (state.length_B + depth)[:, None]
        noise_B1U = sample.gumbel(law, sample.DRAFT, position_B1, size)
        return jnp.broadcast_to(noise_B1U, (noise_B1U.shape[0], nodes, size))

    vocab_size = setup.target.vocab_size
    return Guide(log_law, noise if sampled else None, ids_U, vocab_size, ~state.done_B)


def extend(
    setup: Setup,
    weights: Weights,
    draft_cache: Cache,
    tokens_BT: Array,
    length_B: Array,
    tapped: Tapped,
) -> Cache:
    """The drafter's cache with T tokens that the target has just processed."""
    with jax.named_scope("extend"):
        shared = setup.drafter.borrow(weights.target)
        digest = setup.drafter.digest(weights.drafter, length_B, tapped)
        return setup.drafter.extend(
            weights.drafter, shared, draft_cache, tokens_BT, length_B, digest
        )


# ---- verify -------------------------------------------------------------------------------


def verify_tree(
    setup: Setup, weights: Weights, state: DecodeState, law: Law, tree: Tree
) -> Verified:
    """One target pass over the nodes that are there, as narrow as `shape.widths` allow."""
    widths = setup.shape.widths

    def at(width: int, caches: llama.Caches) -> Verified:
        some = state._replace(target_caches=caches)
        return _verify_first(setup, weights, some, law, tree, width)

    if len(widths) == 1:
        return at(widths[0], state.target_caches)
    used_BN = (tree.tokens_BN >= 0) & ~state.done_B[:, None]
    end = jnp.max(jnp.where(used_BN, 1 + jnp.arange(used_BN.shape[1]), 0))
    index = jnp.searchsorted(jnp.asarray(widths), end)
    shapes = jax.eval_shape(lambda: at(widths[0], state.target_caches))
    found = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    found = found._replace(caches=state.target_caches)
    for place, width in enumerate(widths):
        found = when(index == place, lambda found, n=width: at(n, found.caches), found)
    return found


def _verify_first(
    setup: Setup, weights: Weights, state: DecodeState, law: Law, tree: Tree, width: int
) -> Verified:
    """Verifies the first `width` nodes, and puts the accepted path's rows behind the cache's."""
    tree = _first_nodes(tree, width)
    found = target_pass(setup, weights, tree, state.target_caches, state.length_B)
    logits_BNV = llama.unembed(weights.target, found.hidden_BTD)
    choice_BN = (setup.choose or choose)(setup, law, state, tree, logits_BNV)
    levels = setup.shape.levels
    verdict = verify(tree, choice_BN, levels)
    whole = Tapped(None, found.tapped, found.hidden_BTD)
    if setup.shape.is_chain and width == levels:  # rows are in their places already
        rows = llama.stack_rows(found.rows) if _reads_rows(setup) else None
        identity_D = jnp.broadcast_to(jnp.arange(levels), verdict.path_BD.shape)
        verdict = verdict._replace(path_BD=identity_D, emitted_BD=choice_BN)
        return Verified(verdict, whole._replace(rows_LBKTE=rows), found.caches)
    path_BD = verdict.path_BD
    taken = tuple(cache.take(rows, path_BD) for rows in found.rows)
    caches = found.caches
    if not setup.shape.is_chain:
        pairs = zip(caches, taken, strict=True)
        caches = tuple(cache.write(past, rows, state.length_B) for past, rows in pairs)
    on_path = lambda x_BND: jnp.take_along_axis(x_BND, path_BD[..., None], axis=1)  # noqa: E731
    tapped = jax.tree.map(on_path, whole)
    rows = llama.stack_rows(taken) if _reads_rows(setup) else None
    return Verified(verdict, tapped._replace(rows_LBKTE=rows), caches)


def choose(setup: Setup, law: Law, state: DecodeState, tree: Tree, logits_BNV: Array) -> Array:
    """The token (B, N) that follows each node: the target's argmax, or a draw from its law."""
    seen_BNV = None
    if law.repetition_B is not None:
        above_BNN = jnp.where(tree.ancestor_BNN, tree.tokens_BN[:, None, :], NOTHING)
        seen_BNV = sample.mark(state.seen_BV, above_BNN)
    after_BNV = sample.after(law, logits_BNV, seen_BNV)
    if law.key_B is None:
        return jnp.argmax(after_BNV, axis=-1).astype(jnp.int32)
    position_BD = state.length_B[:, None] + 1 + jnp.arange(setup.shape.levels)
    of_node = lambda x_BDX: jnp.take_along_axis(x_BDX, tree.depth_BN[..., None], axis=1)  # noqa: E731
    noise_BNV = of_node(sample.gumbel(law, sample.TARGET, position_BD, logits_BNV.shape[-1]))
    if tree.draft_BNV is None:
        return sample.draw(after_BNV, noise_BNV)
    child_BNk = sample.children(tree, setup.shape.most_children)
    luck_BNk = of_node(sample.uniform(law, sample.ACCEPT, position_BD, child_BNk.shape[-1]))
    return sample.accept(after_BNV, tree.draft_BNV, child_BNk, luck_BNk, noise_BNV)


def _first_nodes(tree: Tree, width: int) -> Tree:
    draft_BNV = None if tree.draft_BNV is None else tree.draft_BNV[:, :width]
    narrow = (tree.tokens_BN, tree.parent_BN, tree.depth_BN)
    cut = [rows_BN[:, :width] for rows_BN in narrow]
    return Tree(*cut, tree.ancestor_BNN[:, :width, :width], draft_BNV)


def _reads_rows(setup: Setup) -> bool:
    return setup.drafter is not None and setup.drafter.taps.rows


def target_pass(
    setup: Setup, weights: Weights, tree: Tree, caches: llama.Caches, length_B: Array
) -> llama.Pass:
    """The target over all nodes at once; their rows are written behind the verified ones."""
    rows = caches[0].k_BKSE.shape[2]
    return llama.forward(
        setup.target,
        weights.target,
        tree.tokens_BN,
        length_B[:, None] + tree.depth_BN,
        masks.cached(tree.ancestor_BNN, length_B, rows),
        caches,
        length_B,
        tap=setup.drafter.taps.streams if setup.drafter else (),
    )


# ---- commit -------------------------------------------------------------------------------


def commit(state: DecodeState, tree: Tree, verdict: Verdict, limits: Limits) -> DecodeState:
    """Appends each row's emitted tokens up to its first stop and its limit."""
    B, D = verdict.emitted_BD.shape
    stop_BD = _is_stop(verdict.emitted_BD, limits)
    first_stop_B = jnp.where(stop_BD.any(axis=1), jnp.argmax(stop_BD, axis=1), D)
    room_B = limits.total_B - state.length_B - 1
    count_B = jnp.minimum(verdict.count_B, jnp.minimum(first_stop_B + 1, room_B))
    count_B = jnp.where(state.done_B, 0, count_B)
    drafted_B = jnp.sum(tree.tokens_BN[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    at = (jnp.arange(B), state.rounds_B)
    place = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    seen_BV = state.seen_BV
    if seen_BV is not None:
        kept_BD = jnp.where(jnp.arange(D) < count_B[:, None], verdict.emitted_BD, NOTHING)
        seen_BV = sample.mark(seen_BV, kept_BD[:, None])[:, 0]
    return state._replace(
        tokens_BC=place(state.tokens_BC, verdict.emitted_BD, state.length_B + 1),
        length_B=state.length_B + count_B,
        done_B=state.done_B | (count_B == room_B) | (first_stop_B < count_B),
        rounds_B=state.rounds_B + (count_B > 0),
        accept_lengths_BR=state.accept_lengths_BR.at[at].add(count_B),
        drafted_BR=state.drafted_BR.at[at].add(jnp.where(count_B > 0, drafted_B, 0)),
        seen_BV=seen_BV,
    )


def _is_stop(tokens_BN: Array, limits: Limits) -> Array:
    return jnp.any(tokens_BN[..., None] == limits.stop_ids_BX[:, None], axis=-1)
