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

Plain rounds between drafted rounds skip `extend`, and prefill may skip `extend` as well. `DraftLag`
holds the draft lag, and `sync_drafter` clears the lag. Until then drafts are worse; the output is
the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from moa_jax.decode import logprobs, sampling
from moa_jax.decode.banned import recent_at, without_banned
from moa_jax.decode.logprobs import LogProbs
from moa_jax.decode.sampling import BatchSampling
from moa_jax.decode.state import (
    DecodeState,
    DraftLag,
    RoundState,
    StaticConfig,
    StopConditions,
    TreePass,
    Verified,
    Weights,
)
from moa_jax.decode.verify import VerifyResult, verify
from moa_jax.drafters.api import (
    NO_TOKEN,
    Cache,
    CandidateSampler,
    Shared,
    TargetActivations,
    Tree,
    chain,
)
from moa_jax.model import cache, llama, masks, sharding
from moa_jax.model.attention import keep_path
from moa_jax.model.cache import HiddenCache
from moa_jax.model.topk import finite_argmax
from moa_jax.runtime.devices import traced_platform

Array = jax.Array

CATCH_UP = 32  # tokens of each row per turn of `sync_drafter`


# ---- the loop of rounds -------------------------------------------------------------------


def prefill(
    setup: StaticConfig,
    weights: Weights,
    prompt_BT: Array,
    prompt_length_B: Array,
    limits: StopConditions,
    batch_sampling: BatchSampling,
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
    round_state = empty(setup, weights, B, rows, batch_sampling)
    hidden_BD = jnp.zeros((B, setup.target.block.hidden_size), weights.target["embed"].dtype)
    with jax.named_scope("prefill"):
        for place, size in enumerate(chunks):
            left_B = prompt_length_B - sum(chunks[place + 1 :])
            round_state, hidden_BD = lax.while_loop(
                lambda carry, left_B=left_B: jnp.any(carry[0].length_B < left_B),
                lambda carry, size=size: read_chunk(
                    setup, weights, carry[0], tokens_BC, prompt_length_B, size
                )[:2],
                (round_state, hidden_BD),
            )
        round_state, tokens_BC, root_B, found = begin_answer(
            setup,
            weights,
            round_state,
            tokens_BC,
            prompt_length_B,
            hidden_BD,
            limits,
            batch_sampling,
        )
    round_state = all_known(round_state)
    zero_B, zero_B2R = jnp.zeros(B, jnp.int32), jnp.zeros((B, 2, capacity), jnp.int32)
    state = DecodeState(round_state, tokens_BC, zero_B, zero_B2R)
    if found is not None:
        rows = logprobs.blank(*tokens_BC.shape, setup.top_logprobs)
        state = state._replace(logprobs=logprobs.placed(rows, found, prompt_length_B))
    return state


def advance(
    setup: StaticConfig,
    weights: Weights,
    state: DecodeState,
    limits: StopConditions,
    batch_sampling: BatchSampling,
    passed: TreePass | None = None,
) -> DecodeState:
    """Runs one round: propose, verify, commit, extend. Rows that are done do not change.

    After a pass over a given tree, that tree is verified instead of the drafter's.
    """
    round_state = state.round
    draft_cache = round_state.draft_cache
    if passed is None:
        tree, draft_cache = propose(setup, weights, round_state, batch_sampling, state.root_B)
    else:
        tree = passed.tree
    with jax.named_scope("verify"):
        found = verify_tree(
            setup, weights, round_state, batch_sampling, tree, passed and passed.found
        )
    lag = round_state.draft_lag
    if setup.shape.num_drafted:
        tokens_BD = jnp.take_along_axis(tree.tokens_BN, found.result.path_BD, axis=1)
        draft_cache = extend(
            setup, weights, draft_cache, tokens_BD, round_state.length_B, found.tapped
        )
    if lag is not None:
        lag = set_aside(lag, found.tapped, round_state.length_B)
    round_state = round_state._replace(
        target_caches=found.caches, draft_cache=draft_cache, draft_lag=lag
    )
    with jax.named_scope("commit"):
        state = record(state._replace(round=round_state), tree, found, limits)
    if lag is not None and not setup.shape.num_drafted:
        state = state._replace(round=within_lag(setup, weights, state.round, state.tokens_BC))
    elif lag is not None:  # rows that lagged before still lag
        is_late_B = round_state.done_B | (lag.draft_len_B < round_state.length_B)
        known_B = jnp.where(is_late_B, lag.draft_len_B, state.round.length_B)
        state = state._replace(
            round=state.round._replace(draft_lag=lag._replace(draft_len_B=known_B))
        )
    return state


def decode(
    setup: StaticConfig,
    weights: Weights,
    state: DecodeState,
    limits: StopConditions,
    batch_sampling: BatchSampling,
) -> DecodeState:
    """Runs rounds on the device until every row is done or reaches `limits.pause`."""
    full = lambda carried: jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), carried, state)
    is_one = len(state.rounds_B) == 1  # a larger batch would be copied into and out of lean form
    lean = cache.lean if traced_platform() == "cpu" and is_one else lambda state: state

    def goes_on(carried: DecodeState) -> Array:
        found = full(carried)
        return jnp.any(~found.round.done_B & (found.rounds_B < limits.pause))

    def turn(carried: DecodeState) -> DecodeState:
        return lean(advance(setup, weights, full(carried), limits, batch_sampling))

    return full(lax.while_loop(goes_on, turn, lean(state)))


