"""Many answers at once: texts come and go while a batch is being decoded.

    threads of clients      submit, cancel          hear(News)
                                |                      ^
                                v                      |
    the engine's thread     orders -> waiting -> reading -> seats -> news
                                                    |         |
                            chunk, chunk, first     |         |   call 1, call 2 ...
                                                    v         v
    the device      one row of its own     | prompt . .   |   | prompt . answer . root |
                                           insert ------->    | nobody                 |
                                                              | prompt . answer . root |

A turn of the thread: take orders; send one chunk of the prompt that is being read; send a call,
which is some rounds of all who sit; hear the call before it; hear a first token. So the device has
its next work before the host looks at the last, and whoever ended idles for one call.

Every text is that of `Session` without a drafter, alone and with the same seed: noise belongs to
positions, and rows know nothing of each other. A program that is not compiled yet is made in the
background while a larger one serves; the engine's thread itself never compiles. Only the first who
asks for log-probabilities waits until there is a program that gives them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from moa_jax.config import DraftShape, Sampling
from moa_jax.decode import logprobs
from moa_jax.decode.costs import Costs
from moa_jax.decode.engine import rows as device
from moa_jax.decode.engine.pace import Pace
from moa_jax.decode.engine.prefixes import Kept, Prefixes
from moa_jax.decode.engine.rows import EVERY, Kind, Live, given_of, kind_of
from moa_jax.decode.engine.seats import Flight, Heard, Seats, Text, likely_of
from moa_jax.decode.engine.shelf import Shelf, Size
from moa_jax.decode.logprobs import Likely, LogProbs
from moa_jax.decode.session import GREEDY, Session
from moa_jax.decode.vocabulary import DraftVocabulary
from moa_jax.errors import InputError
from moa_jax.pretrained import LoadedDrafter, Target


@dataclasses.dataclass(frozen=True)
class Request:
    """One answer that is wanted."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]  # kept in the answer, as `Session` keeps them
    sampling: Sampling = GREEDY  # with its own seed
    top_logprobs: int | None = None  # None: none; 0: of the chosen tokens; k: and the k likeliest


class News(NamedTuple):
    """What a request's listener hears; the last of its news has a `finish`."""

    token_ids: list[int]  # newly committed, in order
    logprobs: Sequence[Likely] = ()  # of each token, if they were asked for
    finish: str = ""  # "", "stop", "length", "cancelled" or "error"
    error: str = ""  # a line for people, with "error"


CANCELLED = News([], finish="cancelled")


class Ticket(NamedTuple):
    """A request that was taken."""

    id: int


class Full(InputError):
    """As many requests wait as may."""


class Closed(InputError):
    """The engine takes no requests any more."""


class Load(NamedTuple):
    """What an engine does at the moment, and what it has done since it began."""

    running: int  # requests that are read or decoded
    waiting: int
    slots: int
    rows_used: float  # share of the rows that all slots may have
    prompt_tokens: int
    generated_tokens: int
    drafts: int  # rounds of a row that drafted
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    rounds_by_way: dict[DraftShape, int]  # of whole batches
    prefix_lookups: int
    prefix_hits: int
    prefix_tokens: int  # that were not read again
    finished: dict[str, int]  # requests by how they ended
    failures: int  # of passes, and of programs that somebody waited for
    compiled: int  # programs


@dataclasses.dataclass(eq=False)
class _Job:
    """A request under way."""

    id: int
    request: Request
    hear: Callable[[News], None]
    text: Text


@dataclasses.dataclass(eq=False)
class _Reading:
    """The prompt that is being read, in a row of its own."""

    job: _Job
    live: Live
    rows: int
    left: int  # tokens


