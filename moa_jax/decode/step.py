"""One round of speculative decoding as a pure function, and the loop of rounds.

    prefill   prompt -> caches, chunk by chunk; first token = root
    round     propose: a tree from the root    (drafter)
              verify:  one target pass over the tree
              commit:  the accepted path and a bonus token, cut at a stop or at the limit
              extend:  the drafter reads the target's activations of the path

Every shape is fixed, and each row of a batch advances by its own count (picture in state.py).

These drivers call the functions: the loop of rounds here, which sessions run to the end and
engines run for a few rounds per call; an engine's prefill programs; the split server's slots,
whose passes have no draft cache; the split server's clients, which have no target; and
`infer.bench.phases`, which times each function alone.

Plain rounds between drafted rounds skip `extend`, and prefill may skip `extend` as well. `Behind`
holds the draft lag, and `catch_up` clears the lag. Until then drafts are worse; the output is the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from moa_jax.decode import logprobs, sample
from moa_jax.decode.logprobs import LogProbs
from moa_jax.decode.sample import Law
from moa_jax.decode.state import (
    NEVER,
    Behind,
    DecodeState,
    Limits,
    RoundState,
    Setup,
    Verified,
    Weights,
)
from moa_jax.decode.verify import Verdict, verify
from moa_jax.drafters.api import NOTHING, Cache, Guide, Shared, Tapped, Tree, chain
from moa_jax.model import cache, llama, masks, sharding
from moa_jax.model.attention import keep_path
from moa_jax.model.cache import States
from moa_jax.model.pieces import finite_argmax
from moa_jax.runtime.devices import traced_platform

Array = jax.Array

CATCH_UP = 32  # tokens of each row per turn of `catch_up`


# ---- the loop of rounds -------------------------------------------------------------------


def prefill(
    setup: Setup,
    weights: Weights,
    prompt_BT: Array,
    prompt_length_B: Array,
    limits: Limits,
    law: Law,
    *,
    capacity: int,
    chunks: Sequence[int],
    draft_rows: int | None = None,
) -> DecodeState:
    """Processes prompts, right-padded to T, in chunks, and commits their first new token.

    Chunks have the first of the given sizes until one chunk of each smaller size holds the rest.
    With sizes 4 and 2, prompts of 9 and 8 tokens are processed as

        0 1 2 3 | 4 5 6 7 | 7 8        0 1 2 3 | 4 5 6 7

    `capacity` is the maximum number of tokens of a row; the caches get `draft_rows` more rows for a
    last round, by default the shape's `num_rows`. The prompt length changes only the number of
    iterations of the loop.
    """
    B, T = prompt_BT.shape
    rows = capacity + (setup.shape.num_rows if draft_rows is None else draft_rows)
    tokens_BC = jnp.zeros((B, rows + 1), jnp.int32).at[:, :T].set(prompt_BT)
    now = empty(setup, weights, B, rows, law)
    hidden_BD = jnp.zeros((B, setup.target.block.hidden_size), weights.target["embed"].dtype)
    with jax.named_scope("prefill"):
        for place, size in enumerate(chunks):
            left_B = prompt_length_B - sum(chunks[place + 1 :])
            now, hidden_BD = lax.while_loop(
                lambda carry, left_B=left_B: jnp.any(carry[0].length_B < left_B),
                lambda carry, size=size: read_chunk(
                    setup, weights, carry[0], tokens_BC, prompt_length_B, size
                )[:2],
                (now, hidden_BD),
            )
        now, tokens_BC, root_B, found = begin_answer(
            setup, weights, now, tokens_BC, prompt_length_B, hidden_BD, limits, law
        )
    now = all_known(now)
    zero_B, zero_B2R = jnp.zeros(B, jnp.int32), jnp.zeros((B, 2, capacity), jnp.int32)
    state = DecodeState(now, tokens_BC, zero_B, zero_B2R)
    if found is not None:
        rows = logprobs.blank(*tokens_BC.shape, setup.top_logprobs)
        state = state._replace(logprobs=logprobs.placed(rows, found, prompt_length_B))
    return state


def advance(
    setup: Setup, weights: Weights, state: DecodeState, limits: Limits, law: Law
) -> DecodeState:
    """Runs one round: propose, verify, commit, extend. Rows that are done do not change."""
    now = state.now
    tree, draft_cache = propose(setup, weights, now, law, state.root_B)
    with jax.named_scope("verify"):
        found = verify_tree(setup, weights, now, law, tree)
    behind = now.behind
    if setup.shape.num_drafted:
        tokens_BD = jnp.take_along_axis(tree.tokens_BN, found.verdict.path_BD, axis=1)
        draft_cache = extend(setup, weights, draft_cache, tokens_BD, now.length_B, found.tapped)
    if behind is not None:
        behind = _set_aside(behind, found.tapped, now.length_B)
    now = now._replace(target_caches=found.caches, draft_cache=draft_cache, behind=behind)
    with jax.named_scope("commit"):
        state = record(state._replace(now=now), tree, found, limits)
    if setup.shape.num_drafted and behind is not None:  # rows that lagged before still lag
        is_late_B = now.done_B | (behind.known_B < now.length_B)
        known_B = jnp.where(is_late_B, behind.known_B, state.now.length_B)
        state = state._replace(now=state.now._replace(behind=behind._replace(known_B=known_B)))
    return state


def decode(
    setup: Setup, weights: Weights, state: DecodeState, limits: Limits, law: Law
) -> DecodeState:
    """Runs rounds on the device until every row is done or reaches `limits.pause`."""
    full = lambda carried: jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), carried, state)
    is_one = len(state.rounds_B) == 1  # a larger batch would be copied into and out of lean form
    lean = cache.lean if traced_platform() == "cpu" and is_one else lambda state: state

    def goes_on(carried: DecodeState) -> Array:
        now = full(carried)
        return jnp.any(~now.now.done_B & (now.rounds_B < limits.pause))

    def turn(carried: DecodeState) -> DecodeState:
        return lean(advance(setup, weights, full(carried), limits, law))

    return full(lax.while_loop(goes_on, turn, lean(state)))


def record(state: DecodeState, tree: Tree, found: Verified, limits: Limits) -> DecodeState:
    """Commits a round, and appends its tokens and its counts of committed and drafted tokens."""
    now, count_B = commit(state.now, found.verdict, limits)
    drafted_B = jnp.sum(tree.tokens_BN[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    counts_B2 = jnp.stack([count_B, jnp.where(count_B > 0, drafted_B, 0)], axis=1)
    row_B = jnp.arange(len(count_B))
    place = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    rows, start_B = state.logprobs, state.now.length_B + 1
    return DecodeState(
        now,
        tokens_BC=place(state.tokens_BC, found.verdict.emitted_BD, start_B),
        rounds_B=state.rounds_B + (count_B > 0),
        counts_B2R=state.counts_B2R.at[row_B, :, state.rounds_B].add(counts_B2),
        logprobs=rows and logprobs.placed(rows, found.logprobs, start_B),
    )


# ---- read ---------------------------------------------------------------------------------


def empty(setup: Setup, weights: Weights, batch: int, rows: int, law: Law) -> RoundState:
    """Returns the state of empty sequences, with caches of `rows` rows."""
    dtype = weights.target["embed"].dtype
    behind = None
    if setup.catches_up:
        taps, width = setup.drafter.taps, setup.target.block.hidden_size
        nothing = lambda: States(jnp.zeros((batch, rows, width), dtype))
        streams = tuple(nothing() for _ in taps.streams)
        behind = Behind(jnp.zeros(batch, jnp.int32), streams, nothing() if taps.hidden else None)
    state = RoundState(
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
        sample.nothing_said(law, batch, setup.target.vocab_size),
        llama.init_caches(setup.target, batch, rows, dtype),
        setup.drafter and setup.drafter.init_cache(batch, rows, dtype),
        behind,
    )
    return sharding.constrain_state(state)


def read_chunk(
    setup: Setup,
    weights: Weights,
    now: RoundState,
    text_BC: Array,
    prompt_length_B: Array,
    size: int,
    late: bool = False,
) -> tuple[RoundState, Array, Tapped]:
    """Runs target and drafter over the next chunk of each prompt.

    A chunk has `size` tokens, or the number of cache rows if that is smaller. With `late` the
    drafter does not run, and the activations that the drafter needs are stored in `now.behind`.

    The chunk of a row with fewer tokens left starts earlier, and ends with the row's last token. So
    no chunk is written past the end of the caches, and finished rows wait for the other rows.
    Tokens that are processed again give the same cache rows. Two rows in chunks of 4:

        prompt of 10   0 1 2 3 | 4 5 6 7 |     6 7 8 9
        prompt of 5    0 1 2 3 | 1 2 3 4 |     1 2 3 4

    Returns the results of `read`.
    """
    size = min(size, now.target_caches[0].k_BKSE.shape[2])
    start_B = jnp.minimum(now.length_B, jnp.maximum(prompt_length_B - size, 0))
    cut = jax.vmap(lambda text_C, start: lax.dynamic_slice(text_C, (start,), (size,)))
    tokens_BT = cut(text_BC, start_B)
    count_B = jnp.minimum(prompt_length_B - start_B, size)
    now = now._replace(length_B=start_B)
    now, hidden_BD, tapped = read(setup, weights, now, tokens_BT, count_B)
    if late:
        now = now._replace(behind=_set_aside(now.behind, tapped, start_B))
    elif setup.drafter is not None:
        draft_cache = extend(setup, weights, now.draft_cache, tokens_BT, start_B, tapped)
        now = now._replace(draft_cache=draft_cache)
    return now, hidden_BD, tapped


def read(
    setup: Setup, weights: Weights, now: RoundState, tokens_BT: Array, count_B: Array
) -> tuple[RoundState, Array, Tapped]:
    """Runs the target over given tokens, right-padded to T, after the verified tokens.

    Returns the state with `count` more tokens of each row in the target's caches, the
    final-normed state (B, D) of the last new token, and the activations of all T tokens. `extend`
    updates the draft cache. Penalties count the tokens as part of the prompt.
    """
    found = target_pass(setup, weights, chain(tokens_BT), now.target_caches, now.length_B)
    last_B11 = (count_B - 1)[:, None, None]
    hidden_BD = jnp.take_along_axis(found.hidden_BTD, last_B11, axis=1)[:, 0]
    now = now._replace(
        length_B=now.length_B + count_B,
        said=sample.said_in_prompt(now.said, tokens_BT, count_B),
        target_caches=found.caches,
    )
    rows = llama.stack_rows(found.rows) if _reads_rows(setup) else None
    return now, hidden_BD, Tapped(rows, found.tapped, found.hidden_BTD)


def choose_after(
    weights: Weights, now: RoundState, hidden_BD: Array, law: Law
) -> tuple[RoundState, Array]:
    """Returns the target's next token (B,), and the state whose penalty counts include that token.

    The token is NOTHING if a logit is not finite.
    """
    logits_B1V = llama.unembed(weights.target, hidden_BD[:, None])
    score_B1V = sample.scores(law, logits_B1V, now.said.each(), now.length_B[:, None])
    is_finite_B = jnp.isfinite(logits_B1V).all(axis=(1, 2))
    root_B = jnp.where(is_finite_B, finite_argmax(score_B1V[:, 0]), NOTHING)
    return now._replace(said=sample.said_in_answer(now.said, root_B[:, None])), root_B


def begin_answer(
    setup: Setup,
    weights: Weights,
    now: RoundState,
    tokens_BC: Array,
    prompt_length_B: Array,
    hidden_BD: Array,
    limits: Limits,
    law: Law,
) -> tuple[RoundState, Array, Array, LogProbs | None]:
    """Commits the first new token of each prompt.

    Returns the state, the tokens (B, C) with the new ones, the new tokens (B,), and their
    log-probabilities (B, 1), which are None without `setup.top_logprobs`.
    """
    now, root_B = choose_after(weights, now, hidden_BD, law)
    tokens_BC = tokens_BC.at[jnp.arange(len(root_B)), prompt_length_B].set(root_B)
    done_B = _is_stop(root_B[:, None], limits)[:, 0] | (prompt_length_B + 1 >= limits.total_B)
    found = None
    if setup.top_logprobs is not None:
        logits_B1V = llama.unembed(weights.target, hidden_BD[:, None])
        found = logprobs.logprobs_of(logits_B1V, root_B[:, None], setup.top_logprobs)
    return now._replace(done_B=done_B), tokens_BC, root_B, found


def target_pass(
    setup: Setup, weights: Weights, tree: Tree, caches: llama.Caches, length_B: Array
) -> llama.Pass:
    """Runs the target over all nodes at once; their cache rows follow the verified rows."""
    position_BN = length_B[:, None] + tree.depth_BN
    context = llama.Context(position_BN, masks.sight(length_B, tree.ancestor_BNN), caches)
    tap = setup.drafter.taps.streams if setup.drafter else ()
    return llama.forward(setup.target, weights.target, tree.tokens_BN, context, tap)


# ---- propose and extend -------------------------------------------------------------------


def propose(
    setup: Setup, weights: Weights, now: RoundState, law: Law, root_B: Array
) -> tuple[Tree, Cache]:
    """Returns the drafter's tree after each root; the root alone in plain decoding."""
    if not setup.shape.num_drafted:
        return chain(root_B[:, None]), now.draft_cache
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
    """Returns the target's parameters that the drafter reads."""
    return setup.drafter.borrow(weights.target) if weights.shared is None else weights.shared