def masked_round(
    setup: StaticConfig,
    weights: Weights,
    state: DecodeState,
    limits: StopConditions,
    batch_sampling: BatchSampling,
    passed: TreePass,
) -> tuple[DecodeState, Tree]:
    """Runs one round after the pass over its tree; also returns the next tree.

    A host that makes masks of a grammar needs the drafted tokens before the target chooses among
    them: `batch_sampling.allowed_BNV` has the masks after the nodes of the tree. Sampled candidates
    are verified as given tokens, without the drafter's probabilities.
    """
    state = advance(setup, weights, state, limits, batch_sampling, passed)
    drafted, cache = propose(setup, weights, state.round, batch_sampling, state.root_B)
    state = state._replace(round=state.round._replace(draft_cache=cache))
    B, N = drafted.tokens_BN.shape
    ancestor_BNN = jnp.broadcast_to(drafted.ancestor_BNN, (B, N, N))
    return state, drafted._replace(ancestor_BNN=ancestor_BNN, draft_BNV=None)


def tree_pass(
    setup: StaticConfig, weights: Weights, round_state: RoundState, tree: Tree, root_B: Array
) -> tuple[RoundState, TreePass]:
    """Runs the target over a tree of drafts after the root, before the masks are known.

    The drafts may be any tokens, or NO_TOKEN: the text of the round is the same.
    """
    tree = tree._replace(tokens_BN=tree.tokens_BN.at[:, 0].set(root_B))
    with jax.named_scope("verify"):
        found = target_pass(setup, weights, tree, round_state.target_caches, round_state.length_B)
    round_state = round_state._replace(target_caches=found.caches)
    rows = None if setup.shape.is_chain and not _reads_rows(setup) else found.rows
    return round_state, TreePass(tree, found._replace(caches=None, rows=rows))


def record(state: DecodeState, tree: Tree, found: Verified, limits: StopConditions) -> DecodeState:
    """Commits a round, and appends its tokens and its counts of committed and drafted tokens."""
    round_state, count_B = commit(state.round, found.result, limits)
    drafted_B = jnp.sum(tree.tokens_BN[:, 1:] >= 0, axis=1, dtype=jnp.int32)
    counts_B2 = jnp.stack([count_B, jnp.where(count_B > 0, drafted_B, 0)], axis=1)
    row_B = jnp.arange(len(count_B))
    place = jax.vmap(lambda row, new, start: lax.dynamic_update_slice(row, new, (start,)))
    rows, start_B = state.logprobs, state.round.length_B + 1
    return DecodeState(
        round_state,
        tokens_BC=place(state.tokens_BC, found.result.emitted_BD, start_B),
        rounds_B=state.rounds_B + (count_B > 0),
        counts_B2R=state.counts_B2R.at[row_B, :, state.rounds_B].add(counts_B2),
        logprobs=rows and logprobs.placed(rows, found.logprobs, start_B),
    )


# ---- read ---------------------------------------------------------------------------------


