"""Time and bytes per phase of a round, measured on a generation stopped half way.

    prefill   the prompt through the target, LSA over the prompt
    draft     propose: the drafter, level by level
    verify    one target pass over the tree, the acceptance, the commit
    extend    LSA and the drafter's rows for the accepted path
    host      one call of the loop's program with all rows done: once per generation

Draft, verify and extend each run in a separate loop on the device; every iteration waits for the
previous iteration. Separately measured phases need not sum to a round: in one program the compiler
overlaps and fuses phases, and a loop of one phase may find its weights in the cache. The results
therefore also show the time of a round in complete generations.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from infer.bench.traffic import bytes_read
from moa_jax.decode import step
from moa_jax.decode.programs import chunks_of, compile_lowered
from moa_jax.decode.session import GREEDY, Session
from moa_jax.decode.state import DecodeState, StaticConfig, Weights
from moa_jax.drafters.api import chain
from moa_jax.runtime.precision import matmul_precision

Array = jax.Array
SECONDS_A_LOOP, MOST_TURNS, LOOPS = 0.2, 500, 5


def measure(
    session: Session,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int] | None,
    rounds: int,
    prefill_ms: float,
    bandwidth: float,
) -> dict[str, Any]:
    """The phases of a mode and the host's time, by their keys in the JSON document.

    `rounds` is the batch's number of rounds, and `bandwidth` is in bytes/s. The decode loop runs
    under a transfer guard: transfers between host and device raise an error.
    """
    state, limits, batch_sampling, _ = session.start(prompts, max_new_tokens, stop_ids, GREEDY)
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    costs = {
        "prefill": (prefill_ms / 1e3, _prefill_bytes(session, state, lengths_B, batch_sampling))
    }
    decode = session.loop(state, limits, batch_sampling)
    half_way = limits._replace(pause=jnp.int32(max(rounds // 2, 1)))
    jax.block_until_ready(state)
    with jax.transfer_guard("disallow_explicit"):
        state = jax.block_until_ready(decode(session.weights, state, half_way, batch_sampling))
    state, measured = _phases(session, state, limits, batch_sampling)
    done = state._replace(round=state.round._replace(done_B=jnp.ones_like(state.round.done_B)))
    host_s = []
    for _ in range(20):
        seconds, done = _clocked(decode, session.weights, done, limits, batch_sampling)
        host_s.append(seconds)
    return {
        "phases": {
            name: {
                "ms": 1e3 * seconds,
                "bytes": read,
                "share_of_bandwidth": read / seconds / bandwidth,
            }
            for name, (seconds, read) in (costs | measured).items()
        },
        "sum_of_phases_ms": sum(1e3 * seconds for seconds, _ in measured.values()),
        "host_ms_per_generation": 1e3 * float(np.median(host_s[5:])),
    }


def _prefill_bytes(
    session: Session, state: DecodeState, lengths_B: np.ndarray, batch_sampling: Any
) -> int:
    """Bytes read by prefill: weights and caches once per chunk, and the head once."""
    held = (session.weights, state.round)
    hidden_BD = jnp.zeros((len(lengths_B), session.target.config.block.hidden_size))

    def read(chunk: int, held: Any) -> Any:
        return step.read_chunk(session.setup, *held, state.tokens_BC, lengths_B, chunk)[:2]

    def choose(weights: Weights) -> Any:
        return step.choose_after(weights, state.round, hidden_BD, batch_sampling)

    chunks = Counter(chunks_of(int(lengths_B.max()), session.chunks(len(lengths_B))))
    return bytes_read(choose, session.weights) + sum(
        count * bytes_read(functools.partial(read, size), held) for size, count in chunks.items()
    )


def _phases(
    session: Session, state: DecodeState, limits: Any, batch_sampling: Any
) -> tuple[DecodeState, dict[str, tuple[float, int]]]:
    """Seconds and bytes per phase; each phase runs on the previous phase's outputs.

    Caches are donated from call to call, so memory use does not grow.
    """
    timed = functools.partial(_timed, session.setup, session.weights)
    caches, cache = state.round.target_caches, state.round.draft_cache
    fixed, phases = with_caches(state, (), None), {}
    tree = chain(state.root_B[:, None])
    if cache is not None:
        phases["draft"], cache, tree = timed(_draft, cache, (fixed, batch_sampling))
    verify = timed(_verify, caches, (fixed, limits, batch_sampling, tree))
    phases["verify"], caches, (_, tokens_BD, tapped) = verify
    if cache is not None:
        read = (fixed.round.length_B, tokens_BD, tapped)
        phases["extend"], cache, _ = timed(_extend, cache, read)
    return with_caches(state, caches, cache), phases


def with_caches(state: DecodeState, target_caches: Any, draft_cache: Any) -> DecodeState:
    """The state with other caches."""
    round_state = state.round._replace(target_caches=target_caches, draft_cache=draft_cache)
    return state._replace(round=round_state)


# ---- one iteration per phase: returns the caches that it writes, and its other outputs ----


def _draft(setup: StaticConfig, weights: Weights, read: Any, cache: Any) -> tuple[Any, Any]:
    state, batch_sampling = read
    round_state = state.round._replace(draft_cache=cache)
    tree, cache = step.propose(setup, weights, round_state, batch_sampling, state.root_B)
    return cache, jax.tree.map(jnp.asarray, tree)


def _verify(setup: StaticConfig, weights: Weights, read: Any, caches: Any) -> tuple[Any, Any]:
    state, limits, batch_sampling, tree = read
    round_state = state.round._replace(target_caches=caches)
    found = step.verify_tree(setup, weights, round_state, batch_sampling, tree)
    done = step.record(state, tree, found, limits)
    tokens_BD = jnp.take_along_axis(tree.tokens_BN, found.result.path_BD, axis=1)
    committed = (done.tokens_BC, done.round.length_B, done.round.done_B, done.drafted_BR)
    return found.caches, (committed, tokens_BD, found.tapped)


def _extend(setup: StaticConfig, weights: Weights, read: Any, cache: Any) -> tuple[Any, Any]:
    length_B, tokens_BD, tapped = read
    return step.extend(setup, weights, cache, tokens_BD, length_B, tapped), None


# ---- timing -------------------------------------------------------------------------------


def _timed(
    setup: StaticConfig, weights: Weights, phase: Callable[..., Any], caches: Any, read: Any
) -> tuple[tuple[float, int], Any, Any]:
    """Seconds and bytes of a phase, its final caches, and its other outputs.

    The loop's barrier makes every iteration wait for the previous iteration, and keeps the compiler
    from moving work out of the loop.
    """
    turn = functools.partial(phase, setup)
    size = bytes_read(lambda held: turn(held[0], read, held[1]), (weights, caches))

    def loop(caches: Any, weights: Weights, read: Any, count: Array) -> tuple[Any, Any]:
        shapes = jax.eval_shape(turn, weights, read, caches)[1]
        blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def again(_: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            (caches, _), round_state = lax.optimization_barrier((carry, read))
            return turn(weights, round_state, caches)

        return lax.fori_loop(0, count, again, (caches, blank))

    with matmul_precision(weights.target["embed"].dtype):
        lowered = jax.jit(loop, donate_argnums=0).lower(caches, weights, read, jnp.int32(1))
    drafts = setup.shape.num_drafted > 0
    program = compile_lowered(lowered, jax.default_backend(), drafts=drafts)
    turns, seconds = 3, []
    for index in range(LOOPS + 1):
        rest = (weights, read, jnp.int32(turns))
        each, (caches, found) = _clocked(program, caches, *rest)
        seconds.append(each / turns)
        if not index:  # the first loop warms up and sets the iteration count
            turns = int(min(max(SECONDS_A_LOOP / seconds.pop(), 3), MOST_TURNS))
    return (float(np.median(seconds)), size), caches, found


def _clocked(program: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """The seconds of a call, and its outputs."""
    begin = time.perf_counter()
    found = jax.block_until_ready(program(*arguments))
    return time.perf_counter() - begin, found
