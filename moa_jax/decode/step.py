"""One round of speculative decoding as a pure function, and the loop of rounds.

    prefill   prompt -> caches, first token = root
    round     propose: a tree from the root    (drafter)
              verify:  one target pass over the tree
              commit:  the accepted path and a bonus token, cut at a stop or at the limit
              extend:  the drafter reads the target's activations of the path

Every shape is fixed, and each row of a batch advances by its own count. Row b of `tokens_BC`:

    index    0 ........ length-1 | length | length+1 ...
             verified, in caches | root   | left-overs

Three drivers call these functions: the loop of rounds here, the split server's slots, whose
passes have no draft cache, and its clients, which have no target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import DraftShape, TargetConfig
from moa_jax.decode import sample
from moa_jax.decode.sample import Law
from moa_jax.decode.verify import Verdict, verify
from moa_jax.drafters.api import NOTHING, Cache, Drafter, Guide, Shared, Tapped, Tree, chain
from moa_jax.model import cache, llama, masks
from moa_jax.model.branch import when

Array = jax.Array

NEVER = np.int32(2**31 - 1)  # rounds until a pause


class Setup(NamedTuple):
    """What is fixed when a program is compiled: who decodes, and how much a round drafts.

    Without a drafter the depth is 1.
    """

    target: TargetConfig
    drafter: Drafter | None
    shape: DraftShape
    # (setup, law, now, tree, logits_BNV) -> choice_BN, instead of the target's own
    choose: Callable[..., Array] | None = None


class Weights(NamedTuple):
    """The parameters of both models; what a driver does without is None."""

    target: Any
    drafter: Any
    vocabulary: Vocabulary | None = None
    shared: Any = None  # what the drafter borrows, where the target itself is elsewhere


class Vocabulary(NamedTuple):
    """A draft vocabulary: the drafter's head is this slice of the target's."""

    ids_U: Array  # the target's ids
    head_DU: Array


class Limits(NamedTuple):
    """Where generation ends; arrays, so that no value compiles anew."""

    total_B: Array  # tokens a row may hold, prompt included
    stop_ids_BX: Array  # a token of these ends its row and is kept; -1 matches nothing
    pause: Array = NEVER  # rounds after which the loop returns to its caller


class RoundState(NamedTuple):
    """What one round reads and replaces."""

    length_B: Array  # verified tokens, in all caches alike
    done_B: Array  # rows that stay as they are
    seen_BV: Array | None = None  # committed tokens, for a repetition penalty
    target_caches: llama.Caches = ()
    draft_cache: Cache = None


class DecodeState(NamedTuple):
    """Everything a generation carries from round to round."""

    now: RoundState
    tokens_BC: Array
    rounds_B: Array  # verifications so far
    accept_lengths_BR: Array  # tokens committed by each round
    drafted_BR: Array  # nodes proposed in each round, the root apart

    @property
    def root_B(self) -> Array:
        """Each row's newest token, which is committed and not in any cache yet."""
        return jnp.take_along_axis(self.tokens_BC, self.now.length_B[:, None], axis=1)[:, 0]


class Verified(NamedTuple):
    """What one target pass over a tree gives: the verdict, and the accepted path's activations."""

    verdict: Verdict
    tapped: Tapped
    caches: llama.Caches


# ---- the loop of rounds -------------------------------------------------------------------


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
    zero_B = jnp.zeros(B, jnp.int32)
    seen_BV = sample.nothing_seen(law, B, setup.target.vocab_size)
    caches = llama.init_caches(setup.target, B, rows, dtype)
    now = RoundState(zero_B, jnp.zeros(B, bool), seen_BV, caches)
    with jax.named_scope("prefill"):
        now, root_B, tapped = read(setup, weights, now, prompt_BT, prompt_length_B, law)
    if setup.drafter is not None:
        draft_cache = setup.drafter.init_cache(B, rows, dtype)
        draft_cache = extend(setup, weights, draft_cache, prompt_BT, zero_B, tapped)
        now = now._replace(draft_cache=draft_cache)
    tokens_BC = jnp.zeros((B, rows + 1), jnp.int32).at[:, :T].set(prompt_BT)
    tokens_BC = tokens_BC.at[jnp.arange(B), prompt_length_B].set(root_B)
    done_B = _is_stop(root_B[:, None], limits)[:, 0] | (prompt_length_B + 1 >= limits.total_B)
    zero_BR = jnp.zeros((B, capacity), jnp.int32)
    return DecodeState(now._replace(done_B=done_B), tokens_BC, zero_B, zero_BR, zero_BR)


def advance(
    setup: Setup, weights: Weights, state: DecodeState, limits: Limits, law: Law
) -> DecodeState:
    """Propose, verify, commit, extend. Rows that are done stay as they are."""
    now = state.now
    tree, draft_cache = propose(setup, weights, now, law, state.root_B)
    with jax.named_scope("verify"):
        found = verify_tree(setup, weights, now, law, tree)
    if setup.drafter is not None:
        tokens_BD = jnp.take_along_axis(tree.tokens_BN, found.verdict.path_BD, axis=1)
        draft_cache = extend(setup, weights, draft_cache, tokens_BD, now.length_B, found.tapped)
    state = state._replace(now=now._replace(target_caches=found.caches, draft_cache=draft_cache))
    with jax.named_scope("commit"):
        return record(state, tree, found.verdict, limits)