def empty(
    setup: StaticConfig, weights: Weights, batch: int, rows: int, batch_sampling: BatchSampling
) -> RoundState:
    """Returns the state of empty sequences, with caches of `rows` rows."""
    dtype = weights.target["embed"].dtype
    lag = None
    if setup.catches_up:
        taps, width = setup.drafter.taps, setup.target.block.hidden_size
        nothing = lambda: HiddenCache(jnp.zeros((batch, 1, rows, width), dtype))
        streams = tuple(nothing() for _ in taps.streams)
        lag = DraftLag(jnp.zeros(batch, jnp.int32), streams, nothing() if taps.hidden else None)
    state = RoundState(
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
        sampling.empty_counts(batch_sampling, batch, setup.target.vocab_size),
        llama.init_caches(setup.target, batch, rows, dtype, setup.ahead),
        setup.drafter and setup.drafter.init_cache(batch, rows, dtype),
        lag,
    )
    return sharding.constrain_state(state)


def read_chunk(
    setup: StaticConfig,
    weights: Weights,
    round_state: RoundState,
    text_BC: Array,
    prompt_length_B: Array,
    size: int,
) -> tuple[RoundState, Array, TargetActivations]:
    """Runs target and drafter over the next chunk of each prompt.

    A chunk has `size` tokens, or the number of cache rows if that is smaller.

    The chunk of a row with fewer tokens left starts earlier, and ends with the row's last token. So
    no chunk is written past the end of the caches, and finished rows wait for the other rows.
    Tokens that are processed again give the same cache rows. Two rows in chunks of 4:

        prompt of 10   0 1 2 3 | 4 5 6 7 |     6 7 8 9
        prompt of 5    0 1 2 3 | 1 2 3 4 |     1 2 3 4

    Returns the results of `read`.
    """
    size = min(size, round_state.target_caches[0].k_BKSE.shape[2])
    start_B = jnp.minimum(round_state.length_B, jnp.maximum(prompt_length_B - size, 0))
    cut = jax.vmap(lambda text_C, start: lax.dynamic_slice(text_C, (start,), (size,)))
    tokens_BT = cut(text_BC, start_B)
    count_B = jnp.minimum(prompt_length_B - start_B, size)
    round_state = round_state._replace(length_B=start_B)
    round_state, hidden_BD, tapped = read(setup, weights, round_state, tokens_BT, count_B)
    if setup.drafter is not None:
        draft_cache = extend(setup, weights, round_state.draft_cache, tokens_BT, start_B, tapped)
        round_state = round_state._replace(draft_cache=draft_cache)
    return round_state, hidden_BD, tapped


def read(
    setup: StaticConfig, weights: Weights, round_state: RoundState, tokens_BT: Array, count_B: Array
) -> tuple[RoundState, Array, TargetActivations]:
    """Runs the target over given tokens, right-padded to T, after the verified tokens.

    Returns the state with `count` more tokens of each row in the target's caches, the
    final-normed state (B, D) of the last new token, and the activations of all T tokens. `extend`
    updates the draft cache. Penalties count the tokens as part of the prompt.
    """
    found = target_pass(
        setup, weights, chain(tokens_BT), round_state.target_caches, round_state.length_B
    )
    last_B11 = (count_B - 1)[:, None, None]
    hidden_BD = jnp.take_along_axis(found.hidden_BTD, last_B11, axis=1)[:, 0]
    round_state = round_state._replace(
        length_B=round_state.length_B + count_B,
        token_counts=sampling.add_prompt_tokens(round_state.token_counts, tokens_BT, count_B),
        target_caches=found.caches,
    )
    rows = llama.stack_rows(found.rows) if _reads_rows(setup) else None
    return round_state, hidden_BD, TargetActivations(rows, found.tapped, found.hidden_BTD)


def choose_after(
    weights: Weights, round_state: RoundState, hidden_BD: Array, batch_sampling: BatchSampling
) -> tuple[RoundState, Array]:
    """Returns the target's next token (B,), and the state whose penalty counts include that token.

    The token is NO_TOKEN if a logit is not finite.
    """
    logits_B1V = llama.unembed(weights.target, hidden_BD[:, None])
    score_B1V = sampling.perturbed_logits(
        batch_sampling, logits_B1V, round_state.token_counts.each(), round_state.length_B[:, None]
    )
    is_finite_B = jnp.isfinite(logits_B1V).all(axis=(1, 2))
    root_B = jnp.where(is_finite_B, finite_argmax(score_B1V[:, 0]), NO_TOKEN)
    return round_state._replace(
        token_counts=sampling.add_answer_tokens(round_state.token_counts, root_B[:, None])
    ), root_B


