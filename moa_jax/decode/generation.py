"""A batch that is being decoded by calls of a compiled loop, and the results of each call.

    call      the draft shape that the session chooses -> some rounds on the device -> results
    results   one transfer: rounds so far, rows that are done, tokens that each round committed

A session with one shape, no stop strings and no stream decodes to the end in one call. A session
with several shapes chooses one before each call. All shapes carry the same state, so each call may
use another shape.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from moa_jax.config import DraftShape
from moa_jax.decode import finite, logprobs
from moa_jax.decode.background import BackgroundWorker
from moa_jax.decode.logprobs import TokenLogprob
from moa_jax.decode.programs import Program
from moa_jax.decode.sampling import BatchSampling
from moa_jax.decode.state import NEVER, DecodeState, StaticConfig, StopConditions, Weights
from moa_jax.decode.step import CATCH_UP
from moa_jax.pretrained import Target
from moa_jax.runtime.multihost import gathered
from moa_jax.speculation.controller import ROUNDS, DraftController, ShapeChoice
from moa_jax.speculation.cost_table import CostTable

# The arguments that a loop of rounds is compiled for.
LoopArrays = tuple[DecodeState, StopConditions, BatchSampling]
# (generated tokens) -> the number of tokens to keep if they hold a stop, else None
StopWhen = Callable[[list[int]], int | None]


class Result(NamedTuple):
    """One answer. `accept_lengths` has the accepted drafts + 1 of each round; a stop or the limit
    truncates the last entry, so `1 + sum(accept_lengths) == len(token_ids)`."""

    prompt_ids: list[int]
    token_ids: list[int]  # generated tokens, a stop token included
    finish_reason: str  # "stop" or "length"
    accept_lengths: list[int]
    prefill_s: float
    decode_s: float  # decoding time of the answer's whole batch
    drafted: list[int]  # nodes that each round proposed, without the root
    drafted_levels: Sequence[int] = ()  # depth of those nodes; equals `drafted` for a chain
    logprobs: Sequence[TokenLogprob] = ()  # per token, if the session has `top_logprobs`

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def tau(self) -> float:
        """Mean number of tokens committed per target verification; nan before any round."""
        return sum(self.accept_lengths) / self.rounds if self.rounds else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of decoding, without prefill and its token."""
        return sum(self.accept_lengths) / self.decode_s if self.decode_s else float("nan")


class Call(NamedTuple):
    """Shape, rounds and time of one call of a loop."""

    shape: DraftShape
    rounds: int
    seconds: float  # host time included


class Decoder(Protocol):
    """The part of `Session` that a generation uses; methods are documented there."""

    setup: StaticConfig
    target: Target
    ways: tuple[DraftShape, ...]
    controller: DraftController | None
    costs: CostTable
    catches_up: bool
    sync_ms: dict[int, float]
    background: BackgroundWorker
    alone: AbstractContextManager[Any]

    @property
    def weights(self) -> Weights: ...

    def agreed(self, choose: Callable[[], tuple[int, int]]) -> tuple[int, int]: ...

    def next(
        self,
        arrays: LoopArrays,
        ready: set[DraftShape],
        costs: Mapping[DraftShape, float],
        lag_ms: float,
    ) -> ShapeChoice: ...

    def round_costs(self, batch: int, length: int) -> dict[DraftShape, float]: ...

    def loop(self, *arrays_and_shape: Any) -> Program: ...

    def catching_up(self, state: DecodeState) -> Program: ...


