"""Many answers at once: texts come and go while a batch is being decoded.

    threads of clients      submit, cancel          hear(News)
                                |                      ^
                                v                      |
    the engine's thread     orders -> waiting -> reading -> seats -> news
                                                    |         |
                            chunk, chunk, first     |         |   call 1, call 2 ...
                                                    v         v
    the device      one row for each       | prompt . .   |   | prompt . answer . root |
                                           insert ------->    | nobody                 |
                                                              | prompt . answer . root |

A turn of the thread: take orders; send chunks of prompts, and a call, which is some rounds of all
who sit (decode/order.py decides on both); hear the call before it; hear first tokens. So the device
has its next work before the host looks at the last, and whoever ended idles for one call.

Every text is that of `Session` without a drafter, alone and with the same seed, in float32 and
unless candidates are drawn: noise belongs to positions, and rows know nothing of each other. A
program that is not compiled yet is made in the background while a larger one serves; the engine's
thread itself never compiles. One is made at a time, that which is wanted most just then; and while
nobody is there, what will be wanted first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence

import jax
import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode import finite, logprobs
from moa_jax.decode.auto import PLAIN, ShapeChoice
from moa_jax.decode.calls import that_tell
from moa_jax.decode.costs import Costs
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.decode.engine import rows as device
from moa_jax.decode.engine.group import Group, LeadingShelf
from moa_jax.decode.engine.load import Load, Totals
from moa_jax.decode.engine.making import Maker
from moa_jax.decode.engine.pace import Pace
from moa_jax.decode.engine.reading import Readings
from moa_jax.decode.engine.requests import (
    CANCELLED,
    Closed,
    Full,
    News,
    Request,
    Task,
    Ticket,
    failed,
)
from moa_jax.decode.engine.rows import EVERY, LIKELY, given_of, kind_of
from moa_jax.decode.engine.seats import Flight, Seats, Text, likely_of
from moa_jax.decode.engine.shelf import Shelf, Size
from moa_jax.decode.engine.wanted import wanted_now, wanted_soon
from moa_jax.decode.order import Chunk, Turns
from moa_jax.decode.session import GREEDY, Session
from moa_jax.drafters.api import NO_TOKEN
from moa_jax.errors import InputError
from moa_jax.model import sharding
from moa_jax.pretrained import LoadedDrafter, Target

MOST_FAILURES = 3  # in a row, after which the engine is not healthy
MOST_REHEARSALS = 6  # of a call, which has a sure figure after fewer
QUIET_S = 0.25  # without orders, before calls are timed: who comes then waits for one of them
MOST_READINGS = 4  # prompts that have been read in part, each in a row of its own


class Engine:
    """A pair that answers many requests at once; all methods are for any thread."""

    def __init__(
        self,
        target: Target,
        drafter: LoadedDrafter | None = None,
        shape: DraftShape | None = None,
        *,
        ways: Sequence[DraftShape] = (),
        costs: Costs | None = None,
        vocabulary: DraftVocabulary | None = None,
        num_slots: int = 16,
        max_tokens: int = 2048,
        max_waiting: int = 256,
        chunk: int | None = None,
        prefix_bytes: int | None = None,
        group: Group | None = None,
    ) -> None:
        """Room for `num_slots` answers at once, of at most `max_tokens` tokens with their prompts.

        Pair, `shape`, `ways`, `costs`, `vocabulary` and `chunk` are those of `Session`.
        `prefix_bytes` bounds what is kept of texts for prompts that begin alike; None is half of
        what all slots take, and 0 keeps nothing. With a `group` the mesh is that of several
        processes, of which this one is the first. Raises InputError for what cannot be.
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
        self._draft_rows = self.session.room.draft_rows
        num_rows = max_tokens + self._draft_rows
        self.session.check_memory(num_slots, num_rows, "--slots or --max-tokens")
        sharding.warn_replicated(num_slots, self.session.mesh)
        self.num_slots, self.max_tokens, self.max_waiting = num_slots, max_tokens, max_waiting
        vocab_size = target.config.vocab_size
        self._nobody = given_of(GREEDY, 0, 0, (), vocab_size)
        blank = lambda slots, kind: device.together([self._nobody] * slots, kind)
        is_priced = lambda slots: costs is not None and bool(costs.for_batch(slots))
        shelf = functools.partial(LeadingShelf, group) if group else Shelf
        self.shelf = shelf(self.session, num_slots, num_rows, blank, is_priced)
        first_way = lambda slots: self.shelf.ways_for(slots)[0]
        self._pace = Pace(self.session.chooser, costs, first_way)
        would_draft = lambda slots: self._pace.would_draft(slots)
        self._seats = Seats(self.shelf, self._nobody, self._draft_rows, would_draft)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the next two
        self._num_waiting, self._closed = 0, False
        self._failures_in_a_row = 0
        self._tasks: dict[int, Task] = {}  # all that have not ended
        self._waiting: deque[Task] = deque()
        self._maker = Maker(self.shelf, self.session.background, self._orders.put)
        self._totals = Totals(max(way.levels for way in self.session.ways) - 1)
        self._readings = Readings(
            self.shelf,
            self._maker,
            self._totals.counts,
            draft_rows=self._draft_rows,
            prefix_bytes=self.shelf.num_bytes // 2 if prefix_bytes is None else prefix_bytes,
        )
        self._turns = Turns[Task](
            prompts=self._to_read,
            left=self._readings.left,
            crowd=self._crowd,
            answers=self._sitting,
            begun=self._begun,
            chunk=self.shelf.chunks[-1],
            most_rows=num_slots,
        )
        self._flight: Flight | None = None
        self._heard_at = 0.0  # when a call was last heard
        self._read_since = False  # whether a chunk was sent since the last call
        self._rehearsals: Counter[Hashable] = Counter()
        self._thread: threading.Thread | None = None
        self._ends_at, self._stopping = math.inf, False

    # ---- for any thread ----

    def submit(self, request: Request, hear: Callable[[News], None], others: int = 0) -> Ticket:
        """Takes a request, whose news the engine's thread tells `hear`, which must not block.

        It returns at once, however busy the device is. So many `others` will come with it, and
        none is taken where they would not find room.
        Each request that was taken hears exactly one News with a `finish`, the last. Raises
        InputError for a request that cannot be answered, Full where too many wait, and Closed.
        """
        text = self._text_of(request)
        with self._lock:
            if self._closed:
                raise Closed("the server is stopping: ask another one, or later")
            room = self.max_waiting + self.num_slots - self._num_running() - self._num_waiting
            if room <= others:
                raise Full(f"{self._num_waiting} requests are waiting already: try again later")
            self._num_waiting += 1
            task = self._tasks[text.id] = Task(text.id, request, hear, text)
            self._orders.put(functools.partial(self._enter, task))
        return Ticket(task.id)

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request, which hears "cancelled" unless it ended before."""
        self._orders.put(functools.partial(self._cancel, ticket.id))

    def start(self) -> None:
        """Starts the engine's thread, after `prepare`, unless it was started before."""
        self.prepare()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()

    def prepare(self) -> None:
        """Compiles what serves every request, so that the engine's thread never has to.

        That is all slots with the longest caches and with the shortest, since what stands in until
        more is there should not be much slower; and a short text alone. Log-probabilities come
        from the largest. All else can wait.
        """
        shelf = self.shelf
        for size in (shelf.largest, Size(shelf.slots[-1], shelf.rows[0]), Size(1, shelf.rows[0])):
            shelf.make_size(size, EVERY)
        shelf.make_call(shelf.largest, shelf.ways_for(shelf.largest.slots)[0], LIKELY)
        shelf.make_score(shelf.rows[-1])

    def close(self, drain_s: float = 0.0) -> None:
        """Takes no more requests; those that have not ended after `drain_s` hear "cancelled".

        It returns when all have heard their last, but at once where a listener calls it. What is
        compiled at the time is left to `session.background`.
        """
        with self._lock:
            self._closed = True
        if self._thread is None:
            drain_s = 0.0  # nobody would be answered
        self._orders.put(functools.partial(self._end_by, time.monotonic() + drain_s))
        if self._thread is None:
            self._run()
        elif self._thread is not threading.current_thread():
            self._thread.join()
        self.session.background.drop()

    def abandon(self, line: str) -> None:
        """All that have not ended hear "error"; for a process that is about to end."""
        with self._lock:
            self._closed = True
        for task in list(self._tasks.values()):
            if self._tasks.pop(task.id, None) is not None:
                self._orders.put(functools.partial(self._seats.leave, task.text))
                self._tell(task, News([], finish="error", error=line))

    @property
    def healthy(self) -> bool:
        """False without the engine's thread, and after three failed passes in a row."""
        runs = self._thread is not None and self._thread.is_alive()
        return runs and self._failures_in_a_row < MOST_FAILURES

    def load(self) -> Load:
        """A snapshot for people and metrics."""
        texts = self._seats.texts
        rows = sum(len(text.tokens) for text in texts) + self._readings.num_read
        return self._totals.load(
            running=self._num_running(),
            waiting=self._num_waiting,
            slots=self.num_slots,
            rows_used=rows / (self.num_slots * self.shelf.largest.rows),
            kept_bytes=self._readings.prefixes.num_bytes,
            compiled=len(self.shelf),
        )

    def _num_running(self) -> int:
        return len(self._seats.texts) + len(self._readings)

    def _text_of(self, request: Request) -> Text:
        """The request as the thread needs it; raises InputError for one that cannot be."""
        prompt, new = request.prompt_ids, request.max_new_tokens
        new = new or int(request.prompt_logprobs)  # rows are for a prompt and a token at least
        self.session.check([prompt], new)
        sampling, total = request.sampling.seeded(), len(prompt) + new
        if total > self.max_tokens:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and {new} are to follow, but an answer with "
                f"its prompt has {self.max_tokens} at most; shorten one of the two"
            )
        vocab_size = self.session.target.config.vocab_size
        given = given_of(sampling, len(prompt), total, request.stop_ids, vocab_size)
        logprobs.check(request.top_logprobs, vocab_size)
        if request.prompt_logprobs and request.top_logprobs is None:
            raise InputError("prompt_logprobs without top_logprobs; say how many likeliest tokens")
        kind = kind_of(request.sampling, request.top_logprobs is not None)
        settings = (total, given, kind, request.top_logprobs)
        return Text(next(self._ids), list(prompt), *settings, surely=len(prompt))

    # ---- the engine's thread ----

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:  # of any kind: the thread must outlive it
                self._fail(error)

    def _turn(self) -> None:
        """Sends the device its next work, then hears of the last."""
        self._take_orders()
        if self._stopping:
            return
        sent = None
        for piece in self._turns.turn():
            if isinstance(piece, Chunk):
                self._read(piece.of)
            else:  # all who sit, since their rows are equally wide
                sent = self._send()
        heard, self._flight = self._flight, sent
        if heard is not None:
            self._hear(heard)
        self._hear_scored()
        self._hear_firsts()

    def _take_orders(self) -> None:
        """Does what was ordered; waits for an order where there is nothing else to do."""
        asked = self._flight or self._readings.scored or self._readings.firsts
        if not (asked or self._seats.texts or self._to_read()):
            self._make_ahead()
            if self._ends_at == math.inf:
                self._next_order()()
        while not self._orders.empty():  # nobody else takes any
            self._orders.get()()
        if self._ends_at < math.inf and (not self._tasks or time.monotonic() >= self._ends_at):
            self._stop()

    def _next_order(self) -> Callable[[], None]:
        """Waits for an order; where none comes for a while, calls are timed meanwhile."""
        with contextlib.suppress(queue.Empty):
            return self._orders.get(timeout=QUIET_S)
        while self._orders.empty() and self._time_next():
            pass
        return self._orders.get()

    def _enter(self, task: Task) -> None:
        if task.id in self._tasks:  # `abandon` may have ended it meanwhile
            self._waiting.append(task)

    def _cancel(self, id: int) -> None:
        if task := self._tasks.get(id):
            self._end(task, CANCELLED)

    def _end_by(self, when: float) -> None:
        self._ends_at = min(self._ends_at, when)

    def _stop(self) -> None:
        self._stopping = True
        for task in list(self._tasks.values()):
            self._end(task, CANCELLED)

    def _fail(self, error: Exception) -> None:
        """A pass has failed: those who sit are lost with the state, and the others go on."""
        lost = self._turns.lost(with_state=True)
        self._seats.reset()
        self._flight = None
        self._readings.lose_firsts()
        self._lose(lost, error)

    def _lose(self, lost: Sequence[Task], error: Exception) -> None:
        """Ends those who are lost with what has failed."""
        logging.getLogger(__name__).error("a pass failed", exc_info=error)
        self._failures_in_a_row += 1
        self._totals.counts["failures"] += 1
        self._readings.prefixes.clear()  # the fault may be in what was copied
        for task in lost:
            self._end(task, failed(error))

    def _lose_of_nan(self, task: Task, length: int) -> None:
        """Ends a request whose logits after `length` tokens are not finite."""
        error = finite.not_finite(self.session.target, "this prompt", length)
        logging.getLogger(__name__).error("an answer failed: %s", error)
        self._totals.counts["failures"] += 1
        self._readings.prefixes.clear()  # 0 * NaN of a kept row is NaN
        self._end(task, failed(error))

    def _end(self, task: Task, news: News) -> None:
        """Tells the last news of a request, wherever it is."""
        if self._tasks.pop(task.id, None) is None:
            return
        if task in self._waiting:
            self._waiting.remove(task)
            self._leaves_waiting()
        self._readings.leave(task)
        self._seats.leave(task.text)
        self._totals.finished[news.finish] += 1
        self._tell(task, news)

    def _tell(self, task: Task, news: News) -> None:
        self._totals.counts["generated_tokens"] += len(news.token_ids)
        try:
            task.hear(news)
        except Exception:  # a listener's fault, of which the others must not suffer
            logging.getLogger(__name__).exception("a listener failed")

    def _leaves_waiting(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    # ---- reading prompts ----

    def _to_read(self) -> list[Task]:
        """Those whose prompts could be read on now, or begun, in the order in which they came."""
        found = self._readings.tasks
        if self._num_running() < self.num_slots and len(found) < MOST_READINGS:
            found += self._waiting
        return sorted(found, key=lambda task: task.id)

    def _coming(self) -> int:
        """How many want a seat."""
        return len(self._waiting) + len(self._readings)

    def _crowd(self) -> tuple[int, int]:
        """How many more could sit, and how many do."""
        sitting = len(self._seats.texts)
        return min(self._coming(), self.num_slots - sitting), sitting

    def _sitting(self) -> list[Task]:
        texts = self._seats.texts
        return [task for text in texts if (task := self._tasks.get(text.id))]  # `abandon` ends some

    def _begun(self) -> list[Task]:
        """Whose texts are lost with the state."""
        firsts = [first.task for first in self._readings.firsts]
        return [*self._sitting(), *(task for task in firsts if task.request.takes_seat)]

    def _read(self, task: Task) -> None:
        try:
            self._turns.was_read(self._read_on(task))
        except Exception as error:
            if task not in self._readings:  # it was about to take a seat
                raise
            self._lose(self._turns.lost(with_state=False), error)

    def _read_on(self, task: Task) -> int:
        """Sends one chunk of a prompt, and says its size; after the last the text takes a seat."""
        is_alone = not self._seats.texts and self._coming() == 1
        tokens = len(task.text.tokens)

        def catch_ups() -> float:
            if is_alone:
                self._pace.begins(tokens)
                return math.inf if self._pace.would_draft(1) else 0
            self._pace.joins(tokens, len(self._seats.texts))
            # Among those who sit it would read as many rows of each; but they wait meanwhile
            if not self._seats.texts or task.text.unread <= self._seats.most_unread:
                return 0
            return 1 if self._seats.would_draft_with(self._coming()) else 0

        if task not in self._readings:
            self._waiting.remove(task)
            self._leaves_waiting()
        self._read_since = True
        chunk, read = self._readings.read_on(task, catch_ups)
        if read is not None and task.request.takes_seat:
            self._seats.enter(read.live, read.rows, task.text, self._coming(), read.caught_up)
        return chunk

    # ---- decoding ----

    def _send(self) -> Flight:
        """Sends a call for all who sit, and wishes for the programs that would serve better."""
        programs = self._seats.ready(self._coming())
        self._maker.make(wanted_now(self.shelf, self._seats, self._coming()))
        at_rest = not self._maker.is_busy
        slots = self._seats.size.slots
        can_read = bool(self._to_read())
        sent = self._flight and ShapeChoice(self._flight.way, self._flight.rounds)
        # What a call takes that comes behind something else cannot be told.
        can_try = at_rest and not self._read_since and not self._seats.is_disturbed
        program, rounds = self._pace.choose(
            slots, programs, can_read, can_try, sent, self._seats.most_unread
        )
        if not self._pace.is_trying:
            program = self._seats.prepared(program, programs.get(PLAIN))
            rounds = min(rounds, self._seats.rounds_to_an_end(program[1]))
        flight = self._seats.send(program, rounds)
        flight.is_trial = self._pace.is_trying
        flight.read_before, self._read_since = self._read_since, False
        flight.follows = self._flight is not None
        flight.at_rest = at_rest
        return flight

    def _hear(self, flight: Flight) -> None:
        """Tells what a call has brought, as soon as it is there."""
        heard, turned = self._seats.hear(flight)
        self._failures_in_a_row = 0
        now = time.perf_counter()
        seconds, self._heard_at = now - max(self._heard_at, flight.sent), now
        at_rest = flight.at_rest and not self._maker.is_busy
        if at_rest and flight.alone and not flight.read_before:
            self._pace.took(flight.program, turned, seconds)
        elif at_rest and flight.read_before and flight.follows and not flight.caught_up:
            self._pace.took_with_chunk(flight.program, turned, seconds)
        self._totals.rounds[flight.way] += turned
        accepted = []
        for each in heard:
            self._totals.count(each.rounds)
            if each.text.id not in flight.late:
                accepted += [committed - 1 for committed, _ in that_tell(each.rounds, each.done)]
            task, news = self._tasks.get(each.text.id), News(each.tokens, each.logprobs)
            if task is None:  # `abandon` has ended it meanwhile
                continue
            if NO_TOKEN in each.tokens:
                self._lose_of_nan(task, len(each.text.tokens) - 1)
            elif each.done:
                self._finish(task, news)
            elif each.tokens:
                self._tell(task, news)
        way = flight.way if accepted or not flight.is_trial else PLAIN
        self._pace.heard(way, accepted, turned)

    def _hear_scored(self) -> None:
        """Tells of prompts; chunks may overlap, and a part is told once."""
        while self._readings.scored:
            task, found = self._readings.scored.popleft()
            if task.text.ended:
                continue
            try:
                (begin,), found = jax.device_get(found)
            except Exception as error:  # the prompt's row is lost, and no other
                self._lose([task], error)
                continue
            length, told = len(task.request.prompt_ids), max(task.num_scored, 1)
            new = slice(told - begin, length - begin)
            if not (is_finite := np.isfinite(found.own_BC[0, new])).all():
                self._lose_of_nan(task, told + int(is_finite.argmin()))
                continue
            likely = logprobs.as_list(found, 0, new, task.request.top_logprobs)
            news = News([], prompt_logprobs=likely if task.num_scored else [None, *likely])
            task.num_scored = told + len(likely)
            self._failures_in_a_row = 0  # a prompt that is scored alone has no call either
            if task.num_scored == length and not task.request.max_new_tokens:
                self._end(task, news._replace(finish="length"))
            else:
                self._tell(task, news)

    def _hear_firsts(self) -> None:
        while self._readings.firsts:
            task, *first = self._readings.firsts[0]
            try:
                root_1, done_1, found = jax.device_get(first)
            except Exception as error:
                if task.request.takes_seat:  # its row is among the others, and all are lost
                    raise  # while it is here, where `_fail` looks for it
                self._readings.firsts.popleft()
                self._lose([task], error)
                continue
            self._readings.firsts.popleft()
            if task.text.ended:
                continue
            news = News(root_1.tolist(), likely_of(task.text, found, 0, 1))
            task.text.tokens += news.token_ids
            if NO_TOKEN in news.token_ids:
                self._lose_of_nan(task, len(task.request.prompt_ids))
            elif done_1[0]:
                self._finish(task, news)
            else:
                self._tell(task, news)

    def _finish(self, task: Task, news: News) -> None:
        """The end of an answer that was not cut short; its text is kept for prompts like it."""
        text, self._failures_in_a_row = task.text, 0  # answers of one token have no call
        stopped = text.tokens[-1] in task.request.stop_ids
        if task.request.takes_seat:
            copy = functools.partial(self._seats.copy, text)
            self._readings.keep(text.tokens[: text.surely], copy)
        self._end(task, news._replace(finish="stop" if stopped else "length"))

    # ---- programs that are not there yet, and those that nobody knows ----

    def _time_next(self) -> bool:
        """While nobody is there: times a call without a sure figure; False if there is none."""
        if self._maker.is_busy or self._ends_at < math.inf:
            return False
        calls = (each for each in self.shelf.calls() if self._rehearsals[each] < MOST_REHEARSALS)
        program = self._pace.unsure({each: each[1] for each in calls})
        if program is None:
            return False
        self._rehearsals[program] += 1
        self._pace.took(program, *self.shelf.rehearse(*program))
        return True

    def _make_ahead(self) -> None:
        """While nobody is there."""
        if not self._closed:
            self._maker.make(wanted_soon(self.shelf))