def begin_answer(
    setup: StaticConfig,
    weights: Weights,
    round_state: RoundState,
    tokens_BC: Array,
    prompt_length_B: Array,
    hidden_BD: Array,
    limits: StopConditions,
    batch_sampling: BatchSampling,
) -> tuple[RoundState, Array, Array, LogProbs | None]:
    """Commits the first new token of each prompt.

    Returns the state, the tokens (B, C) with the new ones, the new tokens (B,), and their
    log-probabilities (B, 1), which are None without `setup.top_logprobs`.
    """
    round_state, root_B = choose_after(weights, round_state, hidden_BD, batch_sampling)
    tokens_BC = tokens_BC.at[jnp.arange(len(root_B)), prompt_length_B].set(root_B)
    done_B = _is_stop(root_B[:, None], limits)[:, 0] | (prompt_length_B + 1 >= limits.total_B)
    found = None
    if setup.top_logprobs is not None:
        logits_B1V = llama.unembed(weights.target, hidden_BD[:, None])
        found = logprobs.logprobs_of(logits_B1V, root_B[:, None], setup.top_logprobs)
    return round_state._replace(done_B=done_B), tokens_BC, root_B, found


def target_pass(
    setup: StaticConfig, weights: Weights, tree: Tree, caches: llama.Caches, length_B: Array
) -> llama.ForwardOutput:
    """Runs the target over all nodes at once; their cache rows follow the verified rows."""
    position_BN = length_B[:, None] + tree.depth_BN
    context = llama.Context(position_BN, masks.cache_mask(length_B, tree.ancestor_BNN), caches)
    tap = setup.drafter.taps.streams if setup.drafter else ()
    return llama.forward(setup.target, weights.target, tree.tokens_BN, context, tap)


# ---- propose and extend -------------------------------------------------------------------


def propose(
    setup: StaticConfig,
    weights: Weights,
    round_state: RoundState,
    batch_sampling: BatchSampling,
    root_B: Array,
) -> tuple[Tree, Cache]:
    """Returns the drafter's tree after each root; the root alone in plain decoding."""
    if not setup.shape.num_drafted:
        return chain(root_B[:, None]), round_state.draft_cache
    with jax.named_scope("draft"):
        shared = borrowed(setup, weights)
        if weights.vocabulary is not None:
            shared = shared | {"lm_head": weights.vocabulary.head_DU}
        return setup.drafter.propose(
            weights.drafter,
            shared,
            round_state.draft_cache,
            root_B,
            round_state.length_B,
            setup.shape,
            candidate_sampler(setup, weights, round_state, batch_sampling),
        )


def borrowed(setup: StaticConfig, weights: Weights) -> Shared:
    """Returns the target's parameters that the drafter reads."""
    return setup.drafter.shared_params(weights.target) if weights.shared is None else weights.shared


def candidate_sampler(
    setup: StaticConfig, weights: Weights, round_state: RoundState, batch_sampling: BatchSampling
) -> CandidateSampler:
    """Returns the round's candidate selection, which applies the target's bias and penalties.

    Sampled candidates also get the target's temperature, top-k, top-p and min-p.
    """
    sampled = setup.shape.sampled and batch_sampling.key_B is not None
    own = setup.drafter.draft_ids
    ids_U = None if own is None else jnp.array(own)
    if weights.vocabulary is not None:
        ids_U = weights.vocabulary.ids_U
    some = slice(None) if ids_U is None else ids_U
    bias_BU = None if batch_sampling.bias_BV is None else batch_sampling.bias_BV[..., some]

    def adjusted(logits_BWU: Array, path_BWP: Array) -> Array:
        token_counts = round_state.token_counts
        if batch_sampling.penalises:
            token_counts = sampling.along_paths(token_counts, path_BWP[..., 1:]).of(some)
        logits_BWU = sampling.apply_penalties(batch_sampling, logits_BWU, token_counts, bias_BU)
        return sampling.log_probs(batch_sampling, logits_BWU) if sampled else logits_BWU

    def noise(nodes: int, depth: int, size: int) -> Array:
        position_B1 = (round_state.length_B + depth)[:, None]
        noise_B1U = sampling.gumbel(batch_sampling, sampling.DRAFT, position_B1, size)
        return jnp.broadcast_to(noise_B1U, (noise_B1U.shape[0], nodes, size))

    vocab_size = setup.target.vocab_size
    return CandidateSampler(adjusted, noise if sampled else None, ids_U, vocab_size)


