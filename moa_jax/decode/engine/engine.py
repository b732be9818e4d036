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

Every text is that of `Session` without a drafter, alone and with the same seed: noise belongs to
positions, and rows know nothing of each other. A program that is not compiled yet is made in the
background while a larger one serves; the engine's thread itself never compiles. One is made at a
time, that which is wanted most just then; and while nobody is there, what will be wanted first.
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
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from moa_jax.config import DraftShape, Sampling
from moa_jax.decode import logprobs
from moa_jax.decode.calls import that_tell
from moa_jax.decode.costs import Costs
from moa_jax.decode.engine import rows as device
from moa_jax.decode.engine.group import Group, LeadingShelf
from moa_jax.decode.engine.pace import Pace
from moa_jax.decode.engine.prefixes import Kept, Prefixes
from moa_jax.decode.engine.rows import EVERY, LIKELY, Live, PromptLogProbs, given_of, kind_of
from moa_jax.decode.engine.seats import Flight, Heard, Seats, Text, likely_of
from moa_jax.decode.engine.shelf import Shelf, Size
from moa_jax.decode.engine.wanted import Making, name_of, wanted_now, wanted_soon
from moa_jax.decode.logprobs import Likely, LogProbs
from moa_jax.decode.mappings import has_room
from moa_jax.decode.order import Chunk, Turns
from moa_jax.decode.session import GREEDY, Session
from moa_jax.decode.vocabulary import DraftVocabulary
from moa_jax.errors import InputError
from moa_jax.model import sharding
from moa_jax.pretrained import LoadedDrafter, Target


@dataclasses.dataclass(frozen=True)
class Request:
    """One answer that is wanted."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]  # kept in the answer, as `Session` keeps them
    sampling: Sampling = GREEDY  # with its own seed
    top_logprobs: int | None = None  # None: none; 0: of the chosen tokens; k: and the k likeliest
    prompt_logprobs: bool = False  # those of the prompt as well; `max_new_tokens` may be 0 then

    @property
    def takes_seat(self) -> bool:
        """Whether rounds follow; the first token comes with the prompt."""
        return self.max_new_tokens > 1


class News(NamedTuple):
    """What a request's listener hears; the last of its news has a `finish`."""

    token_ids: list[int]  # newly committed, in order
    logprobs: Sequence[Likely] = ()  # of each token, if they were asked for
    finish: str = ""  # "", "stop", "length", "cancelled" or "error"
    error: str = ""  # a line for people, with "error"
    # Of the prompt's next tokens, if they were asked for; nothing precedes the first
    prompt_logprobs: Sequence[Likely | None] = ()


CANCELLED = News([], finish="cancelled")
MOST_REHEARSALS = 4  # of a call, which has a figure after fewer; answers make it a sure one
MOST_READINGS = 4  # prompts that have been read in part, each in a row of its own


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
    rows_used: float  # share of the rows that all slots may have, by those who are running
    kept_bytes: int  # of texts for prompts that begin alike; whoever needs it gets their room
    prompt_tokens: int
    generated_tokens: int
    drafts: int  # rounds of a row that drafted
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    rounds_by_way: dict[DraftShape, int]  # of whole batches
    prefix_lookups: int
    prefix_lookup_tokens: int  # of prompts that were looked up
    prefix_hits: int
    prefix_tokens: int  # that were not read again
    finished: dict[str, int]  # requests by how they ended
    failures: int  # of passes
    compiled: int  # programs


@dataclasses.dataclass(eq=False)
class _Job:
    """A request under way."""

    id: int
    request: Request
    hear: Callable[[News], None]
    text: Text
    num_scored: int = 0  # tokens of the prompt whose log-probabilities were told


@dataclasses.dataclass(eq=False)
class _Reading:
    """A prompt that has been read in part, in a row of its own."""

    job: _Job
    live: Live
    rows: int
    left: int  # tokens


