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
import functools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from infer.split.server.events import Log, place_of
from infer.split.server.metrics import Metrics
from infer.split.server.places import Places
from infer.split.server.sessions import (
    Answer,
    Encoding,
    Reading,
    Refused,
    Rules,
    Session,
    encoded,
    from_row,
    pieces,
)
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from moa_jax.split import wire
from moa_jax.split.slots import Reply, Request, Slots

MOST_BEHIND = 64  # parts of a stream that wait to be sent, before the target pauses
MOST_PADDING = 4  # times the nodes of a draft, which bigger ones in its batch cost it
MOST_FAILURES = 3  # in a row, after which the server calls itself unhealthy


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
        self._places = Places(rules, metrics, self._evict)
        self._drafts: deque[Session] = deque()
        self._readers: deque[Session] = deque()
        self._wake = asyncio.Event()
        self._failures = 0
        self._at_work: list[Session] = []  # those whose batch or chunk is under way
        self._tasks: list[asyncio.Task[None]] = []

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
        """Whether new sessions are refused."""
        return self._places.closed

    @property
    def num_connected(self) -> int:
        """Sessions that have a connection."""
        return sum(session.owner is not None for session in self._sessions.values())

    def drain(self) -> None:
        """Refuse new sessions from now on, also those that wait for a slot."""
        self._places.close()

    async def open(
        self, ask: wire.Open, encoding: Encoding, owner: Callable[[Refused], None]
    ) -> Session:
        """Start a session as soon as a slot is free; its answer holds Opened, then Verdicts.

        `owner` is called when the session is taken from its connection. Raises Refused.
        """
        self._check_open(ask)
        await self._places.take()
        session = Session(ask, encoding, owner)
        self._sessions[session.id] = session
        self.metrics.sessions.set(len(self._sessions))
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
        self.metrics.sessions.set(len(self._sessions))
        self._places.give_back()
        facts = session.counts | {"tokens": session.length, "seq": session.answer.seq}
        self._log("close", session=session.id[:8], reason=reason, **facts)

    # Those who lost their connection

    async def _expire(self) -> None:
        """Ends sessions whose clients did not come back in time."""
        while True:
            await asyncio.sleep(min(1.0, self.rules.resume_seconds / 4))
            oldest = self._clock() - self.rules.resume_seconds
            for session in list(self._sessions.values()):
                if session.owner is None and session.lost_at <= oldest:
                    self._log("expire", session=session.id[:8])
                    self.close(session, "expired")
            if self._places.num_waiting:  # some connection was lost while others wait
                self._evict()

    def _evict(self) -> bool:
        """End the session that lost its connection first; false if all have theirs."""
        lost = [session for session in self._sessions.values() if session.owner is None]
        if lost:
            self.close(min(lost, key=lambda session: session.lost_at), "evicted")
        return bool(lost)

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
        self._publish(session, from_row(reply, session.ask.known), last)
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
        parts = pieces(reply)
        for piece in parts:
            ends = last and piece is parts[-1]
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