def extend(
    setup: StaticConfig,
    weights: Weights,
    draft_cache: Cache,
    tokens_BT: Array,
    length_B: Array,
    tapped: TargetActivations,
) -> Cache:
    """Extends the drafter's cache by T tokens that the target has just processed."""
    if not setup.drafter.taps.hidden:
        tapped = tapped._replace(hidden_BTD=None)  # as in `sync_drafter`
    with jax.named_scope("extend"):
        digest = setup.drafter.condense(weights.drafter, length_B, tapped)
        shared = borrowed(setup, weights)
        return setup.drafter.extend(
            weights.drafter, shared, draft_cache, tokens_BT, length_B, digest
        )


def sync_drafter(
    setup: StaticConfig,
    weights: Weights,
    round_state: RoundState,
    text_BC: Array,
    sizes: Sequence[int] = (CATCH_UP,),
) -> RoundState:
    """Runs the drafter over the verified tokens of running rows that its cache lacks, in turns.

    A turn of a larger size processes `size` tokens of each row while a row lacks at least `size`
    tokens; turns of the last size process the rest.

    Caches need the last size's number of rows after the root, because a turn always writes all its
    rows. Larger sizes are only for a batch of one row.
    """
    *larger, least = sizes
    for size in larger:
        round_state = _read_in_turns(setup, weights, round_state, text_BC, size, size)
    return _read_in_turns(setup, weights, round_state, text_BC, least, 1)


def _read_in_turns(
    setup: StaticConfig,
    weights: Weights,
    round_state: RoundState,
    text_BC: Array,
    size: int,
    enough: int,
) -> RoundState:
    """Runs turns of a size while a row has `enough` tokens that the drafter's cache lacks."""
    cut = jax.vmap(lambda text_C, start: lax.dynamic_slice(text_C, (start,), (size,)))

    def goes_on(carry: tuple[Array, Array, Cache]) -> Array:
        turn, known_B, _ = carry
        is_late = jnp.any(~round_state.done_B & (round_state.length_B - known_B >= enough))
        is_blank = jnp.all(round_state.length_B == 0)  # the state on which programs are prepared
        return is_late | is_blank & (turn == 0)

    def read(carry: tuple[Array, Array, Cache]) -> tuple[Array, Array, Cache]:
        turn, known_B, draft_cache = carry
        tapped = _tapped_before(setup, round_state, known_B[:, None] + jnp.arange(size))
        tokens_BT = cut(text_BC, known_B)
        draft_cache = extend(setup, weights, draft_cache, tokens_BT, known_B, tapped)
        return turn + 1, jnp.minimum(known_B + size, round_state.length_B), draft_cache

    begin = (jnp.int32(0), round_state.draft_lag.draft_len_B, round_state.draft_cache)
    _, known_B, draft_cache = lax.while_loop(goes_on, read, begin)
    return round_state._replace(
        draft_cache=draft_cache, draft_lag=round_state.draft_lag._replace(draft_len_B=known_B)
    )


def within_lag(
    setup: StaticConfig, weights: Weights, round_state: RoundState, text_BC: Array
) -> RoundState:
    """Runs the drafter in turns until all running rows lag less than `setup.lag_limit`."""
    if setup.lag_limit is None:
        return round_state
    return _read_in_turns(setup, weights, round_state, text_BC, CATCH_UP, setup.lag_limit)


def lagging(
    setup: StaticConfig,
    weights: Weights,
    round_state: RoundState,
    tapped: TargetActivations,
    start_B: Array,
    text_BC: Array,
) -> RoundState:
    """`round_state` after a chunk of prompts from `start` on, which the drafter reads later."""
    lag = set_aside(round_state.draft_lag, tapped, start_B)
    running_B = jnp.zeros_like(round_state.done_B)
    round_state = round_state._replace(draft_lag=lag, done_B=running_B)
    return within_lag(setup, weights, round_state, text_BC)


