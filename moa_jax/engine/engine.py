"""Continuous batching: requests share one state, and each gets the tokens that `Session` returns.

    clients' threads       submit, cancel                               on_output(RequestOutput)
                              |                                               ^
                              v                                               |
    the engine's thread    commands -> Scheduler -> DecodeBatch -> calls -> reports
                                       queue, slots     |            ^
                                                        v            |
    the device                                       prefill, decode, ...

A step of the engine's thread executes commands, sends the next chunks of prompts and a decode call
to the device, and reads the calls of the previous step. So the device runs one step while the host
reads the step before. A decode call is a few rounds of all requests whose prompts are prefilled.

If one of them has a grammar, a call is one masked round. Its masks follow from all tokens before
them, so the call before is read first. The target's pass over the drafts needs no masks: it is sent
at once, unless a prompt can be prefilled, and the device runs it while the host makes the masks.

    host      masks 1, send 1, pass 2 | read 1, masks 2, send 2, pass 3 | read 2
    device    pass 1 | round 1   | pass 2           | round 2           | pass 3

In float32 the tokens of a request equal those of a `Session` without a drafter that decodes the
request alone with the same seed, unless candidates are sampled: noise depends on the position, and
rows do not depend on each other.

The engine's thread never compiles. The programs without which a request could not be served are
compiled before the start. The others are compiled in the background, in the order of need, while
no request runs or if the present requests would use them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode import finite, logprobs
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.decode.programs import cache_rows_for
from moa_jax.decode.row_settings import RowSettings, is_sampled, row_settings
from moa_jax.decode.session import Session
from moa_jax.drafters.api import NO_TOKEN
from moa_jax.engine.batch import DecodeBatch, DecodeCall
from moa_jax.engine.device_ops import PrefillReport
from moa_jax.engine.multihost import LeadingPrograms
from moa_jax.engine.pacing import ROUNDS_BESIDE_PREFILL, Pacing
from moa_jax.engine.prefix_cache import SlotTable
from moa_jax.engine.program_cache import GREEDY, LOGPROBS, SAMPLED, ProgramCache, ProgramName
from moa_jax.engine.requests import EngineClosed, QueueFull, Request, RequestOutput, RequestState
from moa_jax.engine.scheduler import PrefillChunk, Scheduler
from moa_jax.engine.stats import EngineStats
from moa_jax.errors import InputError
from moa_jax.model import sharding
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.runtime.followers import Followers
from moa_jax.runtime.memory import MemoryPlan, log_failure, num_bytes_of
from moa_jax.speculation.controller import BUDGET, ROUNDS
from moa_jax.speculation.cost_table import CostTable

# Consecutive failed steps after which the engine is unhealthy: the first may have lost the state,
# and the second may lack the memory that the first still holds.
MAX_FAILURES = 3
# For the thread to end after a drain, until its requests are given up: no step takes so long, since
# a step is at most four chunks, a pass of the drafter over each prompt, eight rounds and a dummy
# run, and its programs are compiled before.
STUCK_S = 60.0
LOWER_MEMORY = "lower --slots, --max-tokens or --prefix-bytes"


class Submit(NamedTuple):
    """Command: a new request."""

    state: RequestState


class Cancel(NamedTuple):
    """Command: end a request with "cancelled"."""

    id: int


class Close(NamedTuple):
    """Command: cancel unfinished requests at a time of `time.monotonic`, then end the thread."""

    at: float


class Compiled(NamedTuple):
    """Command: schedule the dummy runs of a program, unless its compilation has failed."""

    name: ProgramName


Command = Submit | Cancel | Close | Compiled


class Engine:
    """Serves many requests with one pair; any thread may call the public methods.

    Only `prepare` and `start` belong to one thread.
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
        num_slots: int = 16,
        max_tokens: int = 2048,
        max_waiting: int = 256,
        chunk: int | None = None,
        prefix_bytes: int | None = None,
        followers: Followers | None = None,
        on_calibrated: Callable[[CostTable], None] = lambda costs: None,
    ) -> None:
        """At most `num_slots` requests run at once, each of at most `max_tokens` tokens in all.

        Pair, `shape`, `ways`, `costs`, `vocabulary` and `chunk` are those of `Session`;
        `on_calibrated` is called after a cost is measured. Free slots keep their tokens as a prefix
        cache; `prefix_bytes` is the size of additional slots for it, by default that of half of
        `num_slots`, and 0 turns the cache off. With `followers` the mesh spans several processes,
        and this process is process 0. Raises InputError for invalid settings, and if the memory is
        too small.
        """
        self.session = session = Session(
            target, drafter, shape, ways=ways, costs=costs, vocabulary=vocabulary, chunk=chunk
        )
        positions = target.config.max_position_embeddings
        if not 1 < max_tokens <= positions:
            raise InputError(
                f"max_tokens is {max_tokens}; choose from 2 to {positions}, the target's positions"
            )
        if num_slots < 1:
            raise InputError(f"num_slots is {num_slots}; choose at least 1")
        sharding.warn_replicated(num_slots, session.mesh)
        self.num_slots, self.max_tokens, self.max_waiting = num_slots, max_tokens, max_waiting
        num_rows = cache_rows_for(max_tokens + session.rows_after)
        make = functools.partial(LeadingPrograms, followers) if followers else ProgramCache
        self.programs = programs = make(session, num_slots, num_rows, prefix_bytes)
        num_kept, weights = programs.num_slots - num_slots, num_bytes_of(session.weights)
        of_slots = (count * programs.slot_bytes for count in (num_slots, num_kept))
        self.memory = MemoryPlan(weights, *of_slots, programs.scratch_bytes)
        self.memory.check(num_slots, LOWER_MEMORY, session.mesh.size if session.mesh else 1)
        self._batch = DecodeBatch(programs)
        usable = functools.partial(session.usable_prefix, num_rows)
        self._slots = SlotTable(programs.num_slots, prefix_bytes != 0, usable)
        self._scheduler = Scheduler(self._slots, num_slots, programs.chunks[-1])
        self._pacing = Pacing(programs, on_calibrated)
        self._counts, self._finished = Counter[str](), Counter[str]()
        self._rounds, self._accepted = Counter[DraftShape](), Counter[int]()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._lock, self._compiling_masks = threading.RLock(), threading.Lock()
        self._closed = self._is_compiling = False
        self._states: dict[int, RequestState] = {}  # unfinished requests, by id
        self._call: DecodeCall | None = None  # sent and not read
        self._chunks: list[tuple[PrefillChunk, PrefillReport]] = []  # sent and not read
        self._read_at = 0.0  # when a decode call was last read
        self._dummy_run_at = 0.0  # earliest time of the next dummy run beside requests
        self._failures_in_a_row, self._ends_at = 0, math.inf
        self._thread: threading.Thread | None = None

    # ---- any thread ----

    def submit(
        self, request: Request, on_output: Callable[[RequestOutput], None], others: int = 0
    ) -> int:
        """Queues a request; the engine's thread calls `on_output`, which must not block.

        Returns at once, with an id for `cancel`. The request is accepted only if the queue has room
        for `others` more. Each accepted request gets exactly one output with a `finish_reason`, its
        last. Raises InputError for an invalid request, QueueFull and EngineClosed.
        """
        settings = self._checked(request)
        with self._lock:
            if self._closed:
                raise EngineClosed("the server is stopping: ask another one, or later")
            room = self.max_waiting + self.num_slots - len(self._states)
            if room <= others:
                raise QueueFull(f"{self.stats().waiting} requests are waiting: try again later")
            kind = SAMPLED if is_sampled(request.sampling) else GREEDY
            kind = kind if request.top_logprobs is None else LOGPROBS
            state = RequestState(next(self._ids), request, on_output, settings, kind)
            self._states[state.id] = state
            self._commands.put(Submit(state))
        return state.id

    def cancel(self, id: int) -> None:
        """Ends a request with "cancelled", unless it is finished."""
        self._commands.put(Cancel(id))

    def prepare_masks(self) -> None:
        """Compiles the program that every request with a grammar needs; any thread may wait."""
        with self._compiling_masks:
            self.programs.compile(self.programs.first_masked())

    def prepare(self) -> None:
        """Compiles the first programs, allocates the state, and measures missing costs."""
        if self._thread is None and self._batch.is_lost():
            for name in self.programs.first():
                self.programs.compile(name)
            self._batch.reset()
            self._pacing.add_dummy_runs(self.programs.ready)
            while self._dummy_run():
                pass

    def start(self) -> None:
        """Calls `prepare` and starts the engine's thread, unless the thread was started before."""
        self.prepare()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
            self._thread.start()

    def close(self, drain_s: float = 0.0) -> None:
        """Accepts no more requests; cancels those that are unfinished after `drain_s` seconds.

        Blocks until every request has its last output; returns at once if `on_output` calls this
        method. A running compilation is left to `session.background`.
        """
        with self._lock:
            self._closed = True
        self._commands.put(Close(time.monotonic() + drain_s))
        if self._thread is None:
            self.abandon("the engine was closed before its start")
        elif self._thread is not threading.current_thread():
            self._thread.join(drain_s + STUCK_S)
            if self._thread.is_alive():
                self.abandon("the device does not respond")
        self.session.background.drop()

    def abandon(self, line: str) -> None:
        """Ends all requests with the error `line`, before the process exits.

        Works even while the engine's thread waits for a device that does not respond.
        """
        with self._lock:
            self._closed = True
        for state in list(self._states.values()):
            self._send(state, RequestOutput([], finish_reason="error", error=line))
        self._commands.put(Close(time.monotonic()))

    @property
    def healthy(self) -> bool:
        """False without the engine's thread, and after MAX_FAILURES consecutive failed steps."""
        runs = self._thread is not None and self._thread.is_alive()
        return runs and self._failures_in_a_row < MAX_FAILURES

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        running = list(self._scheduler.running)
        held = sum(state.num_computed + len(state.answer) for state in running)
        levels = max(shape.levels for shape in self.session.ways)
        return EngineStats(
            running=len(running),
            waiting=max(0, len(self._states) - len(running)),
            slots=self.num_slots,
            cache_usage=held / (self.num_slots * self.programs.num_rows),
            kept_bytes=self._slots.num_kept * self.programs.slot_bytes,
            accepted_tokens=self._accepted.total(),
            accepted_by_position=tuple(self._accepted[i] for i in range(levels - 1)),
            rounds_by_shape=dict(self._rounds),
            finished=dict(self._finished),
            programs=len(self.programs.ready),
            **self._counts,
        )

    def _checked(self, request: Request) -> RowSettings:
        """The settings of a request; raises InputError."""
        # A scored prompt needs one cache row more.
        prompt, new = request.prompt_ids, request.max_new_tokens or int(request.prompt_logprobs)
        self.session.check([prompt], new)
        sampling, total = request.sampling.seeded(), len(prompt) + new
        if total > self.max_tokens:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and {new} are to follow, but an answer with "
                f"its prompt has {self.max_tokens} at most; shorten one of the two"
            )
        vocab_size = self.session.target.config.vocab_size
        logprobs.check(request.top_logprobs, vocab_size)
        bitmask_W = request.grammar and request.grammar.bitmask_W
        return row_settings(sampling, len(prompt), total, request.stop_ids, vocab_size, bitmask_W)

    # ---- commands ----

    def _run(self) -> None:
        while True:
            try:
                if not self._take_commands():
                    return
                self._step()
            except Exception as error:  # of any kind: the thread must not end
                self._batch.drop()
                self._fail(error, list(self._scheduler.waiting)[: not self._scheduler.running])

    def _take_commands(self) -> bool:
        """Executes all commands, and waits if there is nothing to do; False after the last one."""
        is_busy = self._scheduler.running or self._scheduler.waiting or self._call
        if not is_busy and self._ends_at == math.inf and self._commands.empty():
            if not self._dummy_run():
                self._compile_next(self.programs.later())
                self._execute(self._commands.get())
        while not self._commands.empty():
            self._execute(self._commands.get())
        if self._ends_at == math.inf or (self._states and time.monotonic() < self._ends_at):
            return True
        for state in list(self._states.values()):
            self._finish(state, RequestOutput([], finish_reason="cancelled"))
        return False

    def _execute(self, command: Command) -> None:
        match command:
            case Submit(state):
                self._scheduler.add(state)
            case Cancel(id):
                if state := self._states.get(id):
                    self._finish(state, RequestOutput([], finish_reason="cancelled"))
            case Close(at):
                self._ends_at = min(self._ends_at, at)
            case Compiled(name):
                self._is_compiling = False
                self._pacing.add_dummy_runs({name} & self.programs.ready.keys())

    def _finish(self, state: RequestState, output: RequestOutput) -> None:
        """Frees the slot of a request in any phase, and sends its last output."""
        self._scheduler.finish(state)
        self._send(state, output)

    def _send(self, state: RequestState, output: RequestOutput) -> None:
        """Sends an output, unless `abandon`, in another thread, has sent the last one."""
        with self._lock:
            if state.id not in self._states:
                return
            if output.finish_reason:
                del self._states[state.id]
                self._finished[output.finish_reason] += 1
            try:
                state.on_output(output)
            except Exception:  # a fault of one client, which must not end other requests
                logging.getLogger(__name__).exception("on_output failed")

    # ---- a step ----

    def _step(self) -> None:
        """Sends the calls of this step to the device, then reads those of the previous step."""
        if self._scheduler.has_prefill() and self._batch.is_lost():
            self._batch.reset()
        chunks, self._chunks = self._chunks, []
        for chunk in self._scheduler.next_prefill():
            try:
                self._chunks.append((chunk, self._batch.prefill(chunk)))
            except Exception as error:  # loses one request, unless it loses the state
                self._fail(error, [chunk.state])
                break
        call, states = self._call, self._scheduler.decoding()
        # The masks of a call follow from all tokens before it.
        masked = any(state.row.matcher is not None for state in states)
        self._call = self._decode(states) if states and not masked else None
        if call is not None:
            self._read_decode(call)
        if masked or any(chunk.is_last for chunk, _ in self._chunks):
            # First tokens are read in the same step, while the device runs the decode call.
            chunks, self._chunks = chunks + self._chunks, []
        for chunk, report in chunks:
            self._read_prefill(chunk, report)
        if masked and (states := self._scheduler.decoding()):
            self._call = self._decode(states)
            if not self._scheduler.has_prefill():
                self._batch.verify(self._call)
        if self._scheduler.running and self._dummy_run() and self._call is not None:
            self._call.is_clean = False

    def _decode(self, states: Sequence[RequestState]) -> DecodeCall:
        """Sends a decode call for all requests in phase DECODE."""
        rounds = ROUNDS_BESIDE_PREFILL if self._scheduler.has_prefill() else ROUNDS
        if self._scheduler.waiting:  # the call ends when a slot may become free
            left = min(state.request.max_new_tokens - len(state.answer) for state in states)
            rounds = max(1, min(rounds, left))
        choice = self._pacing.choose(states, rounds)
        self._compile_next(choice.missing)
        call = self._batch.decode(states, choice, self._slots.shortest())
        call.is_clean &= not (self._chunks or self._is_compiling or self._compiling_masks.locked())
        return call

    def _read_decode(self, call: DecodeCall) -> None:
        """Waits for a decode call and sends its tokens to the clients."""
        outputs = self._batch.read(call)
        self._failures_in_a_row = 0
        now = time.perf_counter()
        seconds, self._read_at = now - max(self._read_at, call.sent_at), now
        call.is_clean &= not (self._is_compiling or self._compiling_masks.locked())
        self._pacing.record(call, outputs, seconds)
        self._rounds[call.choice.name.shape] += max(len(each.output.rounds) for each in outputs)
        for each in outputs:
            for committed, drafted in each.output.rounds:
                if drafted:
                    self._counts.update(drafts=1, drafted_tokens=drafted)
                    self._accepted.update(range(committed - 1))
            self._receive(each.state, each.output, each.is_done)

    def _read_prefill(self, chunk: PrefillChunk, report: PrefillReport) -> None:
        """Waits for a chunk; sends the prompt's log-probabilities, and the first token."""
        state, request = chunk.state, chunk.state.request
        if state.id not in self._states:  # its report may be lost with the state
            return
        if chunk.is_first and self._slots.reuses and not request.prompt_logprobs:
            self._counts.update(prefix_lookup_tokens=state.prompt_length, prefix_tokens=chunk.start)
        self._counts["prompt_tokens"] += state.prompt_length * chunk.is_last
        report, scored = jax.device_get(report), []
        if request.max_new_tokens <= 1:  # otherwise a decode call shows success
            self._failures_in_a_row = 0
        if (found := report.prompt_logprobs) is not None:
            begin = chunk.begin(found.own_BC.shape[1], self.programs.num_rows)
            new = slice(chunk.start - begin, min(chunk.end, state.prompt_length - 1) - begin)
            if not (is_finite := np.isfinite(found.own_BC[0, new])).all():
                return self._fail_of_nan(state, chunk.start + 1 + int(is_finite.argmin()))
            scored = [None] if chunk.is_first else []
            scored += logprobs.as_list(found, 0, new, request.top_logprobs)
        output = RequestOutput([], prompt_logprobs=scored, num_cached=state.num_cached)
        if chunk.is_last and request.max_new_tokens:
            first = state.logprobs_of(report.logprobs, 0, 1)
            output = output._replace(token_ids=report.root_1.tolist(), logprobs=first)
        is_done = chunk.is_last and (bool(report.done_1[0]) or not request.max_new_tokens)
        self._receive(state, output, is_done)

    def _receive(self, state: RequestState, output: RequestOutput, is_done: bool) -> None:
        """Sends new tokens; the last output has the finish reason."""
        if state.id not in self._states:  # cancelled or abandoned meanwhile
            return
        length = state.length
        state.answer += output.token_ids
        self._counts["generated_tokens"] += len(output.token_ids)
        if NO_TOKEN in output.token_ids:
            self._fail_of_nan(state, length + output.token_ids.index(NO_TOKEN))
        elif fault := state.row.advance(output.token_ids):
            self._finish(state, RequestOutput.of_failure(InputError(f"its grammar: {fault}")))
        elif is_done:
            stopped = state.answer[-1:] and state.answer[-1] in state.request.stop_ids
            self._finish(state, output._replace(finish_reason="stop" if stopped else "length"))
        elif output.token_ids or output.prompt_logprobs:
            self._send(state, output)

    # ---- programs ----

    def _dummy_run(self) -> bool:
        """Runs a new program on free slots, to load or to time it; returns whether one ran.

        Beside requests, dummy runs take at most BUDGET of the time.
        """
        begin, free = time.perf_counter(), self._slots.free()
        waits = self._is_compiling or self._compiling_masks.locked() or self._closed
        waits = waits or (self._scheduler.running and begin < self._dummy_run_at)
        needed = self.programs.num_slots if self.programs.splits_slots else 1
        if waits or not self._pacing.dummy_runs or len(free) < needed or self._batch.is_lost():
            return False
        name, length = self._pacing.dummy_runs.popleft()
        rows = name.size if name.kind == "decode" else 1
        # One slot can serve all rows, so at most one cached prefix is dropped, or all if a mesh
        # splits slots.
        slots = free[: min(rows, max(needed, len(free) - self._slots.num_kept))]
        self._slots.forget(slots)
        try:
            self._pacing.record_dummy_run(name, length, self._batch.dummy_run(name, length, slots))
        except Exception as error:
            self._pacing.dummy_runs.clear()  # none is tried again
            if self._batch.is_lost():
                raise
            log_failure(logging.getLogger(__name__), "a dummy run failed", error, LOWER_MEMORY)
        now = time.perf_counter()
        self._dummy_run_at = now + (now - begin) / BUDGET
        return True

    def _compile_next(self, names: Iterable[ProgramName]) -> None:
        """Compiles the first missing program in the background, unless another is compiled."""
        submit = self.session.background.submit
        for name in names:
            if not (self._is_compiling or self._closed or name in self.programs.ready):
                self._is_compiling = submit(name, functools.partial(self._compile, name))

    def _compile(self, name: ProgramName) -> None:
        try:
            self.programs.compile(name)
        finally:
            self._commands.put(Compiled(name))

    # ---- failures ----

    def _fail(self, error: Exception, lost: list[RequestState]) -> None:
        """Ends the requests of a failed step, and all running requests if the state is lost."""
        log_failure(logging.getLogger(__name__), "a step failed", error, LOWER_MEMORY)
        if self._batch.is_lost():
            lost = [*lost, *self._scheduler.running]
            self._call, self._chunks = None, []
        self._failures_in_a_row += bool(lost)  # no request is lost by a failed dummy run
        self._counts["failures"] += bool(lost)
        for state in lost:
            self._finish(state, RequestOutput.of_failure(error))
        self._slots.clear()  # a cached prefix may be the cause

    def _fail_of_nan(self, state: RequestState, length: int) -> None:
        """Fails a request whose logits after `length` tokens are not finite."""
        error = finite.not_finite(self.session.target, "this prompt", length)
        logging.getLogger(__name__).error("a request failed: %s", error)
        self._counts["failures"] += 1
        self._finish(state, RequestOutput.of_failure(error))
        self._slots.clear()
