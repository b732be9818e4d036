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

In float32 the tokens of a request equal those of a `Session` without a drafter that decodes the
request alone with the same seed, unless candidates are sampled: noise depends on the position, and
rows do not depend on each other.

The engine's thread never compiles. The programs without which a request could not be served are
compiled before the start. The others are compiled in the background, in the order of need, while
no request runs or if the present requests would use them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode import finite, logprobs
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.decode.logprobs import LogProbs
from moa_jax.decode.programs import cache_rows_for
from moa_jax.decode.session import Session
from moa_jax.drafters.api import NO_TOKEN
from moa_jax.engine import device_ops
from moa_jax.engine.batch import DecodeBatch, DecodeCall, token_logprobs
from moa_jax.engine.compile_queue import CompileQueue
from moa_jax.engine.device_ops import PrefillReport
from moa_jax.engine.multihost import Followers, LeadingPrograms
from moa_jax.engine.pacing import Pacing
from moa_jax.engine.prefix_cache import SlotTable
from moa_jax.engine.program_cache import ProgramCache, ProgramName, kind_of
from moa_jax.engine.requests import (
    CANCELLED,
    EngineClosed,
    OnOutput,
    Phase,
    QueueFull,
    Request,
    RequestHandle,
    RequestOutput,
    RequestState,
    failed,
)
from moa_jax.engine.scheduler import PrefillChunk, Scheduler
from moa_jax.engine.stats import Counters, EngineStats
from moa_jax.errors import InputError, first_line
from moa_jax.model import sharding
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.runtime import memory
from moa_jax.runtime.memory import GIB
from moa_jax.speculation.calibrate import calibrate
from moa_jax.speculation.cost_table import CostTable

MAX_FAILURES = 3  # consecutive failed steps after which the engine is unhealthy
LOWER_MEMORY = "lower --slots, --max-tokens or --prefix-bytes"
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
# Without a command, before costs are measured: a client that asks again at once does not wait.
QUIET_S = 0.25


class Submit(NamedTuple):
    """Command: a new request."""

    state: RequestState


class Cancel(NamedTuple):
    """Command: end a request with "cancelled"."""

    id: int


class Remove(NamedTuple):
    """Command: free the slot of a request whose last output is sent."""

    state: RequestState


class Close(NamedTuple):
    """Command: cancel unfinished requests at a time of `time.monotonic`, then end the thread."""

    at: float


class Wake(NamedTuple):
    """Command: none; wakes the thread after a compilation."""


Command = Submit | Cancel | Remove | Close | Wake


@dataclasses.dataclass
class InFlightStep:
    """The calls of a step that are sent and not read."""

    prefills: list[tuple[PrefillChunk, PrefillReport]] = dataclasses.field(default_factory=list)
    decode: DecodeCall | None = None