def synced(setup: StaticConfig, weights: Weights, state: DecodeState) -> DecodeState:
    """Returns the state of a generation without draft lag."""
    return state._replace(round=sync_drafter(setup, weights, state.round, state.tokens_BC))


def _tapped_before(
    setup: StaticConfig, round_state: RoundState, place_BT: Array
) -> TargetActivations:
    """Gathers the activations at these positions from the target's caches and the draft lag."""
    of_places = lambda stream: cache.take(stream, place_BT).x_B1SD[:, 0]
    rows = None
    if _reads_rows(setup):
        caches = round_state.target_caches
        windows = setup.target.windows_of_last(len(caches))
        each = zip(caches, windows, strict=True)
        rows = llama.stack_rows([cache.take(past, place_BT, window > 0) for past, window in each])
    lag = round_state.draft_lag
    hidden_BTD = None if lag.hidden is None else of_places(lag.hidden)
    return TargetActivations(rows, tuple(map(of_places, lag.streams)), hidden_BTD)


def set_aside(lag: DraftLag, tapped: TargetActivations, start_B: Array) -> DraftLag:
    """Stores the activations of T tokens from `start` on."""

    def place(kept: HiddenCache, new_BTD: Array) -> HiddenCache:
        written = cache.write(kept, HiddenCache(new_BTD[:, None]), start_B)
        return sharding.constrain_state(written)

    pairs = zip(lag.streams, tapped.streams, strict=True)
    hidden = lag.hidden
    return lag._replace(
        streams=tuple(place(kept, new_BTD) for kept, new_BTD in pairs),
        hidden=None if hidden is None else place(hidden, tapped.hidden_BTD),
    )


def all_known(round_state: RoundState) -> RoundState:
    """Marks all verified tokens as read by the drafter."""
    if round_state.draft_lag is None:
        return round_state
    return round_state._replace(
        draft_lag=round_state.draft_lag._replace(draft_len_B=round_state.length_B)
    )


# ---- verify -------------------------------------------------------------------------------


def verify_tree(
    setup: StaticConfig,
    weights: Weights,
    round_state: RoundState,
    batch_sampling: BatchSampling,
    tree: Tree,
    found: llama.ForwardOutput | None = None,
) -> Verified:
    """Verifies a tree, and moves the accepted path's cache rows to follow the verified rows.

    `found` is the output of a pass that ran before, see `tree_pass`.
    """
    # 1. One pass over all nodes, and the target's choice after each node.
    if found is None:
        found = target_pass(setup, weights, tree, round_state.target_caches, round_state.length_B)
    else:
        found = found._replace(caches=round_state.target_caches)
    logits_BNV = llama.unembed(weights.target, found.hidden_BTD)
    choice_BN = (setup.token_chooser or choose)(
        setup, batch_sampling, round_state, tree, logits_BNV
    )
    verify_result = verify(tree, choice_BN, setup.shape.levels)
    whole = TargetActivations(None, found.tapped, found.hidden_BTD)
    # 2. The rows of a chain are already in place.
    if setup.shape.is_chain:
        rows = llama.stack_rows(found.rows) if _reads_rows(setup) else None
        identity_D = jnp.broadcast_to(jnp.arange(setup.shape.levels), verify_result.path_BD.shape)
        verify_result = verify_result._replace(path_BD=identity_D, emitted_BD=choice_BN)
        thought = _logprobs(setup, logits_BNV, verify_result)
        return Verified(verify_result, whole._replace(rows_LBKTE=rows), found.caches, thought)
    # 3. The path's rows and activations are gathered from those of the tree.
    path_BD = verify_result.path_BD
    taken = tuple(cache.take(rows, path_BD) for rows in found.rows)
    windows = setup.target.sliding_windows
    caches = keep_path(found.caches, taken, path_BD, round_state.length_B, windows)
    on_path = lambda x_BND: jnp.take_along_axis(x_BND, path_BD[..., None], axis=1)
    tapped = jax.tree.map(on_path, whole)
    rows = llama.stack_rows(taken) if _reads_rows(setup) else None
    thought = _logprobs(setup, logits_BNV, verify_result)
    return Verified(verify_result, tapped._replace(rows_LBKTE=rows), caches, thought)


