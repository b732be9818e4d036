"""The library's entry point: a loaded pair and its compiled programs decode prompts to tokens.

target = load_target("meta-llama/Meta-Llama-3-8B-Instruct")
drafter = load_drafter("huawei-noah/MOASpec-Llama-3-8B-Instruct", target)
result, = generate(target, drafter, [prompt_ids], max_new_tokens=128)
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from moa_jax.config import DraftShape, Sampling
from moa_jax.config.checks import unboxed, whole_numbers
from moa_jax.decode import logprobs, step
from moa_jax.decode.background import BackgroundWorker, can_compile_more
from moa_jax.decode.banned import bans_of, has_bans
from moa_jax.decode.draft_vocabulary import DraftVocabulary, vocabulary_beside
from moa_jax.decode.generation import Generation, LoopArrays, Result, StopWhen, shapes_of
from moa_jax.decode.limits import CacheLimits, prompt_ids_of, rows_ahead
from moa_jax.decode.programs import ROWS_OF_A_TILE, Programs, cache_rows_for, chunks_for
from moa_jax.decode.sampling import BatchSampling, make_batch_sampling
from moa_jax.decode.slots import common_prefix
from moa_jax.decode.state import (
    NEVER,
    DecodeState,
    StaticConfig,
    StopConditions,
    Vocabulary,
    Weights,
)
from moa_jax.drafters.api import Drafter
from moa_jax.errors import InputError
from moa_jax.model import llama, quantize, sharding
from moa_jax.model.kernels import cpu
from moa_jax.pretrained import LoadedDrafter, Target, functions_of
from moa_jax.runtime import memory
from moa_jax.runtime.multihost import on_first
from moa_jax.speculation.controller import NO_DRAFT, ROUNDS, DraftController, ShapeChoice
from moa_jax.speculation.cost_table import CostTable

T = TypeVar("T")

GREEDY = Sampling()
DEFAULT_DEPTH = 5
# A drafter without weights costs only the verification of its tokens: this part of a plain round
# per token (SmolLM2 on two cores: 0.12 to 0.16, accelerators: less). The value is an upper bound,
# which makes drafting start late until costs are measured.
MOST_OF_A_DRAFTED_TOKEN = 0.2
ROUNDS_BETWEEN_LOOKS = 8  # between two calls of `stop_when`
LOWER_CACHES = "--cache-rows, --batch or --max-new-tokens"
SECONDS_BETWEEN_TEXTS = 0.1  # between two parts of a streamed answer
MEASURED_TOKENS = 128  # of an answer that `seconds_of_a_round` times


class Session:
    """A pair ready to decode.

    Programs are compiled once per draft shape, batch size, number of cache rows, and combination
    of sampling settings in use, and are kept. One thread at a time may call a session, since its
    choice of shapes has no lock; the engine serves several threads.
    """

    def __init__(
        self,
        target: Target,
        drafter: LoadedDrafter | None = None,
        shape: DraftShape | None = None,
        *,
        ways: Sequence[DraftShape] = (),
        costs: CostTable | None = None,
        vocabulary: DraftVocabulary | None = None,
        cache_rows: int | None = None,
        least_rows: int = ROWS_OF_A_TILE,
        chunk: int | None = None,
        choose: Callable[..., jax.Array] | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        """Without a drafter, or with depth 1, decoding is plain; `shape` defaults to a chain.

        With `ways` a `DraftController` chooses a shape for every few rounds, among `ways`, `shape`
        and plain decoding. `costs` has the milliseconds of a round per shape; `calibrate` measures
        them by `seconds_of_a_round`, and calls that run alone correct them. Without costs the
        session uses `shape`; with a drafter without weights it uses plain decoding, or `shape` if a
        single prompt accepts enough drafts. Other shapes are compiled in the background. If `shape`
        is plain, `ways` has no effect.

        `vocabulary` restricts the drafted tokens; `decode.draft_vocabulary.vocabulary_beside`
        loads the vocabulary of a drafter's folder. None drafts from all tokens. `cache_rows` fixes
        the number of cache rows, rounded up to a multiple of 128, so that one program serves all
        lengths; with None caches have at least `least_rows` and double when needed. Prefill
        processes `chunk` tokens at a time, which does not change results. `choose` replaces the
        target's choice of tokens, to measure the cost of a round. With `top_logprobs` results have
        each token's log-probability and the top `top_logprobs` log-probabilities, at most 20.

        Raises InputError for a tree wider than the vocabulary, and for a `top_logprobs` too large.
        """
        if shape is None:
            shape = DraftShape((drafter and drafter.depth) or DEFAULT_DEPTH)
        self.shape = shape if drafter else NO_DRAFT
        self.ways = (self.shape,)
        if ways and self.shape.num_drafted:
            self.ways = tuple(dict.fromkeys((NO_DRAFT, self.shape, *ways)))
        drafter = drafter if any(way.num_drafted for way in self.ways) else None
        functions = drafter and functions_of(drafter, target.config)
        if drafter:
            _check_drafter(drafter.method, functions, self.ways, vocabulary)
        for way in self.ways:
            _check_breadth(way, target, functions, vocabulary)
        logprobs.check(top_logprobs, target.config.vocab_size)
        self.mesh = sharding.mesh_of(target.params)
        if drafter and drafter.params and sharding.mesh_of(drafter.params) != self.mesh:
            raise InputError(
                "target and drafter lie on different devices; load both with the same mesh"
            )
        has_weights = drafter is not None and bool(drafter.params)
        self.first = self.shape if has_weights or len(self.ways) == 1 else NO_DRAFT
        self.catches_up = len(self.ways) > 1  # whether the drafter may lag
        levels = max(way.levels for way in self.ways) - 1
        self.controller = DraftController(levels) if self.catches_up else None
        self.costs = CostTable() if costs is None else costs
        self.sync_ms: dict[int, float] = {}  # by batch: shortest turn of `step.synced`
        self._chunk = chunk
        rows = [way.num_rows for way in self.ways]
        self._draft_rows = max(*rows, step.CATCH_UP if self.catches_up else 0)
        ahead = rows_ahead(self._draft_rows, levels + 1, self.chunks(1)[0])
        # Rows of an engine's caches after the last token. Its last chunk starts earlier if rows are
        # missing, which a layer with a window cannot.
        self.rows_after = ahead if any(target.config.sliding_windows) else self._draft_rows
        self.setup = StaticConfig(
            target.config, functions, self.shape, choose, self.catches_up, top_logprobs, ahead
        )
        self.vocabulary = vocabulary if drafter else None
        head = self.vocabulary and slice_of_head(target.params, self.vocabulary)
        weights = for_decoding(Weights(target.params, drafter and drafter.params, head))
        self.target = target._replace(params=weights.target)  # else a CPU would hold both forms
        self.cache_rows = cache_rows and cache_rows_for(cache_rows)
        positions = target.config.max_position_embeddings
        self.room = CacheLimits(positions, self.cache_rows, self._draft_rows, least_rows)
        dtype = target.params["embed"].dtype
        setups = {way: self.setup._replace(shape=way) for way in self.ways}
        self._programs = {
            way: Programs(each, (weights,), dtype, drafts=way.num_drafted > 0)
            for way, each in setups.items()
        }
        self._cache_bytes: dict[int, int] = {}
        self.background = BackgroundWorker()
        self.alone = threading.Lock()  # held by timed calls, so that another thread waits
        if self.cache_rows is not None:
            self.check_memory(1, self.cache_rows)

    @property
    def weights(self) -> Weights:
        """The parameters of both models; parameters of the same shapes may be assigned."""
        return self._programs[self.shape].weights[0]

    @weights.setter
    def weights(self, weights: Weights) -> None:
        weights = for_decoding(weights)
        self.target = self.target._replace(params=weights.target)
        for programs in self._programs.values():
            programs.weights = (weights,)

    @property
    def num_compiled(self) -> int:
        """The number of programs compiled so far."""
        return sum(map(len, self._programs.values()))

    def check_memory(self, batch: int, rows: int, flags: str = LOWER_CACHES) -> None:
        """Raises InputError if the device cannot hold the caches; its fix is to lower `flags`."""
        memory.check_memory(
            batch * self.cache_bytes(rows),
            f"caches of {rows} rows for a batch of {batch}",
            f"lower {flags}",
            self.mesh.size if self.mesh else 1,
        )

    def cache_bytes(self, rows: int) -> int:
        """Bytes of all caches of `rows` rows, for one prompt; those of windows have fewer rows."""
        if rows not in self._cache_bytes:
            caches = lambda weights: step.empty(self.setup, weights, 1, rows, BatchSampling())
            self._cache_bytes[rows] = memory.num_bytes_of(jax.eval_shape(caches, self.weights))
        return self._cache_bytes[rows]

    def usable_prefix(self, rows: int, held: np.ndarray, wanted: np.ndarray, written: int) -> int:
        """Returns the tokens of `wanted` that a slot of `rows` cache rows has, see `slots.Usable`.

        `written` is the number of tokens that the host has read; a call in flight may write more.
        """
        count = common_prefix(held, wanted, written)
        config, ahead = self.target.config, self.setup.ahead
        return count * llama.keeps_prefix(config, rows, ahead, count, written)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop_when: StopWhen | None = None,
    ) -> list[Result]:
        """Decodes a batch to the end, in one call if there is one shape and no `stop_when`.

        Prompts and `stop_ids` are lists, or arrays of numpy, jax or torch. `max_new_tokens` is one
        number, or one per prompt. `stop_ids` is one list, or one per prompt; the default is the
        target's end-of-text ids. With a single `sampling`, row i gets its seed plus i; the seed -1
        draws a new seed per call. `stop_when` is called with the tokens of each row, at least every
        ROUNDS_BETWEEN_LOOKS rounds, and returns the length at which to truncate the row, or None.
        Raises InputError for an empty prompt, for values that are not whole numbers, tokens outside
        the vocabulary, more tokens than the target's positions, or a cache that is too small.
        """
        found = self.begin(prompts, max_new_tokens, stop_ids, sampling)
        most = None if stop_when is None else ROUNDS_BETWEEN_LOOKS
        while True:
            if stop_when is not None:
                found.look(stop_when)
            if found.done:
                return found.results()
            found.call(most)

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int] | None = None,
        sampling: Sampling = GREEDY,
        stop_when: StopWhen | None = None,
    ) -> Iterator[list[int] | Result]:
        """Yields lists of new tokens, about one per 100 ms, and last the Result."""
        found = self.begin([prompt], max_new_tokens, stop_ids, sampling)
        shown = 0
        while True:
            if stop_when is not None:
                found.look(stop_when)
            (tokens,) = found.tokens()
            yield tokens[shown:]
            shown = len(tokens)
            if found.done:
                break
            found.call(within=SECONDS_BETWEEN_TEXTS)
        yield found.results()[0]

    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling: Sampling | Sequence[Sampling],
        teaches: bool = True,
    ) -> Generation:
        """Processes prompts and commits their first tokens; the arguments are those of `generate`.

        With `teaches` the session's controller records the accepted drafts; measurements pass
        False.
        """
        prompts = self._token_ids(prompts)
        started = self.start(prompts, max_new_tokens, stop_ids, sampling)
        return Generation(self, prompts, started, teaches)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling: Sampling | Sequence[Sampling],
    ) -> tuple[DecodeState, StopConditions, BatchSampling, float]:
        """Processes prompts and commits their first tokens; also returns the seconds this took.

        The arguments are those of `generate`.
        """
        sharding.warn_replicated(len(prompts), self.mesh)
        wanted_B = np.array(self.check(prompts, max_new_tokens), np.int32)
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        total_B = lengths_B + wanted_B
        rows = self.room.rows_for(int(total_B.max()))
        self.check_memory(len(prompts), rows)
        capacity = rows - self._draft_rows
        prompt_BT = np.zeros((len(prompts), capacity), np.int32)
        for row, prompt in zip(prompt_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        limits = StopConditions(jnp.asarray(total_B), self._stops(len(prompts), stop_ids))
        settings, vocab_size = rows_of(sampling, len(prompts)), self.target.config.vocab_size
        batch_sampling = make_batch_sampling(settings, vocab_size)
        if any(map(has_bans, settings)):
            bans = bans_of(settings, lengths_B, np.asarray(limits.stop_ids_BX), vocab_size)
            batch_sampling = batch_sampling._replace(bans=jax.tree.map(jnp.asarray, bans))
        arrays = (prompt_BT, lengths_B, limits, batch_sampling)
        static = {"capacity": capacity, "chunks": self.chunks(len(prompts))}
        static |= {"donate": False, "draft_rows": self._draft_rows}
        prefill = self._programs[self.shape].compile(step.prefill, *arrays, **static)
        with self.alone:
            begin = time.perf_counter()
            state = jax.block_until_ready(prefill(self.weights, *arrays))
            seconds = time.perf_counter() - begin
        return state, limits, batch_sampling, seconds

    def chunks(self, batch: int) -> tuple[int, ...]:
        """Returns the chunk sizes in which `step.prefill` processes a batch of prompts."""
        return (self._chunk,) if self._chunk else chunks_for(jax.default_backend(), batch)

    def loop(
        self,
        state: DecodeState,
        limits: StopConditions,
        batch_sampling: BatchSampling,
        shape: DraftShape | None = None,
    ) -> jax.stages.Compiled:
        """Returns the compiled loop of rounds: (weights, state, limits, batch_sampling) -> state.

        The loop donates the state. `shape` is one of `ways`, by default the session's `shape`.
        """
        return self._programs[shape or self.shape].prepare(
            step.decode, state, limits, batch_sampling
        )

    def catching_up(self, state: DecodeState) -> jax.stages.Compiled:
        """Returns the compiled `step.synced`: (weights, state) -> state; donates the state."""
        return self._programs[self.shape].compile(step.synced, state)

    def next(
        self,
        arrays: LoopArrays,
        ready: set[DraftShape],
        costs: Mapping[DraftShape, float],
        lag_ms: float = 0.0,
    ) -> ShapeChoice:
        """Returns the shape of a batch's next rounds.

        `ready` has the shapes whose programs are compiled; the call adds newly compiled shapes to
        `ready`. Shapes that have a cost and no program yet are compiled in the background. `costs`
        comes from `round_costs`, and `lag_ms` is the time that the drafter needs to catch up.
        """
        if self.controller is None:
            return ShapeChoice(self.shape, NEVER)
        for way in costs:
            if way in ready:
                continue
            if way in (self.shape, self.first) or self._is_ready(way, arrays):
                ready.add(way)
            else:
                self.background.submit(*self._preparing(way, arrays))
        can_run = {way: ms for way, ms in costs.items() if way in ready}
        if not can_run:
            return ShapeChoice(self.first, ROUNDS)
        return self.controller.next(can_run, lag_ms)

    def round_costs(self, batch: int, length: int) -> dict[DraftShape, float]:
        """Returns the milliseconds of a round per shape, as far as calibrated.

        For one prompt and a drafter without weights, missing costs are estimated, with 1 for a
        plain round.
        """
        found = {way: self.costs.ms(batch, way, length) for way in self.ways}
        known = {way: ms for way, ms in found.items() if ms is not None}
        if known or batch > 1 or self.first == self.shape:
            return known
        return {NO_DRAFT: 1.0, self.shape: 1 + MOST_OF_A_DRAFTED_TOKEN * self.shape.num_drafted}

    def seconds_of_a_round(self, batch: int, shape: DraftShape, length: int) -> float:
        """Times rounds of a shape after random prompts of a length, for `calibrate`.

        The rounds that count are one call, so that they include what a call costs the host. Twice
        as many rounds come before: until then a CPU's caches hold the prompt's or another shape's
        data. Raises InputError if the caches are too small.
        """
        room = self.room.max_new_tokens(1)
        if room < 4:
            raise InputError(
                "the caches have no room to measure what a round costs; make them larger"
            )
        new = max(MEASURED_TOKENS, 3 * max(way.levels for way in self.ways))
        if length + new > room:
            length = new = room // 2
        size = (batch, length)
        prompts = np.random.default_rng(0).integers(self.target.config.vocab_size, size=size)
        found = self.begin(prompts.tolist(), new, [], GREEDY, teaches=False)
        rounds = min(ROUNDS, max(1, new // (3 * shape.levels)))  # even if all drafts are accepted
        calls = [found.take(shape, 2 * rounds), found.take(shape, rounds)]
        last = [call for call in calls if call.rounds][-1]  # small caches may end the answers early
        return last.seconds / last.rounds

    def agreed(self, choose: Callable[[], T]) -> T:
        """Returns `choose()`, on a mesh of several processes the value that process 0 computes.

        Choices that depend on the clock need to agree across processes. The value must be
        JSON-serialisable.
        """
        return on_first(choose) if sharding.spans_processes(self.mesh) else choose()

    def _is_ready(self, way: DraftShape, arrays: LoopArrays) -> bool:
        own = self._programs[self.shape]
        needs = way.num_drafted or own.is_compiled(step.synced, arrays[0])
        return needs and self._programs[way].is_compiled(step.decode, *arrays)

    def _preparing(
        self, way: DraftShape, arrays: LoopArrays
    ) -> tuple[Hashable, Callable[[], None]]:
        """Returns name and function of a background job that compiles a shape's programs."""
        like = shapes_of(arrays)  # the job must not keep the arrays alive

        def prepare() -> None:
            if not can_compile_more():
                return
            self.loop(*like, way)
            if not way.num_drafted:
                self.catching_up(like[0])

        leaves, structure = jax.tree.flatten(like)
        return (way, structure, *leaves), prepare

    def _stops(
        self, batch: int, stop_ids: Sequence[int] | Sequence[Sequence[int]] | None
    ) -> jax.Array:
        """Returns stop ids (B, X), padded with -1 to a multiple of 8, so that few widths compile.

        Ids outside the vocabulary become -1.
        """
        ids = unboxed(self.target.generation.eos_ids if stop_ids is None else stop_ids)
        each = list(map(unboxed, ids)) if isinstance(ids, list | tuple) else ids
        one_each = isinstance(each, list) and each and isinstance(each[0], list | tuple)
        rows = [whole_numbers("stop_ids", row) for row in (each if one_each else [each])]
        known = range(self.target.config.vocab_size)
        rows = [[id if id in known else -1 for id in row] for row in rows]
        rows = rows if one_each else rows * batch
        if len(rows) != batch:
            raise InputError(f"{len(rows)} lists of stop ids for {batch} prompts; give one each")
        width = max(8, *(-(-len(row) // 8) * 8 for row in rows))
        return jnp.array([row + [-1] * (width - len(row)) for row in rows], jnp.int32)

    def check(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]
    ) -> list[int]:
        """Returns the maximum number of new tokens per prompt; raises InputError as `generate`."""
        prompts, most = self._token_ids(prompts), unboxed(max_new_tokens)
        most = [most] * len(prompts) if isinstance(most, int | float) else most
        wanted_B = whole_numbers("max_new_tokens", most)
        if len(wanted_B) != len(prompts):
            raise InputError(f"{len(wanted_B)} lengths for {len(prompts)} prompts; give one each")
        for index, (prompt, wanted) in enumerate(zip(prompts, wanted_B, strict=True)):
            if wanted < 1:
                raise InputError(f"max_new_tokens {wanted}; ask for at least 1")
            self.room.check(index, len(prompt), wanted)
        return wanted_B

    def _token_ids(self, prompts: Any) -> list[list[int]]:
        """Converts prompts to lists; raises InputError for prompts that are not of this target."""
        prompts, vocab_size = unboxed(prompts), self.target.config.vocab_size
        if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
            raise InputError(f"prompts are {prompts!r:.40}; give a list of lists of token ids")
        found = [prompt_ids_of(i, prompt, vocab_size) for i, prompt in enumerate(prompts)]
        if not found:
            raise InputError("no prompts; give at least one")
        return found


def generate(
    target: Target,
    drafter: LoadedDrafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    *,
    shape: DraftShape | None = None,
    stop_ids: Sequence[int] | None = None,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
) -> list[Result]:
    """Decodes a batch of prompts; keep a `Session` to decode more than one batch."""
    vocabulary = drafter and vocabulary_beside(target, drafter)
    session = Session(target, drafter, shape, vocabulary=vocabulary)
    return session.generate(prompts, max_new_tokens, stop_ids, sampling)


def rows_of(sampling: Sampling | Sequence[Sampling], batch: int) -> list[Sampling]:
    """Returns the settings per row; with a single `Sampling`, row i gets its seed plus i."""
    if isinstance(sampling, Sampling):
        first = sampling.seeded()
        return [row_of(first, row) for row in range(batch)]
    if len(sampling) != batch:
        raise InputError(f"{len(sampling)} samplings for {batch} prompts; give one each")
    return [each.seeded() for each in sampling]


def row_of(sampling: Sampling, row: int) -> Sampling:
    """Returns the settings with the seed plus the row's index; `sampling.seed` must not be -1."""
    return dataclasses.replace(sampling, seed=(sampling.seed + row) % (1 << 32))


def _check_drafter(
    method: str,
    drafter: Drafter,
    shapes: Sequence[DraftShape],
    vocabulary: DraftVocabulary | None,
) -> None:
    """Raises InputError for a vocabulary beside an own head, and for trees of a chain drafter."""
    if vocabulary and drafter.own_head:
        raise InputError(
            f"a drafter of kind {method} has a head of its own; leave out the draft vocabulary, "
            "which is a slice of the target's"
        )
    if drafter.chains_only and not all(shape.is_chain for shape in shapes):
        raise InputError(f"a drafter of kind {method} drafts chains, no trees; use --mode chain")


def _check_breadth(
    shape: DraftShape,
    target: Target,
    drafter: Drafter | None,
    vocabulary: DraftVocabulary | None,
) -> None:
    """Raises InputError if a node has more children than the drafter has tokens to propose."""
    if vocabulary is not None:
        size = len(vocabulary.ids_U)
    else:
        own = drafter.draft_ids if drafter else None
        size = target.config.vocab_size if own is None else len(own)
    if shape.most_children > size:
        raise InputError(
            f"breadth {shape.most_children} is more than the {size} tokens that can be drafted; "
            "choose a smaller one"
        )


def for_decoding(weights: Weights) -> Weights:
    """Converts weights to the layout in which this device multiplies few rows fastest.

    On a CPU kernels are cut into panels, and a tied head gets a kernel of its own: a product with
    the table (V, D) would first transpose the table, which costs more than the product itself.
    Weights on a mesh, where a CPU simulates other devices, and weights that are already converted
    do not change.
    """
    if jax.default_backend() != "cpu" or sharding.mesh_of(weights.target) is not None:
        return weights
    head = weights.vocabulary
    return weights._replace(
        target=_with_head(weights.target),
        drafter=_with_head(weights.drafter),  # a small language model has its own table
        vocabulary=head and head._replace(head_DU=cpu.cut(head.head_DU)),
        shared=_with_head(weights.shared),
    )


def _with_head(params: Any) -> Any:
    if params and "embed" in params and "lm_head" not in params:
        params = params | {"lm_head": quantize.transposed(params["embed"])}
    return quantize.in_panels(params)


def slice_of_head(params: Any, vocabulary: DraftVocabulary) -> Vocabulary:
    """Returns the slice of the target's head that the drafter reads.

    `params` need only the target's embedding and head.
    """
    ids_U = jnp.asarray(vocabulary.ids_U, jnp.int32)
    head = params["lm_head"] if "lm_head" in params else quantize.transposed(params["embed"])
    found = Vocabulary(ids_U, quantize.columns(head, ids_U))
    if (mesh := sharding.mesh_of(params)) is None:
        return found
    place = lambda leaf, *axes: NamedSharding(mesh, sharding.dividing(axes, leaf.shape, mesh))
    cut = quantize.sharding_as(("head",), found.head_DU, place(found.head_DU, None, "vocab"))
    return jax.device_put(found, Vocabulary(place(ids_U, None), cut))