def decode(
    setup: Setup, weights: Weights, state: DecodeState, limits: Limits, law: Law
) -> DecodeState:
    """Rounds until every row is done, or until the pause, without leaving the device."""
    return lax.while_loop(
        lambda state: ~jnp.all(state.now.done_B) & (jnp.max(state.rounds_B) < limits.pause),
        lambda state: advance(setup, weights, state, limits, law),
        state,
    )


def record(state: DecodeState, tree: Tree, verdict: Verdict, limits: Limits) -> DecodeState:
    """Commits a round and writes it down: its tokens, how many they are, how many were drafted."""
    now, count_B = commit(state.now, verdict, limits)
    drafted_B = jnp.sum(tree.tokens_BN[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    at = (jnp.arange(len(count_B)), state.rounds_B)
    place = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    return DecodeState(
        now,
        tokens_BC=place(state.tokens_BC, verdict.emitted_BD, state.now.length_B + 1),
        rounds_B=state.rounds_B + (count_B > 0),
        accept_lengths_BR=state.accept_lengths_BR.at[at].add(count_B),
        drafted_BR=state.drafted_BR.at[at].add(jnp.where(count_B > 0, drafted_B, 0)),
    )


# ---- read ---------------------------------------------------------------------------------


def read(
    setup: Setup, weights: Weights, now: RoundState, tokens_BT: Array, count_B: Array, law: Law
) -> tuple[RoundState, Array, Tapped]:
    """Processes given tokens, right-padded to T, behind those that are verified already.

    Returns the state with `count` more tokens of each row in the target's caches, the token
    that the target chooses after them, and the activations of all T. The draft cache is left
    to `extend`.
    """
    found = target_pass(setup, weights, chain(tokens_BT), now.target_caches, now.length_B)
    length_B = now.length_B + count_B
    seen_BV = sample.seen_with(now.seen_BV, tokens_BT, count_B)
    last_B11 = (count_B - 1)[:, None, None]
    hidden_B1D = jnp.take_along_axis(found.hidden_BTD, last_B11, axis=1)
    logits_B1V = llama.unembed(weights.target, hidden_B1D)
    seen_B1V = None if seen_BV is None else seen_BV[:, None]
    score_B1V = sample.scores(law, logits_B1V, seen_B1V, length_B[:, None])
    root_B = jnp.argmax(score_B1V[:, 0], axis=-1).astype(jnp.int32)
    seen_BV = sample.seen_with(seen_BV, root_B[:, None])
    now = now._replace(length_B=length_B, seen_BV=seen_BV, target_caches=found.caches)
    return now, root_B, Tapped(llama.stack_rows(found.rows), found.tapped, found.hidden_BTD)


def target_pass(
    setup: Setup, weights: Weights, tree: Tree, caches: llama.Caches, length_B: Array
) -> llama.Pass:
    """The target over all nodes at once; their rows are written behind the verified ones."""
    position_BN = length_B[:, None] + tree.depth_BN
    mask_BNS = masks.cached(tree.ancestor_BNN, length_B, caches[0].k_BKSE.shape[2])
    context = llama.Context(position_BN, mask_BNS, caches, length_B)
    tap = setup.drafter.taps.streams if setup.drafter else ()
    return llama.forward(setup.target, weights.target, tree.tokens_BN, context, tap)


# ---- propose and extend -------------------------------------------------------------------


def propose(
    setup: Setup, weights: Weights, now: RoundState, law: Law, root_B: Array
) -> tuple[Tree, Cache]:
    """The tree that the drafter proposes from each root; without a drafter, the root alone."""
    if setup.drafter is None:
        return chain(root_B[:, None]), None
    with jax.named_scope("draft"):
        shared = borrowed(setup, weights)
        if weights.vocabulary is not None:
            shared = shared | {"lm_head": weights.vocabulary.head_DU}
        return setup.drafter.propose(
            weights.drafter,
            shared,
            now.draft_cache,
            root_B,
            now.length_B,
            setup.shape,
            guide(setup, weights, now, law),
        )


def borrowed(setup: Setup, weights: Weights) -> Shared:
    """The target's parameters that the drafter reads."""
    return setup.drafter.borrow(weights.target) if weights.shared is None else weights.shared


def guide(setup: Setup, weights: Weights, now: RoundState, law: Law) -> Guide:
    """How this round chooses candidates: they get the same bias and penalty as the target's tokens.

    If candidates are sampled, they get its temperature and its cuts as well.
    """
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
            seen_BWU = narrow(sample.mark(now.seen_BV, path_BWP))
        if law.bias_BV is not None:
            bias_BU = narrow(law.bias_BV)
        logits_BWU = sample.adjust(law, logits_BWU, seen_BWU, bias_BU)
        if sampled:
            return sample.log_law(law, logits_BWU)
        if shape.is_dynamic or shape.confidence:
            return jax.nn.log_softmax(logits_BWU, axis=-1)
        return logits_BWU  # only their order matters

    def noise(nodes: int, depth: int, size: int) -> Array:
        position_B1 = (now.length_B + depth)[:, None]
        noise_B1U = sample.gumbel(law, sample.DRAFT, position_B1, size)
        return jnp.broadcast_to(noise_B1U, (noise_B1U.shape[0], nodes, size))

    vocab_size = setup.target.vocab_size
    return Guide(log_law, noise if sampled else None, ids_U, vocab_size, ~now.done_B)


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
        digest = setup.drafter.digest(weights.drafter, length_B, tapped)
        shared = borrowed(setup, weights)
        return setup.drafter.extend(
            weights.drafter, shared, draft_cache, tokens_BT, length_B, digest
        )


# ---- verify -------------------------------------------------------------------------------


def verify_tree(setup: Setup, weights: Weights, now: RoundState, law: Law, tree: Tree) -> Verified:
    """Verifies the nodes that are there, in a pass of the smallest of `shape.widths` that fits."""
    widths = setup.shape.widths

    def at(width: int, caches: llama.Caches) -> Verified:
        some = now._replace(target_caches=caches)
        return _verify_first(setup, weights, some, law, tree, width)

    if len(widths) == 1:
        return at(widths[0], now.target_caches)
    used_BN = (tree.tokens_BN >= 0) & ~now.done_B[:, None]
    end = jnp.max(jnp.where(used_BN, 1 + jnp.arange(used_BN.shape[1]), 0))
    index = jnp.searchsorted(jnp.asarray(widths), end)
    shapes = jax.eval_shape(lambda: at(widths[0], now.target_caches))
    found = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    found = found._replace(caches=now.target_caches)
    for place, width in enumerate(widths):
        found = when(index == place, lambda found, n=width: at(n, found.caches), found)
    return found


def _verify_first(
    setup: Setup, weights: Weights, now: RoundState, law: Law, tree: Tree, width: int
) -> Verified:
    """Verifies the first `width` nodes, and puts the accepted path's rows behind the cache's."""
    tree = _first_nodes(tree, width)
    found = target_pass(setup, weights, tree, now.target_caches, now.length_B)
    logits_BNV = llama.unembed(weights.target, found.hidden_BTD)
    choice_BN = (setup.choose or choose)(setup, law, now, tree, logits_BNV)
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
        caches = tuple(cache.write(past, rows, now.length_B) for past, rows in pairs)
    on_path = lambda x_BND: jnp.take_along_axis(x_BND, path_BD[..., None], axis=1)  # noqa: E731
    tapped = jax.tree.map(on_path, whole)
    rows = llama.stack_rows(taken) if _reads_rows(setup) else None
    return Verified(verdict, tapped._replace(rows_LBKTE=rows), caches)


def choose(setup: Setup, law: Law, now: RoundState, tree: Tree, logits_BNV: Array) -> Array:
    """The token (B, N) that follows each node: the target's argmax, or a draw from its law."""
    seen_BNV = None
    if law.repetition_B is not None:
        above_BNN = jnp.where(tree.ancestor_BNN, tree.tokens_BN[:, None, :], NOTHING)
        seen_BNV = sample.mark(now.seen_BV, above_BNN)
    after_BNV = sample.after(law, logits_BNV, seen_BNV)
    if law.key_B is None:
        return jnp.argmax(after_BNV, axis=-1).astype(jnp.int32)
    position_BD = now.length_B[:, None] + 1 + jnp.arange(setup.shape.levels)
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


# ---- commit -------------------------------------------------------------------------------


def commit(now: RoundState, verdict: Verdict, limits: Limits) -> tuple[RoundState, Array]:
    """Keeps the emitted tokens of each row up to its first stop token or its limit.

    Returns the state after them and their number (B,), which is 0 for rows that were done.
    """
    D = verdict.emitted_BD.shape[1]
    stop_BD = _is_stop(verdict.emitted_BD, limits)
    first_stop_B = jnp.where(stop_BD.any(axis=1), jnp.argmax(stop_BD, axis=1), D)
    room_B = limits.total_B - now.length_B - 1
    count_B = jnp.minimum(verdict.count_B, jnp.minimum(first_stop_B + 1, room_B))
    count_B = jnp.where(now.done_B, 0, count_B)
    now = now._replace(
        length_B=now.length_B + count_B,
        done_B=now.done_B | (count_B == room_B) | (first_stop_B < count_B),
        seen_BV=sample.seen_with(now.seen_BV, verdict.emitted_BD, count_B),
    )
    return now, count_B


def _is_stop(tokens_BN: Array, limits: Limits) -> Array:
    return jnp.any(tokens_BN[..., None] == limits.stop_ids_BX[:, None], axis=-1)