def _logprobs(
    setup: StaticConfig, logits_BNV: Array, verify_result: VerifyResult
) -> LogProbs | None:
    """Returns the log-probabilities of the tokens that the accepted path's nodes emit."""
    if setup.top_logprobs is None:
        return None
    if not setup.shape.is_chain:  # the nodes of a chain are already the path
        logits_BNV = jnp.take_along_axis(logits_BNV, verify_result.path_BD[..., None], axis=1)
    return logprobs.logprobs_of(logits_BNV, verify_result.emitted_BD, setup.top_logprobs)


def choose(
    setup: StaticConfig,
    batch_sampling: BatchSampling,
    round_state: RoundState,
    tree: Tree,
    logits_BNV: Array,
) -> Array:
    """Returns the token (B, N) after each node: the target's argmax, or a sample from the target.

    The token is NO_TOKEN if the largest logit is not finite, which ends the row.
    """
    token_counts = round_state.token_counts
    if batch_sampling.penalises:
        above_BNN = jnp.where(tree.ancestor_BNN, tree.tokens_BN[:, None, :], NO_TOKEN)
        token_counts = sampling.along_paths(token_counts, above_BNN[..., 1:])
    if batch_sampling.bans is not None:
        recent_BNR = recent_at(tree, round_state.token_counts.recent, setup.shape.levels)
        position_BN = round_state.length_B[:, None] + 1 + tree.depth_BN
        logits_BNV = without_banned(batch_sampling.bans, logits_BNV, recent_BNR, position_BN)
    after_BNV = sampling.after(batch_sampling, logits_BNV, token_counts)
    if batch_sampling.key_B is None:
        return finite_argmax(after_BNV)
    position_BD = round_state.length_B[:, None] + 1 + jnp.arange(setup.shape.levels)
    of_node = lambda x_BDX: jnp.take_along_axis(x_BDX, tree.depth_BN[..., None], axis=1)
    noise_BNV = of_node(
        sampling.gumbel(batch_sampling, sampling.TARGET, position_BD, logits_BNV.shape[-1])
    )
    if tree.draft_BNV is None:
        return sampling.sample(after_BNV, noise_BNV)
    child_BNk = sampling.children(tree, setup.shape.most_children)
    uniform_BNk = of_node(
        sampling.uniform(batch_sampling, sampling.ACCEPT, position_BD, child_BNk.shape[-1])
    )
    return sampling.accept(after_BNV, tree.draft_BNV, child_BNk, uniform_BNk, noise_BNV)


def _reads_rows(setup: StaticConfig) -> bool:
    return setup.drafter is not None and setup.drafter.taps.rows


# ---- commit -------------------------------------------------------------------------------


def commit(
    round_state: RoundState, verify_result: VerifyResult, limits: StopConditions
) -> tuple[RoundState, Array]:
    """Commits the emitted tokens of each row up to its first stop token or its limit.

    Returns the new state and the number of committed tokens (B,), 0 for rows that were done.
    """
    D = verify_result.emitted_BD.shape[1]
    stop_BD = _is_stop(verify_result.emitted_BD, limits)
    first_stop_B = jnp.where(stop_BD.any(axis=1), jnp.argmax(stop_BD, axis=1), D)
    room_B = limits.total_B - round_state.length_B - 1
    count_B = jnp.minimum(verify_result.count_B, jnp.minimum(first_stop_B + 1, room_B))
    count_B = jnp.where(round_state.done_B, 0, count_B)
    round_state = round_state._replace(
        length_B=round_state.length_B + count_B,
        done_B=round_state.done_B | (count_B == room_B) | (first_stop_B < count_B),
        token_counts=sampling.add_answer_tokens(
            round_state.token_counts, verify_result.emitted_BD, count_B
        ),
    )
    return round_state, count_B


def _is_stop(tokens_BN: Array, limits: StopConditions) -> Array:
    """Marks the tokens that end a row: stop ids and NO_TOKEN."""
    is_id_BN = jnp.any(tokens_BN[..., None] == limits.stop_ids_BX[:, None], axis=-1)
    return is_id_BN | (tokens_BN == NO_TOKEN)
