"""Whose turn it is on the target: sessions, their slots, one batch of verifications after another.

    sessions --submit--> places (one request each) --batch--> worker thread: Slots
        ^                                                          |
        +---- parts of the answer, encoded <---- encoder thread ---+

Everything here runs in the event loop, but for `Slots`, which one worker thread calls, and the
encoding of answers, which one other does. The loop takes waiting verifications of about one size
as one batch, the oldest first, and, between two batches, one chunk of one prompt: a long prompt
delays others by a chunk at most, and a big draft by a pass of its own.
Answers are kept encoded until the next request, so that a client which lost its connection or
asks twice gets the same bytes; clients that read slowly never hold up the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from infer.split.events import Log, place_of
from infer.split.metrics import Metrics
from moa_jax.config import MAX_DEPTH, Sampling
from moa_jax.errors import InputError
from moa_jax.serve import rows, wire
from moa_jax.serve.slots import Reply, Request, Slots

FATAL = {"version", "pairing", "token", "state", "message"}
MOST_BEHIND = 64  # parts of a stream that wait to be sent, before the target pauses
PART_BYTES = 256 << 10  # of rows in one part, which a slow link carries in a second or two
MOST_PADDING = 4  # times the nodes of a draft, which bigger ones in its batch cost it
MOST_FAILURES = 3  # in a row, after which the server calls itself unhealthy


class Refused(Exception):
    """A request that is not met, as the Fault that says so."""

    def __init__(self, code: wire.FaultCode, text: str) -> None:
        self.code, self.text = code, text
        super().__init__(text)

    @property
    def fatal(self) -> bool:
        """Whether the connection ends with it."""
        return self.code in FATAL


@dataclasses.dataclass(frozen=True)
class Rules:
    """What one server lends, to how many and for how long."""

    num_slots: int = 4
    max_prompt: int = 4096
    max_tokens: int = 8192  # of one session, prompt included
    max_nodes: int = MAX_DEPTH - 1  # of one draft, the root left out
    chunk: int = 128
    max_queue: int = 32  # clients that wait for a slot
    queue_seconds: float = 30.0
    resume_seconds: float = 60.0  # that a slot is kept for a client whose connection is gone

    def __post_init__(self) -> None:
        if self.chunk < 2:  # the root of before and one token more
            raise InputError(f"a chunk of {self.chunk} tokens: choose 2 at least")


class Encoding(NamedTuple):
    """How a session's rows travel."""

    codec: wire.Codec
    compress: bool


class Answer:
    """The answer to one request, part by part as it comes; kept until the next request."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.parts: list[bytes] = []
        self.known = 0  # rows that the client has: parts with no others are left out
        self.complete = False
        self.refused: Refused | None = None
        self.on_read: Callable[[], None] | None = None  # after each part that was taken
        self._changed = asyncio.Event()
        self._num_read = 0
        self._ends: list[int] = []  # for each part, the row behind its last; 0 without rows

    @property
    def behind(self) -> int:
        """Parts that nobody has taken yet."""
        return len(self.parts) - self._num_read

    def add(self, part: bytes, complete: bool, end: int = 0) -> None:
        """Append a part, with rows up to `end`, and wake those who wait for it."""
        self.parts.append(part)
        self._ends.append(0 if complete else end)
        self.complete = complete
        self._wake()

    def refuse(self, refused: Refused) -> None:
        """End without a last part; the first reason counts."""
        self.refused = self.refused or refused
        self._wake()

    async def read(self) -> AsyncIterator[bytes]:
        """All parts but those known; raises Refused where no further ones will come."""
        index = 0
        while True:
            while index < len(self.parts):
                if not 0 < self._ends[index] <= self.known:
                    yield self.parts[index]
                index += 1
                self._num_read = max(self._num_read, index)
                if self.on_read is not None:
                    self.on_read()
            if self.refused:
                raise self.refused
            if self.complete:
                return
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Reading(NamedTuple):
    """Tokens that a session has yet to read, a chunk at a time."""

    tokens: list[int]
    pick_root: bool
    seen: int = 0  # of them
    has_root: bool = False  # a root of before is processed along with the next chunk
    is_new: bool = False  # they are committed now, not before

    def chunk(self, most: int) -> list[int]:
        """The next tokens, so that at most `most` are processed."""
        return self.tokens[self.seen : self.seen + most - self.has_root]

    def new(self, last: int) -> list[int]:
        """What was committed by reading them all; `last` is the root, picked or given."""
        return [last] if self.pick_root else self.tokens if self.is_new else []


class Session:
    """One client's text on the server: its slot, the last answer and how it went."""

    def __init__(self, ask: wire.Open, encoding: Encoding, owner: Callable[[Refused], None]):
        self.id = secrets.token_hex(16)
        self.ask, self.encoding = ask, encoding
        self.slot: int | None = None  # written by the worker alone
        self.length = len(ask.tokens)  # tokens committed, the root included
        self.finished = ""
        self.answer = Answer(ask.seq)
        self.draft: wire.Draft | None = None
        self.streaming = self.paused = False  # paused: a stream whose reader is too far behind
        self.reading: Reading | None = Reading(ask.tokens, not ask.root_given)
        self.owner: Callable[[Refused], None] | None = owner  # tells a connection that it lost it
        self.lost_at = 0.0  # when the connection was lost; says something while owner is None
        self.closed = False
        self.counts = {"rounds": 0, "drafted": 0, "accepted": 0, "resumed": 0}
        self.answer.add(wire.encode(wire.Opened(self.id)), complete=False)