class _Scored(NamedTuple):
    """Log-probabilities of a chunk of a prompt that were asked for."""

    job: _Job
    found: PromptLogProbs


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
                f"max_tokens is {max_tokens}: choose from 2 to {positions}, the target's positions"
            )
        if num_slots < 1:
            raise InputError(f"num_slots is {num_slots}: choose at least 1")
        sharding.notice_copies(num_slots, self.session.mesh)
        self.num_slots, self.max_tokens, self.max_waiting = num_slots, max_tokens, max_waiting
        vocab_size = target.config.vocab_size
        self._nobody = given_of(GREEDY, 0, 0, (), vocab_size)
        blank = lambda slots, kind: device.together([self._nobody] * slots, kind)  # noqa: E731
        self._draft_rows = self.session.room.draft_rows
        is_priced = lambda slots: costs is not None and bool(costs.for_batch(slots))  # noqa: E731
        num_rows = max_tokens + self._draft_rows
        shelf = functools.partial(LeadingShelf, group) if group else Shelf
        self.shelf = shelf(self.session, num_slots, num_rows, blank, is_priced)
        behind = self.session.most_behind
        self._seats = Seats(self.shelf, self._nobody, self._draft_rows, behind)
        first_way = lambda slots: self.shelf.ways_for(slots)[0]  # noqa: E731
        self._pace = Pace(self.session.chooser, costs, first_way)
        if prefix_bytes is None:
            prefix_bytes = self.shelf.num_bytes // 2
        self._prefixes = Prefixes(prefix_bytes)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the two below
        self._num_waiting, self._closed = 0, False
        self._jobs: dict[int, _Job] = {}  # all that have not ended
        self._waiting: deque[_Job] = deque()
        self._num_makings = 0  # makings that were ordered and did not end
        self._has_room = True  # for more programs
        self._readings: dict[int, _Reading] = {}  # by their jobs' ids
        self._turns = Turns[_Job](
            prompts=self._to_read,
            left=self._left,
            crowd=self._crowd,
            answers=self._sitting,
            begun=self._begun,
            chunk=self.shelf.chunks[-1],
            most_rows=num_slots,
        )
        self._flight: Flight | None = None
        self._scored: deque[_Scored] = deque()
        self._firsts: deque[_First] = deque()
        self._heard_at = 0.0  # when a call was last heard
        self._read_since = False  # whether a chunk was sent since the last call
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._rounds: Counter[DraftShape] = Counter()
        self._rehearsals: Counter[Hashable] = Counter()
        self._accepted = [0] * (max(way.levels for way in self.session.ways) - 1)
        self._thread: threading.Thread | None = None
        self._ends_at, self._stopping = math.inf, False

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
            job = self._jobs[text.id] = _Job(text.id, request, hear, text)
            self._orders.put(functools.partial(self._enter, job))
        return Ticket(job.id)

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
        for job in list(self._jobs.values()):
            if self._jobs.pop(job.id, None) is not None:
                self._tell(job, News([], finish="error", error=line))

    def load(self) -> Load:
        """A snapshot for people and metrics."""
        counts, texts = self._counts, self._seats.texts
        readings = list(self._readings.values())
        rows = sum(len(text.tokens) for text in texts)
        rows += sum(len(each.job.request.prompt_ids) - each.left for each in readings)
        return Load(
            running=self._num_running(),
            waiting=self._num_waiting,
            slots=self.num_slots,
            rows_used=rows / (self.num_slots * self.shelf.largest.rows),
            kept_bytes=self._prefixes.num_bytes,
            prompt_tokens=counts["prompt_tokens"],
            generated_tokens=counts["generated_tokens"],
            drafts=counts["drafts"],
            drafted_tokens=counts["drafted_tokens"],
            accepted_tokens=sum(self._accepted),
            accepted_by_position=tuple(self._accepted),
            rounds_by_way=dict(self._rounds),
            prefix_lookups=counts["prefix_lookups"],
            prefix_lookup_tokens=counts["prefix_lookup_tokens"],
            prefix_hits=counts["prefix_hits"],
            prefix_tokens=counts["prefix_tokens"],
            finished=dict(self._finished),
            failures=counts["failures"],
            compiled=len(self.shelf),
        )

    def _num_running(self) -> int:
        return len(self._seats.texts) + len(self._readings)

    def _text_of(self, request: Request) -> Text:
        """The request as the thread needs it; raises InputError for one that cannot be."""
        prompt, new = request.prompt_ids, request.max_new_tokens
        new = new or int(request.prompt_logprobs)  # rows are for a prompt and a token at least
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
        if request.prompt_logprobs and request.top_logprobs is None:
            raise InputError("prompt_logprobs without top_logprobs: say how many likeliest tokens")
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
        asked = self._flight or self._scored or self._firsts
        if not (asked or self._seats.texts or self._to_read()):
            self._make_ahead()
            while self._orders.empty() and self._time_next():
                pass
            if self._ends_at == math.inf:
                self._orders.get()()
        while not self._orders.empty():  # nobody else takes any
            self._orders.get()()
        if self._ends_at < math.inf and (not self._jobs or time.monotonic() >= self._ends_at):
            self._stop()

    def _enter(self, job: _Job) -> None:
        if job.id in self._jobs:  # `abandon` may have ended it meanwhile
            self._waiting.append(job)

    def _rows_for(self, job: _Job) -> int:
        """Rows to read the prompt in, and for a first round."""
        return len(job.request.prompt_ids) + 1 + self._draft_rows

    def _cancel(self, id: int) -> None:
        if job := self._jobs.get(id):
            self._end(job, CANCELLED)

    def _end_by(self, when: float) -> None:
        self._ends_at = min(self._ends_at, when)

    def _stop(self) -> None:
        self._stopping = True
        for job in list(self._jobs.values()):
            self._end(job, CANCELLED)

    def _fail(self, error: Exception) -> None:
        """A pass has failed: those who sit are lost with the state, and the others go on."""
        lost = self._turns.lost(with_state=True)
        self._seats.reset()
        self._flight = None
        self._firsts = deque(each for each in self._firsts if not each.job.request.takes_seat)
        self._lose(lost, error)

    def _lose(self, lost: Sequence[_Job], error: Exception) -> None:
        """Ends those who are lost with what has failed."""
        logging.getLogger(__name__).error("a pass failed", exc_info=error)
        self._counts["failures"] += 1
        self._prefixes.clear()  # the fault may be in what was copied
        for job in lost:
            self._end(job, _error(error))

    def _end(self, job: _Job, news: News) -> None:
        """Tells the last news of a request, wherever it is."""
        if self._jobs.pop(job.id, None) is None:
            return
        if job in self._waiting:
            self._waiting.remove(job)
            self._leaves_waiting()
        self._readings.pop(job.id, None)
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

    def _to_read(self) -> list[_Job]:
        """Those whose prompts could be read on now, or begun, in the order in which they came."""
        found = [reading.job for reading in self._readings.values()]
        if self._num_running() < self.num_slots and len(found) < MOST_READINGS:
            found += self._waiting
        return sorted(found, key=lambda job: job.id)

    def _left(self, job: _Job) -> int:
        """Tokens of its prompt that were not read."""
        reading = self._readings.get(job.id)
        return reading.left if reading else len(job.request.prompt_ids)

    def _coming(self) -> int:
        """How many want a seat."""
        return len(self._waiting) + len(self._readings)

    def _crowd(self) -> tuple[int, int]:
        """How many more could sit, and how many do."""
        sitting = len(self._seats.texts)
        return min(self._coming(), self.num_slots - sitting), sitting

    def _sitting(self) -> list[_Job]:
        texts = self._seats.texts
        return [job for text in texts if (job := self._jobs.get(text.id))]  # `abandon` ends some

    def _begun(self) -> list[_Job]:
        """Whose texts are lost with the state."""
        return [*self._sitting(), *(job for job, *_ in self._firsts if job.request.takes_seat)]

    def _read(self, job: _Job) -> None:
        try:
            self._turns.was_read(self._read_on(job))
        except Exception as error:
            if job.id not in self._readings:  # it was about to take a seat
                raise
            self._lose(self._turns.lost(with_state=False), error)

    def _read_on(self, job: _Job) -> int:
        """Sends one chunk of a prompt, and says its size; after the last the text takes a seat."""
        request, prompt, text = job.request, job.request.prompt_ids, job.text
        if job.id not in self._readings:
            self._waiting.remove(job)
            self._leaves_waiting()
            self._readings[job.id] = _Reading(job, None, 0, len(prompt))
            self._begin(self._readings[job.id])
        reading = self._readings[job.id]
        chunk = self.shelf.chunk(reading.rows, reading.left)
        name = ("read", reading.rows, chunk)
        if request.prompt_logprobs:
            chunk, name = self.shelf.chunks[-1], ("score", reading.rows)
        length_1 = np.array([len(prompt)], np.int32)
        reading.live, hidden_1D, scored = self.shelf.run(name, reading.live, length_1)
        if scored is not None:
            self._scored.append(_Scored(job, scored))
        reading.left -= min(chunk, reading.left)
        self._read_since = True
        if reading.left:
            return chunk
        if request.max_new_tokens:
            kind = self.shelf.kind_of_first(reading.rows, text.kind)
            given = device.together([text.given], kind)
            found = self.shelf.run(("first", reading.rows, kind), reading.live, hidden_1D, given)
            reading.live, *first = found
            self._firsts.append(_First(job, *first))
        self._counts["prompt_tokens"] += len(prompt)
        text.known = len(prompt)
        self._keep(prompt, reading.live, reading.rows)
        del self._readings[job.id]
        if request.takes_seat:
            self._seats.enter(reading.live, reading.rows, text, self._coming())
        return chunk

    def _begin(self, reading: _Reading) -> None:
        """A row for the prompt, with what a kept text that begins alike has of it."""
        job, kept, common = reading.job, None, 0
        prompt, rows = job.request.prompt_ids, self._rows_for(job)
        if job.request.prompt_logprobs:  # what each of its tokens says is needed
            fits, rows = self.shelf.row_size(rows), self.shelf.rows_to_score(rows)
            if fits < rows:  # those who come later find it
                self._make_next(iter([functools.partial(self.shelf.make_score, fits)]))
        else:
            rows = self.shelf.row_size(rows)
            kept, common = self._prefixes.longest(prompt[:-1])  # what its last token says is needed
            if self._prefixes.most_bytes:
                self._counts["prefix_lookups"] += 1
                self._counts["prefix_lookup_tokens"] += len(prompt)
        if kept is not None:
            live = self.shelf.run(("resized", kept.rows, rows), kept.live)
            self._counts["prefix_hits"] += 1
            self._counts["prefix_tokens"] += common
        else:
            live = self.shelf.run(("empty", Size(1, rows)))
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

    def _send(self) -> Flight:
        """Sends a call for all who sit, and wishes for the programs that would serve better."""
        programs = self._seats.ready(self._coming())
        self._make_next(wanted_now(self.shelf, self._seats, self._coming()))
        at_rest = not self._num_makings
        slots = self._seats.size.slots
        can_read = bool(self._to_read())
        program, rounds = self._pace.choose(slots, programs, can_read, at_rest)
        flight = self._seats.send(program, rounds)
        flight.read_before, self._read_since = self._read_since, False
        flight.at_rest = at_rest
        return flight

    def _hear(self, flight: Flight) -> None:
        """Tells what a call has brought, as soon as it is there."""
        heard, turned = self._seats.hear(flight)
        now = time.perf_counter()
        seconds, self._heard_at = now - max(self._heard_at, flight.sent), now
        at_rest = flight.at_rest and not self._num_makings
        if at_rest and flight.alone and not flight.read_before:
            self._pace.took(flight.program[0].slots, flight.program, turned, seconds)
        elif at_rest and flight.read_before:
            self._pace.took_with_chunk(flight.program, turned, seconds)
        self._rounds[flight.way] += turned
        accepted = []
        for each in heard:
            self._count(each)
            accepted += [committed - 1 for committed, _ in that_tell(each.rounds, each.done)]
            job, news = self._jobs[each.text.id], News(each.tokens, each.logprobs)
            if each.done:
                self._finish(job, news)
            elif each.tokens:
                self._tell(job, news)
        self._pace.heard(flight.way, accepted, turned)

    def _hear_scored(self) -> None:
        """Tells of prompts; chunks may overlap, and a part is told once."""
        while self._scored:
            job, found = self._scored.popleft()
            if job.text.ended:
                continue
            try:
                (begin,), found = jax.device_get(found)
            except Exception as error:  # the prompt's row is lost, and no other
                self._lose([job], error)
                continue
            length, told = len(job.request.prompt_ids), max(job.num_scored, 1)
            new = slice(told - begin, length - begin)
            likely = logprobs.as_list(found, 0, new, job.request.top_logprobs)
            news = News([], prompt_logprobs=likely if job.num_scored else [None, *likely])
            job.num_scored = told + len(likely)
            if job.num_scored == length and not job.request.max_new_tokens:
                self._end(job, news._replace(finish="length"))
            else:
                self._tell(job, news)

    def _hear_firsts(self) -> None:
        while self._firsts:
            job, *first = self._firsts[0]
            try:
                root_1, done_1, found = jax.device_get(first)
            except Exception as error:
                if job.request.takes_seat:  # its row is among the others, and all are lost
                    raise  # while it is here, where `_fail` looks for it
                self._firsts.popleft()
                self._lose([job], error)
                continue
            self._firsts.popleft()
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
        if job.request.takes_seat and self._prefixes.wants(text.tokens[: text.known]):
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

    # ---- programs that are not there yet, and those that nobody knows ----

    def _time_next(self) -> bool:
        """While nobody is there: times a call that has no figure yet; False if there is none."""
        if self._num_makings or self._ends_at < math.inf:
            return False
        calls = (each for each in self.shelf.calls() if self._rehearsals[each] < MOST_REHEARSALS)
        program = self._pace.unknown({each: each[1] for each in calls})
        if program is None:
            return False
        self._rehearsals[program] += 1
        begin = time.perf_counter()
        rounds = self.shelf.rehearse(*program)
        self._pace.took(program[0].slots, program, rounds, time.perf_counter() - begin)
        return True

    def _make_next(self, wanted: Iterator[Making]) -> None:
        """Has the first of these made that never was, unless something is being made."""
        if self._has_room and not self._num_makings:
            any(self._order(making) for making in wanted)  # the first that is new ends it

    def _make_ahead(self) -> None:
        """While nobody is there."""
        if not self._closed:
            self._make_next(wanted_soon(self.shelf))

    def _order(self, making: Making) -> bool:
        """Has something made in the background, once; False if it was ordered before."""

        def do() -> None:
            try:
                try:
                    making()
                except Exception:  # jax fails now and then where two threads trace: once more
                    making()
            finally:
                self._orders.put(functools.partial(self._made, has_room()))

        is_new = self.session.background.submit(name_of(making), do)
        self._num_makings += bool(is_new)
        return is_new

    def _made(self, room: bool) -> None:
        self._num_makings -= 1
        if self._has_room and not room:
            line = "%d programs are compiled and there is room for few more: no others are made"
            logging.getLogger(__name__).warning(line, len(self.shelf))
        self._has_room = room


def _error(error: Exception) -> News:
    """The end of a request, in a line for people who cannot mend it."""
    line = f"the engine failed at this request: {type(error).__name__}: {error}".splitlines()[0]
    return News([], finish="error", error=line)