def guide(setup: Setup, weights: Weights, now: RoundState, law: Law) -> Guide:
    """Returns the round's candidate selection, which applies the target's bias and penalties.

    Sampled candidates also get the target's temperature, top-k, top-p and min-p.
    """
    sampled = setup.shape.sampled and law.key_B is not None
    own = setup.drafter.draft_ids
    ids_U = None if own is None else jnp.array(own)
    if weights.vocabulary is not None:
        ids_U = weights.vocabulary.ids_U
    some = slice(None) if ids_U is None else ids_U
    bias_BU = None if law.bias_BV is None else law.bias_BV[..., some]

    def adjusted(logits_BWU: Array, path_BWP: Array) -> Array:
        said = now.said
        if law.penalises:
            said = sample.said_along(said, path_BWP[..., 1:]).of(some)
        logits_BWU = sample.adjust(law, logits_BWU, said, bias_BU)
        return sample.log_law(law, logits_BWU) if sampled else logits_BWU

    def noise(nodes: int, depth: int, size: int) -> Array:
        position_B1 = (now.length_B + depth)[:, None]
        noise_B1U = sample.gumbel(law, sample.DRAFT, position_B1, size)
        return jnp.broadcast_to(noise_B1U, (noise_B1U.shape[0], nodes, size))

    vocab_size = setup.target.vocab_size
    return Guide(adjusted, noise if sampled else None, ids_U, vocab_size)