class Engine:
    """Serves many requests with one pair; all public methods are thread-safe."""

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
        `on_calibrated` is called after costs are measured. Free slots keep their tokens as a prefix
        cache; `prefix_bytes` is the size of additional slots for it, by default that of half of
        `num_slots`, and 0 turns the cache off. With `followers` the mesh spans several processes,
        and this process is process 0. Raises InputError for invalid settings, and if the memory is
        too small.
        """
        self.session = Session(
            target, drafter, shape, ways=ways, costs=costs, vocabulary=vocabulary, chunk=chunk
        )
        positions = target.config.max_position_embeddings
        if not 1 < max_tokens <= positions:
            raise InputError(
                f"max_tokens is {max_tokens}; choose from 2 to {positions}, the target's positions"
            )
        if num_slots < 1:
            raise InputError(f"num_slots is {num_slots}; choose at least 1")
        sharding.warn_replicated(num_slots, self.session.mesh)
        self.num_slots, self.max_tokens, self.max_waiting = num_slots, max_tokens, max_waiting
        num_rows = cache_rows_for(max_tokens + self.session.room.draft_rows)
        make = functools.partial(LeadingPrograms, followers) if followers else ProgramCache
        one = ProgramCache(self.session, 1, num_rows, 1).state_bytes
        splits = self.session.mesh is not None and self.session.mesh.shape["data"] > 1
        num_kept = num_slots // 2 if prefix_bytes is None else prefix_bytes // one
        num_kept = 0 if splits else num_kept  # such a mesh decodes all slots in each round
        self.programs = make(self.session, num_slots + num_kept, num_rows, num_slots)
        self.memory = memory_plan(self.session, self.programs, one, num_slots)
        self._slot_bytes = one
        self._batch = DecodeBatch(self.programs)
        self._slots = SlotTable(num_slots + num_kept, reuses=prefix_bytes != 0)
        self._scheduler = Scheduler(self._slots, num_slots, self.programs.chunks[-1])
        self._pacing = Pacing(self.session.controller, self.session.costs, self.programs)
        self._on_calibrated = on_calibrated
        self._totals = Counters(max(shape.levels for shape in self.session.ways) - 1)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        wake = lambda: self._commands.put(Wake())
        self._compiler = CompileQueue(self.programs, self.session.background, wake)
        self._ids = itertools.count()
        self._lock, self._preparing = threading.Lock(), threading.Lock()
        self._closed = False
        self._states: dict[int, RequestState] = {}  # unfinished requests, by id
        self._in_flight = InFlightStep()
        self._read_at = 0.0  # when a decode call was last read
        self._failures_in_a_row = 0
        self._warm: set[ProgramName] = set()  # programs that have run
        self._unmeasurable: set[ProgramName] = set()  # programs that failed in calibration
        self._thread: threading.Thread | None = None
        self._ends_at, self._stopping = math.inf, False

    # ---- thread-safe methods ----

    def submit(self, request: Request, on_output: OnOutput, others: int = 0) -> RequestHandle:
        """Queues a request; the engine's thread calls `on_output`, which must not block.

        Returns at once. The request is accepted only if the queue has room for `others` more. Each
        accepted request gets exactly one output with a `finish_reason`, its last. Raises InputError
        for an invalid request, QueueFull and EngineClosed.
        """
        settings, sampled = self._checked(request)
        with self._lock:
            if self._closed:
                raise EngineClosed("the server is stopping: ask another one, or later")
            room = self.max_waiting + self.num_slots - len(self._states)
            if room <= others:
                raise QueueFull(f"{self._num_waiting} requests are waiting: try again later")
            state = RequestState(next(self._ids), request, on_output, settings, sampled)
            self._states[state.id] = state
            self._commands.put(Submit(state))
        return RequestHandle(state.id)

    def cancel(self, handle: RequestHandle) -> None:
        """Ends a request with "cancelled", unless it is finished."""
        self._commands.put(Cancel(handle.id))

    def prepare(self) -> None:
        """Compiles the first programs, allocates the state, and measures missing costs."""
        with self._preparing:
            if self._thread is not None or not self._batch.is_lost():
                return
            for name in self.programs.first():
                self.programs.compile(name)
            self._batch.reset()
            self._warm_up()
            self._calibrate()

    def start(self) -> None:
        """Calls `prepare` and starts the engine's thread, unless the thread was started before."""
        self.prepare()
        with self._lock:
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
        if self._thread is None:
            drain_s = 0.0
        self._commands.put(Close(time.monotonic() + drain_s))
        if self._thread is None:
            self._run()
        elif self._thread is not threading.current_thread():
            self._thread.join()
        self.session.background.drop()

    def abandon(self, line: str) -> None:
        """Ends all requests with the error `line`, before the process exits.

        Works even while the engine's thread waits for a device that does not respond.
        """
        with self._lock:
            self._closed = True
        for state in list(self._states.values()):
            if self._states.pop(state.id, None) is not None:
                self._commands.put(Remove(state))
                self._send(state, RequestOutput([], finish_reason="error", error=line))

    @property
    def healthy(self) -> bool:
        """False without the engine's thread, and after MAX_FAILURES consecutive failed steps."""
        runs = self._thread is not None and self._thread.is_alive()
        return runs and self._failures_in_a_row < MAX_FAILURES

    @property
    def _num_waiting(self) -> int:
        return max(0, len(self._states) - len(self._scheduler.running))

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        running = list(self._scheduler.running)
        held = sum(state.num_computed + len(state.answer) for state in running)
        return self._totals.snapshot(
            running=len(running),
            waiting=self._num_waiting,
            slots=self.num_slots,
            cache_usage=held / (self.num_slots * self.programs.num_rows),
            kept_bytes=self._slots.num_kept * self._slot_bytes,
            programs=len(self.programs),
        )

    def _checked(self, request: Request) -> tuple[device_ops.RowSettings, bool]:
        """The settings of a request, and whether it is sampled; raises InputError."""
        prompt, new = request.prompt_ids, request.max_new_tokens
        new = new or int(request.prompt_logprobs)  # a scored prompt needs one cache row more
        self.session.check([prompt], new)
        sampling, total = request.sampling.seeded(), len(prompt) + new
        if total > self.max_tokens:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and {new} are to follow, but an answer with "
                f"its prompt has {self.max_tokens} at most; shorten one of the two"
            )
        vocab_size = self.session.target.config.vocab_size
        rest = (len(prompt), total, request.stop_ids, vocab_size)
        settings = device_ops.row_settings(sampling, *rest)
        logprobs.check(request.top_logprobs, vocab_size)
        if request.prompt_logprobs and request.top_logprobs is None:
            raise InputError("prompt_logprobs without top_logprobs; set both, 0 for no top tokens")
        return settings, device_ops.is_sampled(request.sampling)

    # ---- commands ----

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._step()
            except Exception as error:  # of any kind: the thread must not end
                self._in_flight = InFlightStep()
                lost = self._scheduler.running or list(self._scheduler.waiting)[:1]
                self._fail(error, list(lost), state_is_lost=True)

    def _take_commands(self) -> None:
        """Executes all commands; waits for one if no request is unfinished."""
        is_idle = not (self._scheduler.running or self._scheduler.waiting or self._in_flight.decode)
        if is_idle and self._ends_at == math.inf and self._commands.empty():
            self._compiler.compile_next(() if self._closed else self.programs.later())
            try:
                self._execute(self._commands.get(timeout=QUIET_S))
            except queue.Empty:
                self._while_idle()
                self._execute(self._commands.get())
        while not self._commands.empty():
            self._execute(self._commands.get())
        if self._ends_at < math.inf and (not self._states or time.monotonic() >= self._ends_at):
            self._stopping = True
            for state in list(self._states.values()):
                self._finish(state, CANCELLED)

    def _execute(self, command: Command) -> None:
        match command:
            case Submit(state):
                if state.id in self._states:  # `abandon` may have ended the request
                    self._scheduler.add(state)
            case Cancel(id):
                if state := self._states.get(id):
                    self._finish(state, CANCELLED)
            case Remove(state):
                self._scheduler.finish(state)
            case Close(at):
                self._ends_at = min(self._ends_at, at)

    def _finish(self, state: RequestState, output: RequestOutput) -> None:
        """Sends the last output of a request and frees its slot, in any phase."""
        if self._states.pop(state.id, None) is None:
            return
        self._scheduler.finish(state)
        self._totals.finished[output.finish_reason] += 1
        self._send(state, output)

    def _send(self, state: RequestState, output: RequestOutput) -> None:
        self._totals.counts["generated_tokens"] += len(output.token_ids)
        try:
            state.on_output(output)
        except Exception:  # a fault of one client, which must not end other requests
            logging.getLogger(__name__).exception("on_output failed")

    # ---- a step ----

    def _step(self) -> None:
        """Sends the calls of this step to the device, then reads those of the previous step."""
        self._take_commands()
        if self._stopping:
            return
        if self._scheduler.has_prefill() and self._batch.is_lost():
            self._batch.reset()
        before, self._in_flight = self._in_flight, InFlightStep()
        for chunk in self._scheduler.next_prefill():
            if not self._prefill(chunk):
                break
        if states := self._scheduler.decoding():
            self._decode(states)
        if before.decode is not None:
            self._read_decode(before.decode)
        for chunk, report in before.prefills:
            self._read_prefill(chunk, report)
        # First tokens are read in the same step, while the device runs the decode call; chunks of
        # the same prompts come before them.
        chunks = self._in_flight.prefills
        num_read = max((i for i, (chunk, _) in enumerate(chunks, 1) if chunk.is_last), default=0)
        self._in_flight.prefills = chunks[num_read:]
        for chunk, report in chunks[:num_read]:
            self._read_prefill(chunk, report)

    def _prefill(self, chunk: PrefillChunk) -> bool:
        """Sends a chunk of a prompt; returns whether that worked."""
        state = chunk.state
        if chunk.is_first:
            self._count_prefix(chunk)
        try:
            if chunk.copy_from is not None:
                self._batch.copy(chunk.copy_from, state.slot, chunk.start)
            self._in_flight.prefills.append((chunk, self._batch.prefill(chunk)))
        except Exception as error:
            self._fail(error, [state])
            return False
        state.lags = self.session.catches_up
        if chunk.is_last:
            self._totals.counts["prompt_tokens"] += state.prompt_length
        return True

    def _decode(self, states: Sequence[RequestState]) -> None:
        """Sends a decode call for all requests in phase DECODE."""
        kind = kind_of(
            [state.sampled for state in states], [state.needs_logprobs for state in states]
        )
        choice = self._pacing.choose(states, kind, hurries=self._scheduler.has_prefill())
        self._compiler.compile_next(choice.missing)
        if self._scheduler.waiting:  # the call ends when a slot may become free
            choice = choice.until(min(state.num_left for state in states))
        in_batch = {state.slot for state in states}
        spare = [slot for slot in range(len(self._slots)) if slot not in in_batch]
        late = [state for state in states if state.lags] if choice.shape.num_drafted else []
        try:
            for state in late:
                self._batch.catch_up(state)
            call = self._batch.decode(choice.name, states, choice.rounds, spare, choice.costs)
        except Exception as error:  # the reports of earlier calls may be lost, too
            self._fail(error, list(states), state_is_lost=True)
            return
        if self.session.catches_up and not choice.shape.num_drafted:
            for state in states:
                state.lags, state.num_plain = True, state.num_plain + choice.rounds
        call.is_clean = not (self._in_flight.prefills or late or self._compiler.is_busy)
        self._in_flight.decode = call

    def _read_decode(self, call: DecodeCall) -> None:
        """Waits for a decode call and sends its tokens to the clients."""
        if all(state.phase is Phase.FINISHED for state in call.states):
            return
        outputs, num_rounds = self._batch.read(call)
        self._failures_in_a_row = 0
        now = time.perf_counter()
        seconds, self._read_at = now - max(self._read_at, call.sent_at), now
        call.is_clean &= not self._compiler.is_busy
        self._pacing.record(call, outputs, num_rounds, seconds)
        self._totals.rounds[call.shape] += num_rounds
        for each in outputs:
            self._totals.count(each.rounds)
            state = each.state
            if state.phase is Phase.FINISHED:
                continue
            self._receive(state, RequestOutput(each.token_ids, each.logprobs), each.is_done)

    def _read_prefill(self, chunk: PrefillChunk, report: PrefillReport) -> None:
        """Waits for a chunk; sends the prompt's log-probabilities, and the first token."""
        state, request = chunk.state, chunk.state.request
        if state.phase is Phase.FINISHED:  # its report may be lost with the state
            return
        scored = report.prompt_logprobs if request.prompt_logprobs else None
        found = report.logprobs if state.needs_logprobs else None
        found = jax.device_get((report.root_1, report.done_1, found, scored))
        root_1, done_1, root_logprobs, scored = found
        if not state.decodes:  # otherwise a decode call shows success
            self._failures_in_a_row = 0
        if scored is not None and not self._score(chunk, scored):
            return
        if chunk.is_last and request.max_new_tokens:
            output = RequestOutput(root_1.tolist(), token_logprobs(state, root_logprobs, 0, 1))
            self._receive(state, output, bool(done_1[0]))

    def _receive(self, state: RequestState, output: RequestOutput, is_done: bool) -> None:
        """Sends new tokens; the last output has the finish reason."""
        if state.id not in self._states:  # `abandon` has ended it
            return
        length = state.prompt_length + len(state.answer)
        state.answer += output.token_ids
        if NO_TOKEN in output.token_ids:
            self._fail_of_nan(state, length + output.token_ids.index(NO_TOKEN))
        elif is_done:
            stopped = state.answer[-1] in state.request.stop_ids
            self._finish(state, output._replace(finish_reason="stop" if stopped else "length"))
        elif output.token_ids:
            self._send(state, output)

    def _score(self, chunk: PrefillChunk, found: LogProbs) -> bool:
        """Sends log-probabilities of the prompt's next tokens; False if the request has ended."""
        state, length = chunk.state, chunk.state.prompt_length
        if state.id not in self._states:
            return False
        begin = chunk.begin(found.own_BC.shape[1], self.programs.num_rows)
        new = slice(max(state.num_scored, 1) - 1 - begin, min(chunk.end, length - 1) - begin)
        if not (is_finite := np.isfinite(found.own_BC[0, new])).all():
            self._fail_of_nan(state, max(state.num_scored, 1) + int(is_finite.argmin()))
            return False
        scored = logprobs.as_list(found, 0, new, state.request.top_logprobs)
        output = RequestOutput([], prompt_logprobs=scored if state.num_scored else [None, *scored])
        state.num_scored = max(state.num_scored, 1) + len(scored)
        if chunk.is_last and not state.request.max_new_tokens:
            self._finish(state, output._replace(finish_reason="length"))
            return False
        self._send(state, output)
        return True

    def _count_prefix(self, chunk: PrefillChunk) -> None:
        state, counts = chunk.state, self._totals.counts
        if self._slots.reuses and not state.request.prompt_logprobs:
            counts["prefix_lookups"] += 1
            counts["prefix_lookup_tokens"] += state.prompt_length
            counts["prefix_hits"] += chunk.start > 0
            counts["prefix_tokens"] += chunk.start

    # ---- failures ----

    def _fail(
        self, error: Exception, lost: list[RequestState], state_is_lost: bool = False
    ) -> None:
        """Ends the requests of a failed step, and all running requests if the state is lost."""
        self._log(error)
        self._failures_in_a_row += 1
        self._totals.counts["failures"] += 1
        if state_is_lost or self._batch.is_lost():
            lost = [*lost, *self._scheduler.running]
            self._batch.drop()
        for state in lost:
            self._finish(state, failed(error))
        self._slots.clear()  # a cached prefix may be the cause

    def _log(self, error: Exception) -> None:
        if OUT_OF_MEMORY in str(error):
            line = "the device is out of memory; %s: %s"
            logging.getLogger(__name__).error(line, LOWER_MEMORY, first_line(error))
        else:
            logging.getLogger(__name__).error("a step failed", exc_info=error)

    def _fail_of_nan(self, state: RequestState, length: int) -> None:
        """Fails a request whose logits after `length` tokens are not finite."""
        error = finite.not_finite(self.session.target, "this prompt", length)
        logging.getLogger(__name__).error("a request failed: %s", error)
        self._totals.counts["failures"] += 1
        self._finish(state, failed(error))
        self._slots.clear()

    # ---- idle ----

    def _while_idle(self) -> None:
        """Warms up new programs and measures missing costs, unless a compiler runs."""
        if self._closed or self._compiler.is_busy:
            return
        try:
            if self._batch.is_lost():
                self._batch.reset()
            self._warm_up()
            self._calibrate()
        except Exception as error:  # no request fails, so the engine is as healthy as before
            self._log(error)

    def _warm_up(self) -> None:
        """Runs compiled programs that have not run, until a command arrives."""
        for name in self.programs.names():
            if name in self._warm or not self._commands.empty():
                continue
            self._warm.add(name)  # also if it fails
            slots = self._slots.free()
            self._slots.forget(slots[: name[1] if name[0] == "decode" else 1])
            self._batch.warm_up(name, slots)
            if name[0] == "catch_up" and self.session.controller is not None:
                self._pacing.catch_up_ms = 1e3 * self._batch.time_catch_up(slots[0])

    def _calibrate(self) -> None:
        """Measures missing costs of compiled programs, until a command arrives."""
        names = {(name[1], name[2], length): name for name, length in self._pacing.cells()}
        names = {cell: name for cell, name in names.items() if name not in self._unmeasurable}
        if not names:
            return

        def seconds_of_a_round(*cell: Any) -> float:
            if not self._commands.empty():
                raise Interrupted
            slots = self._slots.free()[: cell[0]]
            self._slots.forget(slots)
            return self._batch.time_round(names[cell], cell[2], slots)

        has_measured = False
        for name in dict.fromkeys(names.values()):
            cells = [cell for cell, each in names.items() if each == name]
            try:
                calibrate(self._pacing.costs, cells, seconds_of_a_round)
            except Interrupted:
                break
            except Exception:
                self._unmeasurable.add(name)
                raise
            has_measured = True
        if has_measured:
            self._on_calibrated(self._pacing.costs)


class Interrupted(Exception):
    """A command arrived while costs were measured."""


class MemoryPlan(NamedTuple):
    """Bytes of an engine, summed over all devices."""

    weights: int
    slots: int
    prefix_cache: int  # slots beside those that are decoded
    scratch: int  # logits of one round, and arrays of the same size


def memory_plan(
    session: Session, programs: ProgramCache, slot_bytes: int, num_slots: int
) -> MemoryPlan:
    """Adds up the memory of an engine; raises InputError if the device has less."""
    kept = programs.state_bytes - num_slots * slot_bytes
    weights = memory.num_bytes_of(session.weights)
    plan = MemoryPlan(weights, num_slots * slot_bytes, kept, programs.scratch_bytes)
    memory.check_memory(
        sum(plan[1:]),  # weights are loaded
        f"{num_slots} slots, prefix cache and scratch beside weights of {weights / GIB:.3g} GiB",
        LOWER_MEMORY,
        session.mesh.size if session.mesh else 1,
    )
    return plan