class _First(NamedTuple):
    """A first token that was asked for."""

    job: _Job
    root_1: jax.Array
    done_1: jax.Array
    logprobs: LogProbs | None


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
    ) -> None:
        """Room for `num_slots` answers at once, of at most `max_tokens` tokens with their prompts.

        Pair, `shape`, `ways`, `costs`, `vocabulary` and `chunk` are those of `Session`.
        `prefix_bytes` bounds what is kept of texts for prompts that begin alike; None is half of
        what all slots take, and 0 keeps nothing. Raises InputError for what cannot be.
        """
        self.session = Session(
            target, drafter, shape, ways=ways, costs=costs, vocabulary=vocabulary, chunk=chunk
        )
        positions = target.config.max_position_embeddings
        if not 1 < max_tokens <= positions:
            raise InputError(
                f"max_tokens is {max_tokens}: choose from 2 to {positions}, the target's positions"
            )
        if num_slots < 1:
            raise InputError(f"num_slots is {num_slots}: choose at least 1")
        self.num_slots, self.max_tokens, self.max_waiting = num_slots, max_tokens, max_waiting
        vocab_size = target.config.vocab_size
        self._nobody = given_of(GREEDY, 0, 0, (), vocab_size)
        blank = lambda slots, kind: device.together([self._nobody] * slots, kind)  # noqa: E731
        self._draft_rows = self.session.room.draft_rows
        self.shelf = Shelf(self.session, num_slots, max_tokens + self._draft_rows, blank)
        behind = self.session.most_behind
        self._seats = Seats(self.shelf, self._nobody, self._draft_rows, behind)
        self._pace = Pace(self.session.chooser, costs, self.session.shape)
        if prefix_bytes is None:
            prefix_bytes = self.shelf.num_bytes // 2
        self._prefixes = Prefixes(prefix_bytes)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the two below
        self._num_waiting, self._closed = 0, False
        self._jobs: dict[int, _Job] = {}  # all that have not ended
        self._waiting: deque[_Job] = deque()
        self._hopeless: dict[Kind, Exception] = {}  # kinds whose program could not be made
        self._reading: _Reading | None = None
        self._flight: Flight | None = None
        self._firsts: list[_First] = []
        self._heard_at = 0.0  # when a call was last heard
        self._read_since = False  # whether a chunk was sent since the last call
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._rounds: Counter[DraftShape] = Counter()
        self._accepted = [0] * (max(way.levels for way in self.session.ways) - 1)
        self._thread: threading.Thread | None = None
        self._stopping = False

    # ---- for any thread ----

    def submit(self, request: Request, hear: Callable[[News], None]) -> Ticket:
        """Takes a request, whose news the engine's thread tells `hear`, which must not block.

        It returns at once, however busy the device is.
        Each request that was taken hears exactly one News with a `finish`, the last. Raises
        InputError for a request that cannot be answered, Full where too many wait, and Closed.
        """
        text = self._text_of(request)
        with self._lock:
            if self._closed:
                raise Closed("the server is stopping: ask another one, or later")
            if self._num_waiting >= self.max_waiting + self.num_slots - self._num_running():
                raise Full(f"{self._num_waiting} requests are waiting already: try again later")
            self._num_waiting += 1
            job = _Job(next(self._ids), request, hear, text)
            self._orders.put(functools.partial(self._enter, job))
        return Ticket(job.id)

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request, which hears "cancelled" unless it ended before."""
        self._orders.put(functools.partial(self._cancel, ticket.id))

    def start(self) -> None:
        """Starts the engine's thread, after `prepare`."""
        self.prepare()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def prepare(self) -> None:
        """Compiles what serves every request, so that the engine's thread never has to.

        That is all slots with the longest caches and with the shortest, since what stands in until
        more is there should not be much slower; and a short, greedy text alone. One thing is made
        when it is first asked for: until then calls cannot give log-probabilities.
        """
        shelf, greedy = self.shelf, kind_of(GREEDY)
        for size in (shelf.largest, Size(shelf.slots[-1], shelf.rows[0])):
            shelf.make_size(size, EVERY)
            shelf.make_size(size, greedy)
        shelf.make_size(Size(1, shelf.rows[0]), greedy)

    def close(self, drain_s: float = 0.0) -> None:
        """Takes no more requests; those that have not ended after `drain_s` hear "cancelled"."""
        with self._lock:
            self._closed = True
        end = time.monotonic() + drain_s
        while (self._num_waiting or self._jobs) and time.monotonic() < end:
            time.sleep(0.01)
        self._orders.put(self._stop)
        if self._thread is None:
            self._run()
        else:
            self._thread.join()
        self.session.background.stop()

    def load(self) -> Load:
        """A snapshot for people and metrics."""
        counts, texts = self._counts, self._seats.texts
        rows = sum(len(text.tokens) for text in texts)
        return Load(
            running=self._num_running(),
            waiting=self._num_waiting,
            slots=self.num_slots,
            rows_used=rows / (self.num_slots * self.shelf.largest.rows),
            prompt_tokens=counts["prompt_tokens"],
            generated_tokens=counts["generated_tokens"],
            drafts=counts["drafts"],
            drafted_tokens=counts["drafted_tokens"],
            accepted_tokens=sum(self._accepted),
            accepted_by_position=tuple(self._accepted),
            rounds_by_way=dict(self._rounds),
            prefix_lookups=counts["prefix_lookups"],
            prefix_hits=counts["prefix_hits"],
            prefix_tokens=counts["prefix_tokens"],
            finished=dict(self._finished),
            failures=counts["failures"],
            compiled=len(self.shelf),
        )

    def _num_running(self) -> int:
        return len(self._seats.texts) + (self._reading is not None)

    def _text_of(self, request: Request) -> Text:
        """The request as the thread needs it; raises InputError for one that cannot be."""
        prompt, new = request.prompt_ids, request.max_new_tokens
        self.session.check([prompt], new)
        total = len(prompt) + new
        if total > self.max_tokens:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and {new} are to follow, but an answer with "
                f"its prompt has {self.max_tokens} at most: shorten one of the two"
            )
        vocab_size = self.session.target.config.vocab_size
        given = given_of(request.sampling, len(prompt), total, request.stop_ids, vocab_size)
        logprobs.check(request.top_logprobs, vocab_size)
        kind = kind_of(request.sampling, request.top_logprobs is not None)
        return Text(list(prompt), total, given, kind, request.top_logprobs, surely=len(prompt))

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
        try:
            self._read_on()
        except Exception as error:  # the prompt's row is lost, and no other
            reading, self._reading = self._reading, None
            if reading is None:
                raise
            self._counts["failures"] += 1
            self._prefixes.clear()  # the fault may be in what was copied
            logging.getLogger(__name__).exception("reading a prompt failed")
            self._end(reading.job, _error(error))
        sent = self._send()
        heard, self._flight = self._flight, sent
        if heard is not None:
            self._hear(heard)
        self._hear_firsts()

    def _take_orders(self) -> None:
        """Does what was ordered; waits for an order where there is nothing else to do."""
        can_read = self._reading is not None or self._next() is not None
        if not (self._flight or self._seats.texts or self._firsts or can_read):
            self._orders.get()()
        while not self._stopping:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            order()

    def _enter(self, job: _Job) -> None:
        self._jobs[job.id] = job
        self._waiting.append(job)
        served = job.text.kind.in_any_company
        if served in self._hopeless:
            self._end(job, _error(self._hopeless[served]))
        elif not self.shelf.serves(self.shelf.largest, served):
            make = self.shelf.make_call
            make = functools.partial(make, self.shelf.largest, self.shelf.own, served)
            self._order(make, functools.partial(self._give_up, served))

    def _give_up(self, served: Kind, error: Exception) -> None:
        """Ends those who wait for a program that could not be made; it is not tried again."""
        self._counts["failures"] += 1
        self._hopeless[served] = error
        for job in [job for job in self._waiting if job.text.kind.in_any_company == served]:
            self._end(job, _error(error))

    def _cancel(self, id: int) -> None:
        if job := self._jobs.get(id):
            self._end(job, CANCELLED)

    def _stop(self) -> None:
        self._stopping = True
        for job in list(self._jobs.values()):
            self._end(job, CANCELLED)

    def _fail(self, error: Exception) -> None:
        """A pass has failed: those who sit are lost with the state, and the others go on."""
        logging.getLogger(__name__).error("a pass failed", exc_info=error)
        self._counts["failures"] += 1
        lost = [*self._seats.texts, *(first.job.text for first in self._firsts)]
        self._seats.reset()
        self._prefixes.clear()
        self._flight, self._firsts = None, []
        for job in list(self._jobs.values()):
            if any(job.text is text for text in lost):
                self._end(job, _error(error))

    def _end(self, job: _Job, news: News) -> None:
        """Tells the last news of a request, wherever it is."""
        if self._jobs.pop(job.id, None) is None:
            return
        if job in self._waiting:
            self._waiting.remove(job)
            self._leaves_waiting()
        if self._reading is not None and self._reading.job is job:
            self._reading = None
        self._seats.leave(job.text)
        self._finished[news.finish] += 1
        self._tell(job, news)

    def _tell(self, job: _Job, news: News) -> None:
        self._counts["generated_tokens"] += len(news.token_ids)
        try:
            job.hear(news)
        except Exception:  # a listener's fault, of which the others must not suffer
            logging.getLogger(__name__).exception("a listener failed")

    def _leaves_waiting(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    # ---- reading prompts ----

    def _next(self) -> _Job | None:
        """The first who waits and could be read now: there is a seat, and a program for it."""
        if len(self._seats.texts) >= self.num_slots:
            return None
        largest = self.shelf.largest
        serves = lambda kind: self.shelf.serves(largest, kind.in_any_company)  # noqa: E731
        able = (job for job in self._waiting if serves(job.text.kind))
        return next(able, None)

    def _read_on(self) -> None:
        """Sends one chunk of a prompt; after its last, the text takes a seat."""
        if self._reading is None:
            job = self._next()
            if job is None:
                return
            self._waiting.remove(job)
            self._leaves_waiting()
            self._reading = _Reading(job, None, 0, 0)
            self._begin(self._reading)
        reading, text = self._reading, self._reading.job.text
        prompt = reading.job.request.prompt_ids
        chunk = self.shelf.chunk(reading.rows, reading.left)
        length_1 = np.array([len(prompt)], np.int32)
        name = ("read", reading.rows, chunk)
        reading.live, hidden_1D = self.shelf.run(name, reading.live, length_1)
        reading.left -= min(chunk, reading.left)
        self._read_since = True
        if reading.left:
            return
        kind = self.shelf.kind_of_first(reading.rows, text.kind)
        given = device.together([text.given], kind)
        found = self.shelf.run(("first", reading.rows, kind), reading.live, hidden_1D, given)
        if kind != text.kind:
            self._order(functools.partial(self.shelf.make_first, reading.rows, text.kind))
        reading.live, *first = found
        self._counts["prompt_tokens"] += len(prompt)
        text.known = len(prompt)
        self._keep(prompt, reading.live, reading.rows)
        self._reading = None
        self._firsts.append(_First(reading.job, *first))
        self._seats.enter(reading.live, reading.rows, text)

    def _begin(self, reading: _Reading) -> None:
        """A row for the prompt, with what a kept text that begins alike has of it."""
        prompt = reading.job.request.prompt_ids
        rows = self.shelf.row_size(len(prompt) + 1 + self._draft_rows)
        kept, common = self._prefixes.longest(prompt[:-1])  # what its last token says is needed
        self._counts["prefix_lookups"] += self._prefixes.most_bytes > 0
        if kept is not None:
            live = self.shelf.run(("resized", kept.rows, rows), kept.live)
            self._counts["prefix_hits"] += 1
            self._counts["prefix_tokens"] += common
        else:
            live, common = self.shelf.run(("empty", Size(1, rows))), 0
        tokens_1C = np.zeros((1, rows + 1), np.int32)
        tokens_1C[0, : len(prompt)] = prompt
        length_1 = np.array([common], np.int32)
        reading.live = self.shelf.run(("restart", rows), live, tokens_1C, length_1)
        reading.rows, reading.left = rows, len(prompt) - common

    def _keep(self, tokens: Sequence[int], live: Live, rows: int) -> None:
        """Keeps the caches of a text, in as few rows as they need."""
        if not self._prefixes.wants(tokens):
            return
        fewer = self.shelf.row_size(len(tokens) + 1)
        if fewer < rows:
            live, rows = self.shelf.run(("resized", rows, fewer), live), fewer
        self._prefixes.keep(Kept(np.array(tokens, np.int32), live, rows))

    # ---- decoding ----

    def _send(self) -> Flight | None:
        """Sends a call for all who sit, and wishes for the programs that would serve better."""
        if not self._seats.texts:
            return None
        programs = self._seats.ready()
        hurry = self._reading is not None or self._next() is not None
        program, rounds = self._pace.choose(self._seats.size.slots, programs, hurry)
        self._wish(programs)
        flight = self._seats.send(program, rounds)
        flight.read_before, self._read_since = self._read_since, False
        return flight

    def _hear(self, flight: Flight) -> None:
        """Tells what a call has brought, as soon as it is there."""
        heard, turned = self._seats.hear(flight)
        now = time.perf_counter()
        seconds, self._heard_at = now - max(self._heard_at, flight.sent), now
        if flight.alone and not flight.read_before:
            self._pace.took(flight.program, turned, seconds)
        elif flight.read_before:
            self._pace.took_with_chunk(flight.program, turned, seconds)
        self._rounds[flight.way] += turned
        accepted = []
        jobs = {id(job.text): job for job in self._jobs.values()}
        for each in heard:
            self._count(each)
            rounds = each.rounds[: len(each.rounds) - each.done]
            accepted += [committed - 1 for committed, _ in rounds]
            job, news = jobs[id(each.text)], News(each.tokens, each.logprobs)
            if each.done:
                self._finish(job, news)
            elif each.tokens:
                self._tell(job, news)
        self._pace.heard(flight.way, accepted, turned)

    def _hear_firsts(self) -> None:
        firsts, self._firsts = self._firsts, []
        for job, *first in firsts:
            root_1, done_1, found = jax.device_get(first)
            if job.text.ended:
                continue
            news = News(root_1.tolist(), likely_of(job.text, found, 0, 1))
            job.text.tokens += news.token_ids
            if done_1[0]:
                self._finish(job, news)
            else:
                self._tell(job, news)

    def _finish(self, job: _Job, news: News) -> None:
        """The end of an answer that was not cut short; its text is kept for prompts like it."""
        text = job.text
        stopped = text.tokens[-1] in job.request.stop_ids
        if self._prefixes.wants(text.tokens[: text.known]):
            live, rows = self._seats.copy(text)
            self._keep(text.tokens[: text.known], live, rows)
        self._end(job, news._replace(finish="stop" if stopped else "length"))

    def _count(self, heard: Heard) -> None:
        for committed, drafted in heard.rounds:
            if drafted:
                self._counts["drafts"] += 1
                self._counts["drafted_tokens"] += drafted
                for position in range(committed - 1):
                    self._accepted[position] += 1

    # ---- programs that are not there yet ----

    def _wish(self, programs: dict[DraftShape, tuple[Size, DraftShape, Kind]]) -> None:
        """Orders what would serve better, in the background: sizes, then kinds and ways."""
        waiting = len(self._waiting) + (self._reading is not None)
        wanted, larger = self._seats.wishes(waiting)
        size, kind, shelf = self._seats.size, self._seats.kind, self.shelf
        self._order(functools.partial(shelf.make_size, wanted, kind))
        if size == wanted:
            for way in (shelf.own, *shelf.ways):
                if way not in programs or programs[way][2] != kind:
                    self._order(functools.partial(shelf.make_call, size, way, kind))
            self._order(functools.partial(shelf.make_call, size, shelf.own, EVERY))
        self._order(functools.partial(shelf.make_size, larger, kind))

    def _order(
        self, job: functools.partial[None], failed: Callable[[Exception], None] | None = None
    ) -> None:
        """Has something made in the background, once.

        With `failed` somebody waits for it: it is made next, and the engine's thread hears of a
        failure.
        """

        def do() -> None:
            try:
                job()
            except Exception as error:
                if failed is not None:
                    self._orders.put(functools.partial(failed, error))
                raise
            self._orders.put(lambda: None)  # somebody may have waited for it

        name = (job.func.__name__, *job.args)
        self.session.background.submit(name, do, next=failed is not None)


def _error(error: Exception) -> News:
    """The end of a request, in a line for people who cannot mend it."""
    line = f"the engine failed at this request: {type(error).__name__}: {error}".splitlines()[0]
    return News([], finish="error", error=line)