class Generation:
    """Prompts after prefill, and their answers so far.

    Every row that is not done takes part in a round, so a round has the same index in these rows.
    """

    def __init__(
        self,
        session: Decoder,
        prompts: Sequence[Sequence[int]],
        started: tuple[DecodeState, StopConditions, BatchSampling, float],
        teaches: bool = True,
    ) -> None:
        """`started` is the result of `Session.start` for these prompts.

        With `teaches` the session's controller records the accepted drafts, and the cost table the
        time of calls that run alone.
        """
        self.prompts, self.decode_s = [list(map(int, prompt)) for prompt in prompts], 0.0
        self.state, self.limits, self.batch_sampling, self.prefill_s = started
        self._session = session
        self._controller = session.controller if teaches else None
        self._length = max(map(len, prompts))  # of the longest row
        self._costs: dict[DraftShape, float] = {}  # of the last choice
        self._kept: dict[int, int] = {}
        self._finders: list[StopWhen] = []  # one per row, since a finder may remember tokens
        self._rounds_B = np.zeros(len(prompts), np.int32)
        self._done_B = gathered(self.state.round.done_B)
        self._levels: list[int] = []  # levels below the root, of each round's draft
        self._ready: set[DraftShape] = set()  # shapes that are compiled
        self._round_s: dict[DraftShape, float] = {}  # seconds per round, of each shape's last call
        self._loops: dict[DraftShape, Program] = {}  # compiled loops of the shapes used
        self._lag = 0  # plain rounds whose tokens the drafter's cache lacks

    @property
    def done(self) -> bool:
        """Whether every row is done."""
        return bool(self._done_B.all())

    def call(self, most: int | None = None, within: float | None = None) -> Call:
        """Runs rounds of the shape that the session chooses, up to the session's next choice.

        The call runs at most `most` rounds. With `within`, the call runs as many rounds as fit that
        many seconds by the shape's last call; a shape without a call runs one round.
        """
        begin = time.perf_counter()
        way, rounds = self._session.agreed(lambda: self._choose(within))
        self.decode_s += time.perf_counter() - begin
        return self.take(self._session.ways[way], rounds if most is None else min(rounds, most))

    def _choose(self, within: float | None) -> tuple[int, int]:
        """Returns the index of a shape in `Session.ways`, and the number of rounds to run."""
        session, batch = self._session, len(self.prompts)
        self._costs = session.round_costs(batch, self._length)
        lag_ms = session.sync_ms.get(batch, 0.0) * self._sync_turns
        shape, rounds = session.next(self.arrays, self._ready, self._costs, lag_ms)
        if within is not None:
            known = self._round_s.get(shape)
            rounds = min(rounds, max(1, int(within / known)) if known else 1)
        return session.ways.index(shape), int(rounds)

    def take(self, shape: DraftShape, rounds: int) -> Call:
        """Runs rounds of a given shape."""
        session = self._session
        if shape.num_drafted:
            self.catch_up()
        pause = NEVER if rounds >= NEVER else int(self._rounds_B.max()) + rounds
        # Reusing the limits and the compiled loop saves 0.6 ms per call on a CPU.
        limits = self.limits._replace(pause=np.int32(pause))
        if shape not in self._loops:
            self._loops[shape] = session.loop(self.state, limits, self.batch_sampling, shape)
        decode = self._loops[shape]
        with session.alone:
            begin = time.perf_counter()
            self.state = decode(session.weights, self.state, limits, self.batch_sampling)
            accepted, turned = self._collect()
            seconds = time.perf_counter() - begin
        self._levels += [shape.levels - 1] * turned
        self.decode_s += seconds
        if session.catches_up and not shape.num_drafted:
            self._lag += turned
        if turned:
            self._round_s[shape] = seconds / turned
            if self._controller is not None:
                self._record(shape, accepted, turned, 1e3 * seconds / turned)
        return Call(shape, turned, seconds)

    def _record(
        self, shape: DraftShape, accepted: npt.NDArray[np.int32], rounds: int, ms: float
    ) -> None:
        """Records a call of `ms` per round in the controller and the cost table.

        A compiler beside a call takes its cores. Calls of few rounds mostly measure the host, which
        the controller's debt counts and the cost of a shape does not.
        """
        batch, costs = len(self.prompts), self._session.costs
        is_calibrated = costs.ms(batch, shape, self._length) is not None
        round_ms = ms if is_calibrated and not self._session.background.is_busy else None
        self._controller.observe(self._costs, shape, accepted, rounds, batch, round_ms)
        if round_ms and rounds >= ROUNDS:
            costs.update(batch, shape, self._length, round_ms)

    def catch_up(self) -> float:
        """Runs the drafter over the tokens of plain rounds; returns the seconds that this took."""
        if not self._lag:
            return 0.0
        session, batch = self._session, len(self.prompts)
        program = session.catching_up(self.state)
        with session.alone:
            begin = time.perf_counter()
            self.state = jax.block_until_ready(program(session.weights, self.state))
            seconds = time.perf_counter() - begin
        self.decode_s += seconds
        if session.weights.drafter:  # without weights it only copies tokens, at no cost
            turn_ms = 1e3 * seconds / self._sync_turns
            session.sync_ms[batch] = min(turn_ms, session.sync_ms.get(batch, turn_ms))
        self._lag = 0
        return seconds

    @property
    def _sync_turns(self) -> int:
        """Most turns of `step.synced` in which the drafter catches up."""
        return -(-min(self._lag, self._session.setup.lag_limit or self._lag) // CATCH_UP)

    @property
    def arrays(self) -> LoopArrays:
        """The arguments of the next call of a loop."""
        return self.state, self.limits, self.batch_sampling

    def look(self, stop_when: StopWhen) -> None:
        """Ends the rows in which `stop_when` finds a stop, and records their number of tokens."""
        begin, done_B = time.perf_counter(), self._done_B.copy()
        self._finders = self._finders or [copy.copy(stop_when) for _ in self.prompts]
        for row, tokens in enumerate(self.tokens()):
            cut = self._finders[row](tokens)
            if cut is not None:
                self._kept.setdefault(row, cut)
                done_B[row] = True
        if (done_B != self._done_B).any():
            now = self.state.round._replace(done_B=jnp.asarray(done_B))
            self.state, self._done_B = self.state._replace(round=now), done_B
        self.decode_s += time.perf_counter() - begin

    def tokens(self) -> list[list[int]]:
        """Returns the new tokens of each row, truncated at a stop.

        Raises NotFinite if the target's logits were not finite.
        """
        tokens_BC, length_B = gathered((self.state.tokens_BC, self.state.round.length_B))
        found = zip(self.prompts, tokens_BC, length_B, strict=True)
        new = [tokens_C[len(prompt) : length + 1].tolist() for prompt, tokens_C, length in found]
        for row, (prompt, tokens) in enumerate(zip(self.prompts, new, strict=True)):
            finite.check(self._session.target, f"prompt {row}", len(prompt), tokens)
        return [tokens[: self._kept.get(row)] for row, tokens in enumerate(new)]

    def results(self) -> list[Result]:
        """Returns the answers so far."""
        state = self.state
        fields = (self.limits.stop_ids_BX, state.rounds_B, state.counts_B2R)
        rows = gathered(state.logprobs)
        results = []
        for row, (prompt, tokens, stop_X, rounds, counts_2R) in enumerate(
            zip(self.prompts, self.tokens(), *gathered(fields), strict=True)
        ):
            accepted = counts_2R[0, :rounds].tolist()
            stopped = row in self._kept or tokens[-1] in stop_X.tolist()
            if row in self._kept:
                accepted = _cut(accepted, len(tokens) - 1)
            drafted = counts_2R[1, : len(accepted)].tolist()
            levels = [min(pair) for pair in zip(self._levels, drafted, strict=False)]
            reason = "stop" if stopped else "length"
            times = (self.prefill_s, self.decode_s)
            written = slice(len(prompt), len(prompt) + len(tokens))
            thought = rows and logprobs.as_list(rows, row, written)
            results.append(
                Result(prompt, tokens, reason, accepted, *times, drafted, levels, thought or ())
            )
        return results

    def _collect(self) -> tuple[npt.NDArray[np.int32], int]:
        """Waits for a call and reads its results; returns its accepted drafts, and its rounds.

        The accepted drafts are those of each row's rounds, without a last round that a stop or the
        limit may have truncated.
        """
        state, before_B = self.state, self._rounds_B
        news = (state.rounds_B, state.round.done_B, state.counts_B2R, state.round.length_B)
        self._rounds_B, self._done_B, counts_B2R, length_B = gathered(news)
        self._length = int(length_B.max())
        ends_B = np.maximum(self._rounds_B - self._done_B, before_B)
        rows = zip(counts_B2R[:, 0], before_B, ends_B, strict=True)
        accepted = np.concatenate([counts_R[first:end] - 1 for counts_R, first, end in rows])
        return accepted, int(self._rounds_B.max() - before_B.max())


def _cut(accept_lengths: list[int], total: int) -> list[int]:
    """Returns the accept lengths of the first `total` tokens' rounds; the last is truncated."""
    rounds = []
    for length in accept_lengths:
        if total > 0:
            rounds.append(min(length, total))
        total -= length
    return rounds


def shapes_of(arrays: Any) -> Any:
    """Returns the shapes and dtypes of arrays; the result keeps no array alive."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