def extend(
    setup: Setup,
    weights: Weights,
    draft_cache: Cache,
    tokens_BT: Array,
    length_B: Array,
    tapped: Tapped,
) -> Cache:
    """Extends the drafter's cache by T tokens that the target has just processed."""
    if not setup.drafter.taps.hidden:
        tapped = tapped._replace(hidden_BTD=None)  # as in `catch_up`
    with jax.named_scope("extend"):
        digest = setup.drafter.digest(weights.drafter, length_B, tapped)
        shared = borrowed(setup, weights)
        return setup.drafter.extend(
            weights.drafter, shared, draft_cache, tokens_BT, length_B, digest
        )


def catch_up(
    setup: Setup,
    weights: Weights,
    now: RoundState,
    text_BC: Array,
    sizes: Sequence[int] = (CATCH_UP,),
    most_turns: Array = NEVER,
) -> RoundState:
    """Runs the drafter over the verified tokens of running rows that its cache lacks, in turns.

    A turn of a larger size processes `size` tokens of each row while a row lacks at least `size`
    tokens; turns of the last size process the rest. At most `most_turns` turns have the last size,
    and the turns of each larger size process at most the same number of tokens, rounded up to
    whole turns.

    Caches need the last size's number of rows after the root, because a turn always writes all its
    rows. Larger sizes are only for a batch of one row.
    """
    *larger, least = sizes
    for size in larger:
        most = -(-most_turns // (size // least))  # >= 1, since programs are prepared with 1 turn
        now = _read_in_turns(setup, weights, now, text_BC, size, size, most)
    return _read_in_turns(setup, weights, now, text_BC, least, 1, most_turns)


def _read_in_turns(
    setup: Setup,
    weights: Weights,
    now: RoundState,
    text_BC: Array,
    size: int,
    enough: int,
    most_turns: Array,
) -> RoundState:
    """Runs turns of a size while a row has `enough` tokens that the drafter's cache lacks."""
    cut = jax.vmap(lambda text_C, start: lax.dynamic_slice(text_C, (start,), (size,)))

    def goes_on(carry: tuple[Array, Array, Cache]) -> Array:
        turn, known_B, _ = carry
        is_late = jnp.any(~now.done_B & (now.length_B - known_B >= enough))
        is_blank = jnp.all(now.length_B == 0)  # the state on which programs are prepared
        return (turn < most_turns) & (is_late | is_blank & (turn == 0))

    def read(carry: tuple[Array, Array, Cache]) -> tuple[Array, Array, Cache]:
        turn, known_B, draft_cache = carry
        tapped = _tapped_before(setup, now, known_B[:, None] + jnp.arange(size))
        tokens_BT = cut(text_BC, known_B)
        draft_cache = extend(setup, weights, draft_cache, tokens_BT, known_B, tapped)
        return turn + 1, jnp.minimum(known_B + size, now.length_B), draft_cache

    begin = (jnp.int32(0), now.behind.known_B, now.draft_cache)
    _, known_B, draft_cache = lax.while_loop(goes_on, read, begin)
    return now._replace(draft_cache=draft_cache, behind=now.behind._replace(known_B=known_B))


def caught_up(setup: Setup, weights: Weights, state: DecodeState) -> DecodeState:
    """Returns the state of a generation without draft lag."""
    return state._replace(now=catch_up(setup, weights, state.now, state.tokens_BC))


def _tapped_before(setup: Setup, now: RoundState, place_BT: Array) -> Tapped:
    """Gathers the activations at these positions from the target's caches and `now.behind`."""
    of_places = lambda rows_BSD: jnp.take_along_axis(rows_BSD, place_BT[..., None], axis=1)
    rows = None
    if _reads_rows(setup):
        rows = llama.stack_rows([cache.take(past, place_BT) for past in now.target_caches])
    streams = tuple(of_places(stream.x_BSD) for stream in now.behind.streams)
    hidden = now.behind.hidden
    return Tapped(rows, streams, None if hidden is None else of_places(hidden.x_BSD))


def _set_aside(behind: Behind, tapped: Tapped, start_B: Array) -> Behind:
    """Stores the activations of T tokens from `start` on."""

    def place(kept: States, new_BTD: Array) -> States:
        rows_B1SD = cache.write_rows(kept.x_BSD[:, None], new_BTD[:, None], start_B)
        return sharding.constrain_state(States(rows_B1SD[:, 0]))

    pairs = zip(behind.streams, tapped.streams, strict=True)
    hidden = behind.hidden
    return behind._replace(
        streams=tuple(place(kept, new_BTD) for kept, new_BTD in pairs),
        hidden=None if hidden is None else place(hidden, tapped.hidden_BTD),
    )


def all_known(now: RoundState) -> RoundState:
    """Marks all verified tokens as read by the drafter."""
    if now.behind is None:
        return now
    return now._replace(behind=now.behind._replace(known_B=now.length_B))


# ---- verify -------------------------------------------------------------------------------


def verify_tree(setup: Setup, weights: Weights, now: RoundState, law: Law, tree: Tree) -> Verified:
    """Verifies a tree, and moves the accepted path's cache rows to follow the verified rows."""
    # 1. One pass over all nodes, and the target's choice after each node.
    found = target_pass(setup, weights, tree, now.target_caches, now.length_B)
    logits_BNV = llama.unembed(weights.target, found.hidden_BTD)
    choice_BN = (setup.choose or choose)(setup, law, now, tree, logits_BNV)
    verdict = verify(tree, choice_BN, setup.shape.levels)
    whole = Tapped(None, found.tapped, found.hidden_BTD)
    # 2. The rows of a chain are already in place.
    if setup.shape.is_chain:
        rows = llama.stack_rows(found.rows) if _reads_rows(setup) else None
        identity_D = jnp.broadcast_to(jnp.arange(setup.shape.levels), verdict.path_BD.shape)
        verdict = verdict._replace(path_BD=identity_D, emitted_BD=choice_BN)
        thought = _logprobs(setup, logits_BNV, verdict)
        return Verified(verdict, whole._replace(rows_LBKTE=rows), found.caches, thought)
    # 3. The path's rows and activations are gathered from those of the tree.
    path_BD = verdict.path_BD
    taken = tuple(cache.take(rows, path_BD) for rows in found.rows)
    caches = keep_path(found.caches, taken, path_BD, now.length_B)
    on_path = lambda x_BND: jnp.take_along_axis(x_BND, path_BD[..., None], axis=1)
    tapped = jax.tree.map(on_path, whole)
    rows = llama.stack_rows(taken) if _reads_rows(setup) else None
    thought = _logprobs(setup, logits_BNV, verdict)
    return Verified(verdict, tapped._replace(rows_LBKTE=rows), caches, thought)


def _logprobs(setup: Setup, logits_BNV: Array, verdict: Verdict) -> LogProbs | None:
    """Returns the log-probabilities of the tokens that the accepted path's nodes emit."""
    if setup.top_logprobs is None:
        return None
    if not setup.shape.is_chain:  # the nodes of a chain are already the path
        logits_BNV = jnp.take_along_axis(logits_BNV, verdict.path_BD[..., None], axis=1)
    return logprobs.logprobs_of(logits_BNV, verdict.emitted_BD, setup.top_logprobs)


def choose(setup: Setup, law: Law, now: RoundState, tree: Tree, logits_BNV: Array) -> Array:
    """Returns the token (B, N) after each node: the target's argmax, or a sample from the target.

    The token is NOTHING if the largest logit is not finite, which ends the row.
    """
    said = now.said
    if law.penalises:
        above_BNN = jnp.where(tree.ancestor_BNN, tree.tokens_BN[:, None, :], NOTHING)
        said = sample.said_along(said, above_BNN[..., 1:])
    after_BNV = sample.after(law, logits_BNV, said)
    if law.key_B is None:
        return finite_argmax(after_BNV)
    position_BD = now.length_B[:, None] + 1 + jnp.arange(setup.shape.levels)
    of_node = lambda x_BDX: jnp.take_along_axis(x_BDX, tree.depth_BN[..., None], axis=1)
    noise_BNV = of_node(sample.gumbel(law, sample.TARGET, position_BD, logits_BNV.shape[-1]))
    if tree.draft_BNV is None:
        return sample.draw(after_BNV, noise_BNV)
    child_BNk = sample.children(tree, setup.shape.most_children)
    luck_BNk = of_node(sample.uniform(law, sample.ACCEPT, position_BD, child_BNk.shape[-1]))
    return sample.accept(after_BNV, tree.draft_BNV, child_BNk, luck_BNk, noise_BNV)


def _reads_rows(setup: Setup) -> bool:
    return setup.drafter is not None and setup.drafter.taps.rows


# ---- commit -------------------------------------------------------------------------------


def commit(now: RoundState, verdict: Verdict, limits: Limits) -> tuple[RoundState, Array]:
    """Commits the emitted tokens of each row up to its first stop token or its limit.

    Returns the new state and the number of committed tokens (B,), 0 for rows that were done.
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
        said=sample.said_in_answer(now.said, verdict.emitted_BD, count_B),
    )
    return now, count_B


def _is_stop(tokens_BN: Array, limits: Limits) -> Array:
    """Marks the tokens that end a row: stop ids and NOTHING."""
    is_id_BN = jnp.any(tokens_BN[..., None] == limits.stop_ids_BX[:, None], axis=-1)
    return is_id_BN | (tokens_BN == NOTHING)