class Scheduler:
    """Sessions over `Slots`; an asynchronous context in which the worker runs.

    `slots` were made for the same `rules`, and nothing else may use them.
    """

    def __init__(
        self,
        slots: Slots,
        rules: Rules,
        metrics: Metrics,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        text_of: Callable[[list[int]], str] | None = None,  # given to have texts in the log
    ) -> None:
        self.rules, self.metrics = rules, metrics
        self._slots, self._log, self._clock, self._text_of = slots, log, clock, text_of
        self._sessions: dict[str, Session] = {}
        self._free = rules.num_slots
        self._queue: deque[asyncio.Future[None]] = deque()
        self._drafts: deque[Session] = deque()
        self._readers: deque[Session] = deque()
        self._wake = asyncio.Event()
        self._draining = False
        self._failures = 0
        self._at_work: list[Session] = []  # those whose batch or chunk is under way
        self._tasks: list[asyncio.Task[None]] = []
        metrics.slots.set(rules.num_slots)

    async def __aenter__(self) -> Scheduler:
        self._worker = ThreadPoolExecutor(1, "target")
        self._encoder = ThreadPoolExecutor(1, "encoder")
        self._tasks = [asyncio.create_task(self._work()), asyncio.create_task(self._expire())]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for session in list(self._sessions.values()):
            self.close(session, "shutdown")
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self._encoder.shutdown)

    @property
    def healthy(self) -> bool:
        """Whether the target works: false after several failures one after the other."""
        return self._failures < MOST_FAILURES and not any(task.done() for task in self._tasks)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_connected(self) -> int:
        """Sessions that have a connection."""
        return sum(session.owner is not None for session in self._sessions.values())

    def drain(self) -> None:
        """Refuse new sessions from now on, also those that wait for a slot."""
        self._draining = True
        for waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(_draining())

    async def open(
        self, ask: wire.Open, encoding: Encoding, owner: Callable[[Refused], None]
    ) -> Session:
        """Start a session as soon as a slot is free; its answer holds Opened, then Verdicts.

        `owner` is called when the session is taken from its connection. Raises Refused.
        """
        self._check_open(ask)
        await self._wait_for_slot()
        session = Session(ask, encoding, owner)
        self._sessions[session.id] = session
        self._gauge()
        self._readers.append(session)
        self._wake.set()
        self._log(
            "open",
            session=session.id[:8],
            tokens=len(ask.tokens),
            replay=ask.root_given,
            known=ask.known,
            total=ask.total,
        )
        self._log_text(session, ask.tokens)
        return session

    def resume(
        self, ask: wire.Resume, encoding: Encoding, owner: Callable[[Refused], None]
    ) -> Session:
        """A session that a connection lost, for another one; raises Refused if it is gone.

        A connection that still has it, half open perhaps, loses it.
        """
        session = self._sessions.get(ask.session)
        if session is None:
            raise Refused("gone", "this session is over or was never here: replay its tokens")
        if session.encoding != encoding:
            raise Refused("gone", "this session's rows travel in another codec: replay its tokens")
        if ask.seq > session.answer.seq:
            raise Refused("state", f"the last reply is {session.answer.seq}, not {ask.seq}")
        if session.owner is not None:
            session.owner(Refused("state", "another connection resumed this session"))
        session.owner, session.answer.known = owner, ask.known
        session.counts["resumed"] += 1
        self._log("resume", session=session.id[:8], seq=session.answer.seq, seen=ask.seq)
        return session

    def submit(self, session: Session, ask: wire.Draft | wire.Read | wire.Stream) -> Answer:
        """Give a session's next request its place; a duplicate gets the answer of the last one.

        Raises Refused for a request that comes too early, out of order or does not fit.
        """
        if ask.seq == session.answer.seq:
            return session.answer
        if session.closed:
            raise Refused("gone", "this session is over: replay its tokens")
        if ask.seq != session.answer.seq + 1:
            expected = session.answer.seq + 1
            raise Refused("state", f"request {ask.seq} came where {expected} is the next")
        if not session.answer.complete:
            raise Refused("state", f"request {ask.seq} came before the reply to the last one")
        if session.finished:
            raise Refused("state", f"the answer has ended ({session.finished}): open another one")
        if isinstance(ask, wire.Read):
            self._check_read(session, ask)
            session.length += len(ask.tokens)
            session.reading = Reading(ask.tokens, False, has_root=True, is_new=True)
            self._readers.append(session)
        elif isinstance(ask, wire.Stream):
            session.streaming = True
            session.draft = wire.Draft(ask.seq, [], [])
            self._drafts.append(session)
        else:
            if len(set(zip(ask.parents, ask.tokens, strict=True))) < len(ask.tokens):
                raise Refused("message", "two children of a node are the same token")
            session.draft = ask
            self._drafts.append(session)
        session.answer = Answer(ask.seq)
        if session.streaming:
            session.answer.on_read = functools.partial(self._stream_on, session)
        self._wake.set()
        return session.answer

    def disconnect(self, session: Session) -> None:
        """Keep the slot of a session whose connection is gone, for some time."""
        session.owner, session.lost_at = None, self._clock()

    def close(self, session: Session, reason: str) -> None:
        """End a session and hand its slot on; a request in the works ends with Fault gone."""
        if session.closed:
            return
        session.closed, session.draft, session.reading = True, None, None
        del self._sessions[session.id]
        if not session.answer.complete:
            session.answer.refuse(Refused("gone", f"this session is over ({reason}): replay it"))
        # The worker's work is done in order: the slot is closed before anyone else opens it.
        self._on_worker(self._close_slot, session).add_done_callback(self._note_failure)
        self._hand_on()
        facts = session.counts | {"tokens": session.length, "seq": session.answer.seq}
        self._log("close", session=session.id[:8], reason=reason, **facts)

    # Slots and those who wait for one

    async def _wait_for_slot(self) -> None:
        if self._draining:
            raise _draining()
        if self._free:
            self._free -= 1
            return
        lost = [session for session in self._sessions.values() if session.owner is None]
        if lost and not self._queue:
            self.close(min(lost, key=lambda session: session.lost_at), "evicted")
            self._free -= 1
            return
        if len(self._queue) >= self.rules.max_queue:
            raise Refused("busy", "all slots are taken and the queue is full: try again later")
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self._gauge()
        try:
            async with asyncio.timeout(self.rules.queue_seconds):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._hand_on()  # a slot came just when the wait was over
            if isinstance(error, TimeoutError):
                raise Refused("busy", "no slot became free in time: try again later") from None
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._queue.remove(place)
            self._gauge()

    def _hand_on(self) -> None:
        """Give a slot that became free to the first who waits, else keep it."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                break
        else:
            self._free += 1
        self._gauge()

    async def _expire(self) -> None:
        """Ends sessions whose clients did not come back in time."""
        while True:
            await asyncio.sleep(min(1.0, self.rules.resume_seconds / 4))
            oldest = self._clock() - self.rules.resume_seconds
            for session in list(self._sessions.values()):
                if session.owner is None and session.lost_at <= oldest:
                    self._log("expire", session=session.id[:8])
                    self.close(session, "expired")
            lost = [session for session in self._sessions.values() if session.owner is None]
            if lost and self._queue:  # some connection was lost while others wait
                self.close(min(lost, key=lambda session: session.lost_at), "evicted")

    def _gauge(self) -> None:
        self.metrics.slots_used.set(self.rules.num_slots - self._free)
        self.metrics.sessions.set(len(self._sessions))
        self.metrics.queue.set(len(self._queue))

    # What requests may ask

    def _check_open(self, ask: wire.Open) -> None:
        rules, count = self.rules, len(ask.tokens)
        if not ask.root_given and count > rules.max_prompt:
            raise Refused(
                "too_long", f"a prompt of {count} tokens: at most {rules.max_prompt} may come"
            )
        if max(count, ask.total) > rules.max_tokens:
            most = max(count, ask.total)
            raise Refused(
                "too_long", f"a session of {most} tokens: at most {rules.max_tokens} are lent"
            )

    def _check_read(self, session: Session, ask: wire.Read) -> None:
        if (length := session.length + len(ask.tokens)) > session.ask.total:
            raise Refused(
                "state", f"{length} tokens in a session opened for {session.ask.total} at most"
            )

    # The work itself

    async def _work(self) -> None:
        """Batch after batch, with a chunk of reading between two; no exception ends it."""
        while True:
            self._wake.clear()
            try:
                busy = await self._verify() | await self._read()
            except Exception as error:
                busy = True
                self._fail(await self._spoilt(), error)
            if not busy:
                await self._wake.wait()

    async def _spoilt(self) -> list[Session]:
        """Those that an exception took with it: all who have rows, where the caches are gone."""
        try:
            lost = await self._on_worker(self._slots.recover)
        except Exception as error:  # no memory for new caches, say: the next pass tries again
            lost = True
            self._fail([], error)
        if not lost:
            return self._at_work
        begun = [session for session in self._sessions.values() if session.slot is not None]
        return [*self._at_work, *begun]

    async def _verify(self) -> bool:
        """One batch of the waiting drafts; false if there are none."""
        batch = self._batch()
        if not batch:
            return False
        self._at_work = [session for session, _ in batch]
        began = time.perf_counter()
        replies = await self._on_worker(self._verify_slots, batch)
        self._failures = 0
        self.metrics.batch.observe(len(batch))
        self.metrics.verify_seconds.observe(time.perf_counter() - began)
        for (session, draft), reply in zip(batch, replies, strict=True):
            self._note_draft(session, draft, reply)
            if not session.streaming:
                self._publish(session, reply, last=True)
                continue
            self._publish(session, reply._replace(count=0, rows=[]), last=bool(reply.done))
            session.paused = not reply.done
            self._stream_on(session)
        return True

    def _batch(self) -> list[tuple[Session, wire.Draft]]:
        """The oldest draft and those that fit to it: all rows are padded to the widest one."""
        self._at_work = waiting = [session for session in self._drafts if session.draft is not None]
        batch: list[tuple[Session, wire.Draft]] = []
        least = most = 0
        for session in waiting:
            width = self._slots.padded(1 + len(session.draft.tokens))
            low, high = min(least or width, width), max(most, width)
            if high <= MOST_PADDING * low and len(batch) < self.rules.num_slots:
                least, most = low, high
                batch.append((session, session.draft))
                session.draft = None
        self._drafts = deque(session for session in waiting if session.draft is not None)
        return batch

    def _stream_on(self, session: Session) -> None:
        """The next token of a stream, unless its reader is too far behind."""
        if session.paused and not session.closed and session.answer.behind < MOST_BEHIND:
            session.paused = False
            session.draft = wire.Draft(session.answer.seq, [], [])
            self._drafts.append(session)
            self._wake.set()

    async def _read(self) -> bool:
        """One chunk of one prompt, of each in turn; false if there is none."""
        while self._readers and self._readers[0].reading is None:  # closed
            self._readers.popleft()
        if not self._readers:
            return False
        session = self._readers.popleft()
        self._at_work = [session]
        reading = session.reading
        chunk = reading.chunk(self.rules.chunk)
        seen = reading.seen + len(chunk)
        last = seen == len(reading.tokens)
        began = time.perf_counter()
        try:
            reply = await self._on_worker(
                self._read_slot, session, chunk, last and reading.pick_root
            )
        except InputError as error:  # what only `Slots` knows to be too much
            session.answer.refuse(Refused("too_long", str(error)))
            self.close(session, "refused")
            return True
        self._failures = 0
        self.metrics.read_seconds.observe(time.perf_counter() - began)
        self.metrics.prompt_tokens.inc(len(chunk))
        if session.closed:
            return True
        if last:
            session.reading = None
            session.length += reading.pick_root
            session.finished = reply.done
            reply = reply._replace(tokens=reading.new(reply.tokens[-1]))
        else:
            session.reading = reading._replace(seen=seen, has_root=True)
            self._readers.append(session)
            reply = reply._replace(tokens=[], done="")
        self._publish(session, _from_row(reply, session.ask.known), last)
        return True

    def _verify_slots(self, batch: list[tuple[Session, wire.Draft]]) -> list[Reply]:
        """On the worker."""
        return self._slots.verify(
            [Request(session.slot, draft.tokens, draft.parents) for session, draft in batch]
        )

    def _read_slot(self, session: Session, chunk: list[int], pick_root: bool) -> Reply:
        """On the worker; the first chunk opens the slot."""
        if session.slot is None:
            ask = session.ask
            session.slot = self._slots.open(Sampling(**ask.sampling), ask.stop_ids, ask.total)
        return self._slots.read(session.slot, chunk, pick_root=pick_root)

    def _close_slot(self, session: Session) -> None:
        """On the worker."""
        if session.slot is not None:
            self._slots.close(session.slot)

    def _on_worker(self, work: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    def _note_draft(self, session: Session, draft: wire.Draft, reply: Reply) -> None:
        drafted, accepted = len(draft.tokens), max(reply.count - 1, 0)
        session.length += len(reply.tokens)
        session.finished = reply.done
        for name, count in (("rounds", 1), ("drafted", drafted), ("accepted", accepted)):
            session.counts[name] += count
        self.metrics.count_draft(drafted, accepted, len(reply.tokens))

    def _publish(self, session: Session, reply: Reply, last: bool) -> None:
        """Encode parts of a session's answer, elsewhere, then add them; they keep their order."""
        if session.closed or not (last or reply.count or reply.tokens):
            return
        answer = session.answer
        self._log_text(session, reply.tokens)
        pieces = _pieces(reply)
        for piece in pieces:
            ends = last and piece is pieces[-1]
            coding = asyncio.get_running_loop().run_in_executor(
                self._encoder, encoded, answer.seq, piece, session.encoding, not ends
            )
            end = piece.start + piece.count if piece.count else 0
            noting = functools.partial(self._published, session, answer, ends, end)
            coding.add_done_callback(noting)

    def _published(
        self, session: Session, answer: Answer, last: bool, end: int, coding: asyncio.Future[bytes]
    ) -> None:
        if coding.cancelled():
            return
        if error := coding.exception():
            self._fail([session], error)
        else:
            answer.add(coding.result(), last, end)

    def _log_text(self, session: Session, tokens: list[int]) -> None:
        if self._text_of is not None and tokens:
            self._log("text", session=session.id[:8], text=self._text_of(tokens))

    def _note_failure(self, work: asyncio.Future[Any]) -> None:
        if not work.cancelled() and (error := work.exception()):
            self._fail([], error)

    def _fail(self, sessions: list[Session], error: BaseException) -> None:
        """Give up sessions whose slots an exception of ours left in an unknown state."""
        self._failures += 1
        self.metrics.failures.inc()
        self._log("error", what=place_of(error), sessions=len(sessions))
        for session in sessions:
            self.close(session, "failed")


