"""Time and bytes of each phase of a round, measured on a generation stopped half way.

    prefill   the prompt through the target, LSA over it
    draft     propose: the drafter, level by level
    verify    one target pass over the tree, the verdict, the commit
    extend    LSA and the drafter's rows for the accepted path
    host      one call of the loop's program that has nothing left to do: once a generation

Draft, verify and extend run in loops of their own on the device, each turn waiting for the one
before. Phases measured apart need not sum to a round: in one program the compiler overlaps and
fuses them, and a loop of one phase finds its own weights in the cache where they fit. So a
round, measured in whole generations, stands beside their sum.

On a CPU a target pass over several rows is also given in units. A unit is one float32 product of
one row with each of the target's matrices, by stock jnp products: the time that the weights take.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import DraftShape
from moa_jax.decode import step
from moa_jax.decode.programs import chunks_of, compiler_options
from moa_jax.decode.session import GREEDY, Session
from moa_jax.decode.state import DecodeState, Limits, RoundState, Setup, Weights
from moa_jax.drafters.api import chain
from moa_jax.measure.traffic import bytes_read
from moa_jax.model import quantise
from moa_jax.runtime.precision import matmul_precision

Array = jax.Array
# (what the phase writes, 0) -> (the same written, what it found)
PhaseTurn = Callable[[Any, Array], tuple[Any, Any]]

NO_TOKEN = -7  # no array of a round starts with this
SECONDS_A_LOOP, MOST_TURNS, LOOPS = 0.2, 500, 5
MOST_BYTES = 2**30  # of the arrays of a unit: more than any cache holds
PASSES = (4, 8, 16)  # rows of the passes that are given in units: a chain's and two trees'
TO_HOST = re.compile(r"\b(?:infeed|outfeed|send|recv)\(|custom_call_target=\"[^\"]*callback")


class Phase(NamedTuple):
    """What one turn of a phase costs."""

    seconds: float
    bytes_read: int


class Measured(NamedTuple):
    """One mode's phases, and what its program needs."""

    phases: dict[str, Phase]  # draft, verify, extend; plain decoding has verify alone
    prefill_bytes: int
    host_s: float
    host_transfers: int  # instructions of the compiled loop that talk to the host
    weights_bytes: int
    cache_bytes: int
    program_bytes: int  # arguments, results and scratch of the compiled loop


def measure(
    session: Session,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int] | None,
    rounds: int,
) -> Measured:
    """Measures a batch that takes so many rounds; its loop runs under a guard against transfers.

    The guard and the count of instructions see all that the program moves. The runtime's own
    look at a loop's condition, a byte a round on some devices, is not theirs to see.
    """
    state, limits, law, _ = session.start(prompts, max_new_tokens, stop_ids, GREEDY)
    lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
    prefill_bytes = _prefill_bytes(session, state, lengths_B, law)
    decode = session.loop(state, limits, law)
    half_way = limits._replace(pause=jnp.int32(max(rounds // 2, 1)))
    jax.block_until_ready(state)
    with jax.transfer_guard("disallow_explicit"):
        state = jax.block_until_ready(decode(session.weights, state, half_way, law))
    cache_bytes = _size((state.now.target_caches, state.now.draft_cache))
    state, phases = _phases(session, state, limits, law)
    return Measured(
        phases,
        prefill_bytes,
        _call_seconds(decode, session.weights, state, limits, law),
        len(TO_HOST.findall(decode.as_text() or "")),
        _size(session.weights),
        cache_bytes,
        _needs(decode),
    )


def _prefill_bytes(session: Session, state: DecodeState, lengths_B: np.ndarray, law: Any) -> int:
    """Weights and caches once for each chunk, and the head once."""
    hidden_BD = jnp.zeros((len(lengths_B), session.target.config.block.hidden_size))

    def read(held: tuple[Weights, RoundState], chunk: int) -> Any:
        return step.read_chunk(session.setup, *held, state.tokens_BC, lengths_B, chunk)[:2]

    def choose(weights: Weights) -> Any:
        return step.choose_after(weights, state.now, hidden_BD, law)

    held = (session.weights, state.now)
    chunks = chunks_of(int(lengths_B.max()), session.chunks(len(lengths_B)))
    times_of = Counter(chunks).items()
    of_chunks = sum(
        n * bytes_read(functools.partial(read, chunk=size), held) for size, n in times_of
    )
    return of_chunks + bytes_read(choose, session.weights)


def _phases(
    session: Session, state: DecodeState, limits: Limits, law: Any
) -> tuple[DecodeState, dict[str, Phase]]:
    """Each phase on what the one before it found; caches move through, so memory stays flat."""
    setup, weights = session.setup, session.weights
    caches, cache = state.now.target_caches, state.now.draft_cache
    fixed = with_caches(state, (), None)
    phases = {}
    if cache is None:
        tree = chain(state.root_B[:, None])
    else:
        draft = functools.partial(_draft, setup)
        phases["draft"], cache, tree = _timed(setup, draft, weights, cache, (fixed, law))
    verify = functools.partial(_verify, setup)
    phases["verify"], caches, (_, tokens_BD, tapped) = _timed(
        setup, verify, weights, caches, (fixed, limits, law, tree)
    )
    if cache is not None:
        extend = functools.partial(_extend, setup)
        read = (fixed.now.length_B, tokens_BD, tapped)
        phases["extend"], cache, _ = _timed(setup, extend, weights, cache, read)
    return with_caches(state, caches, cache), phases


def with_caches(state: DecodeState, target_caches: Any, draft_cache: Any) -> DecodeState:
    """The same generation on other caches."""
    now = state.now._replace(target_caches=target_caches, draft_cache=draft_cache)
    return state._replace(now=now)


# ---- one turn of each phase ---------------------------------------------------------------


def _draft(setup: Setup, weights: Weights, read: Any, cache: Any, zero: Array) -> tuple[Any, Any]:
    state, law = read
    now = state.now._replace(draft_cache=cache)
    tree, cache = step.propose(setup, weights, now, law, state.root_B + zero)
    return cache, jax.tree.map(jnp.asarray, tree)


def _verify(setup: Setup, weights: Weights, read: Any, caches: Any, zero: Array) -> tuple[Any, Any]:
    state, limits, law, tree = read
    now = state.now._replace(target_caches=caches)
    tree = tree._replace(tokens_BN=tree.tokens_BN + zero)
    found = step.verify_tree(setup, weights, now, law, tree)
    done = step.record(state, tree, found, limits)
    tokens_BD = jnp.take_along_axis(tree.tokens_BN, found.verdict.path_BD, axis=1)
    said = (done.tokens_BC, done.now.length_B, done.now.done_B, done.drafted_BR)
    return found.caches, (said, tokens_BD, found.tapped)


def _extend(setup: Setup, weights: Weights, read: Any, cache: Any, zero: Array) -> tuple[Any, Any]:
    length_B, tokens_BD, tapped = read
    tapped = jax.tree.map(lambda x: x + zero.astype(x.dtype), tapped)
    cache = step.extend(setup, weights, cache, tokens_BD, length_B, tapped)
    return cache, [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(cache)]


# ---- loops and clocks ---------------------------------------------------------------------


def _timed(
    setup: Setup, turn: Any, weights: Weights, moving: Any, read: Any
) -> tuple[Phase, Any, Any]:
    """A phase's cost, what it wrote, and what it found; `moving` is donated to it."""

    def loop(moving: Any, weights: Weights, read: Any, count: Array) -> tuple[Any, Any]:
        return _repeat(functools.partial(turn, weights, read), moving, count)

    zero = jnp.int32(0)
    cost = bytes_read(lambda held, z: turn(held[0], read, held[1], z), (weights, moving), zero)
    with matmul_precision(weights.target["embed"].dtype):
        lowered = jax.jit(loop, donate_argnums=0).lower(moving, weights, read, zero)
    options = compiler_options(jax.default_backend(), setup.shape.num_drafted > 0)
    program = lowered.compile(compiler_options=options)
    moving, found = jax.block_until_ready(program(moving, weights, read, jnp.int32(1)))
    turns, seconds = 3, []
    for index in range(LOOPS + 1):
        begin = time.perf_counter()
        moving, found = jax.block_until_ready(program(moving, weights, read, jnp.int32(turns)))
        seconds.append((time.perf_counter() - begin) / turns)
        if not index:  # the first only says how many turns are worth timing
            turns = int(min(max(SECONDS_A_LOOP / seconds.pop(), 3), MOST_TURNS))
    return Phase(float(np.median(seconds)), cost), moving, found


def _repeat(turn: PhaseTurn, moving: Any, count: Array) -> tuple[Any, Any]:
    """`turn` again and again, each time with a zero that only the last one's findings give.

    All that a turn finds is carried and returned: the compiler can neither leave work out nor
    move it out of the loop.
    """
    shapes = jax.eval_shape(turn, moving, jnp.int32(0))[1]
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def again(_: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        moving, found = carry
        first = [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(found)]
        never = jnp.any(jnp.array([x.astype(jnp.float32) == NO_TOKEN for x in first]))
        return turn(moving, never.astype(jnp.int32))

    return lax.fori_loop(0, count, again, (moving, blank))


def in_units(
    session: Session, prompt: Sequence[int], stop_ids: Sequence[int] | None
) -> tuple[float, dict[int, float]]:
    """Seconds of a unit, and of a verification of PASSES rows of one prompt, in units."""
    longest = max(PASSES)
    state, limits, law, _ = session.start([prompt], longest, stop_ids, GREEDY)
    caches, fixed = state.now.target_caches, with_caches(state, (), None)
    unit, passes = _unit_seconds(session.target.params), {}
    for rows in PASSES:
        setup = session.setup._replace(shape=DraftShape(rows))
        read = (fixed, limits, law, chain(jnp.repeat(state.root_B[:, None], rows, axis=1)))
        verify = functools.partial(_verify, setup)
        phase, caches, _ = _timed(setup, verify, session.weights, caches, read)
        passes[rows] = phase.seconds / unit
    return unit, passes


def _unit_seconds(params: Any) -> float:
    """Seconds of one sweep over float32 arrays of the shapes of a model's matrices."""

    def sweep(x: Array, weights: list[Array]) -> Array:
        for weight_DF in weights:  # each product waits for the one before
            row_1D = jnp.full((1, len(weight_DF)), x)
            x = (row_1D @ weight_DF).max()
        return x

    weights: list[Array] = []
    made: dict[tuple[int, int], list[Array]] = {}
    for kernel in quantise.kernels(params):
        inputs, *outputs = kernel.shape
        same = made.setdefault((inputs, math.prod(outputs)), [])
        if not same or sum(each.nbytes for each in weights) < MOST_BYTES:
            same.append(jnp.zeros((inputs, math.prod(outputs))))
            weights.append(same[-1])
        else:  # again one of those that were read longest ago
            same.append(same.pop(0))
            weights.append(same[-1])
    program = jax.jit(sweep).lower(jnp.float32(0), weights).compile()
    seconds = []
    for _ in range(2 * LOOPS):
        begin = time.perf_counter()
        jax.block_until_ready(program(jnp.float32(0), weights))
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[LOOPS:]))


def _call_seconds(
    decode: Any, weights: Weights, state: DecodeState, limits: Any, law: Any
) -> float:
    """A call of the loop's program when every row is done."""
    now = state.now._replace(done_B=jnp.ones_like(state.now.done_B))
    state = state._replace(now=now)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        state = jax.block_until_ready(decode(weights, state, limits, law))
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[5:]))


def _needs(program: Any) -> int:
    """Bytes of a program's arguments, results and scratch; what it updates in place counts once."""
    found = program.memory_analysis()
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return kept + found.temp_size_in_bytes


def _size(arrays: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