def encoded(seq: int, reply: Reply, encoding: Encoding, more: bool) -> bytes:
    """One part of an answer as a Verdict's bytes."""
    data = rows.pack(reply.rows, *encoding)
    verdict = wire.Verdict(seq, reply.start, reply.count, reply.tokens, reply.done, more, data)
    return wire.encode(verdict)


def _from_row(reply: Reply, known: int) -> Reply:
    """A reply without the rows of the first `known` tokens."""
    skip = min(max(known - reply.start, 0), reply.count)
    return reply._replace(
        start=reply.start + skip, count=reply.count - skip, rows=[row[skip:] for row in reply.rows]
    )


def _pieces(reply: Reply) -> list[Reply]:
    """A reply in parts of few bytes; its tokens and its end come with the last one."""
    each = sum(row.nbytes for row in reply.rows) // max(reply.count, 1)
    most = max(PART_BYTES // max(each, 1), 1)
    parts = []
    for at in range(0, reply.count or 1, most):
        rows_of_part = [row[at : at + most] for row in reply.rows]
        count = min(most, reply.count - at)
        parts.append(Reply(reply.start + at, count, [], "", rows_of_part))
    return [*parts[:-1], parts[-1]._replace(tokens=reply.tokens, done=reply.done)]


def _draining() -> Refused:
    return Refused("draining", "the server is going down: no new sessions, try another or later")
