"""Serves sessions with the target: queues requests, runs passes and returns replies.

    sessions --submit--> waiting (one request each) --batch--> worker thread: TargetSlots
        ^                                                           |
        +----- parts of the reply, encoded <---- encoder thread ----+

All code runs in the event loop, with two exceptions: one worker thread calls `TargetSlots`, and one
encoder thread encodes replies. A `PassScheduler` picks the batch of drafts and the chunks of
prompts between two batches.

An encoded reply is kept until the next request, so a client that reconnects or repeats a request
receives the same bytes. A client that reads slowly never blocks the worker.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from infer.http.log import Log, place_of
from infer.split_server.metrics import ServerMetrics
from infer.split_server.pass_scheduler import PassScheduler, PrefillChunk
from infer.split_server.sessions import (
    Encoding,
    PendingRead,
    Refused,
    ReplyBuffer,
    ServerLimits,
    SlotQueue,
    SplitSession,
    encode_parts,
    without_known,
)
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from moa_jax.split import protocol
from moa_jax.split.server_target import DraftRequest, Reply, TargetSlots

MOST_UNREAD = 64  # unsent parts of a stream at which its decoding pauses
MOST_FAILURES = 3  # consecutive failures after which the server reports unhealthy


class Service:
    """Serves sessions with `TargetSlots`; an async context manager that runs the worker.

    `slots` must have been created for the same `limits`, and no other code may use them.
    """

    def __init__(
        self,
        slots: TargetSlots,
        limits: ServerLimits,
        metrics: ServerMetrics,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        text_of: Callable[[list[int]], str] | None = None,
    ) -> None:
        """`text_of` decodes tokens; with it the log holds prompts and answers."""
        self.limits, self.metrics = limits, metrics
        self._slots, self._log, self._clock, self._text_of = slots, log, clock, text_of
        self._sessions: dict[str, SplitSession] = {}
        metrics.sessions.set_function(lambda: len(self._sessions))
        self._queue = SlotQueue(limits, metrics, self._evict)
        self._arrivals = itertools.count()
        self._scheduler = PassScheduler[SplitSession](
            prompts=self._to_read,
            left=lambda session: session.reading.left,
            queue_sizes=lambda: (len(self._to_read()), len(self._sessions) - len(self._to_read())),
            answers=self._to_verify,
            has_state=lambda: [s for s in self._sessions.values() if s.slot is not None],
            chunk=limits.chunk,
            most_rows=limits.num_slots,
            width=lambda session: slots.padded(1 + len(session.draft.tokens)),
        )
        self._wake = asyncio.Event()
        self._failures = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Service:
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
        """False after MOST_FAILURES consecutive failures, or if a background task has ended."""
        return self._failures < MOST_FAILURES and not any(task.done() for task in self._tasks)

    @property
    def draining(self) -> bool:
        """Whether new sessions are refused."""
        return self._queue.closed

    @property
    def num_connected(self) -> int:
        """Number of sessions that have a connection."""
        return sum(session.owner is not None for session in self._sessions.values())

    def drain(self) -> None:
        """Refuses new sessions from now on, including sessions that wait for a slot."""
        self._queue.close()

    # ---- requests of connections ----------------------------------------------------------

    async def open(
        self, request: protocol.Open, encoding: Encoding, owner: Callable[[Refused], None]
    ) -> SplitSession:
        """Starts a session once a slot is free; the reply is Opened, then Committed messages.

        Calls `owner` if another connection takes over the session. Raises Refused for a prompt or
        session above the limits, and if no slot becomes free in time.
        """
        limits, count = self.limits, len(request.tokens)
        prompt = request.prompt_length if request.root_given else count
        if prompt > limits.max_prompt:
            raise Refused(
                "too_long", f"a prompt of {prompt} tokens: at most {limits.max_prompt} may come"
            )
        if (most := max(count, request.total)) > limits.max_tokens:
            raise Refused(
                "too_long", f"a session of {most} tokens: at most {limits.max_tokens} may be used"
            )
        await self._queue.take()
        session = SplitSession(request, encoding, owner)
        self._sessions[session.id] = session
        self._enqueue(session)
        facts = {"replay": request.root_given, "known": request.known, "total": request.total}
        self._log("open", session=session.id[:8], tokens=count, **facts)
        self._log_text(session, request.tokens)
        return session

    def resume(
        self, request: protocol.Resume, encoding: Encoding, owner: Callable[[Refused], None]
    ) -> SplitSession:
        """Moves a session to another connection; raises Refused if the session is gone.

        Another connection that still owns the session, perhaps half open, loses the session. Raises
        Refused, too, for another encoding and for a `seq` after the last reply.
        """
        session = self._sessions.get(request.session)
        if session is None:
            raise Refused("gone", "this session has ended or never existed: replay its tokens")
        if session.encoding != encoding:
            raise Refused("gone", "this session's rows have another codec: replay its tokens")
        if request.seq > session.reply.seq:
            raise Refused("state", f"the last reply is {session.reply.seq}, not {request.seq}")
        if session.owner is not None:
            session.owner(Refused("state", "another connection resumed this session"))
        session.owner, session.reply.known = owner, request.known
        session.counts["resumed"] += 1
        self._log("resume", session=session.id[:8], seq=session.reply.seq, seen=request.seq)
        return session

    def submit(
        self, session: SplitSession, request: protocol.Verify | protocol.Read | protocol.Stream
    ) -> ReplyBuffer:
        """Queues a session's next request; a repeated request gets the previous reply.

        Raises Refused for a closed or finished session, a request out of order or before the
        previous reply is complete, too many tokens, and two equal children of a node.
        """
        if request.seq == session.reply.seq:
            return session.reply
        if session.closed:
            raise Refused("gone", "this session has ended: replay its tokens")
        if request.seq != session.reply.seq + 1:
            expected = session.reply.seq + 1
            raise Refused("state", f"request {request.seq} came where {expected} was expected")
        if not session.reply.complete:
            raise Refused("state", f"request {request.seq} came before the reply to the last one")
        if session.finished:
            raise Refused("state", f"the answer has ended ({session.finished}): open another one")
        if isinstance(request, protocol.Read):
            length, total = session.length + len(request.tokens), session.request.total
            if length > total:
                raise Refused("state", f"{length} tokens in a session opened for {total} at most")
            session.length = length
            session.reading = PendingRead(request.tokens, False, has_root=True, is_new=True)
        elif isinstance(request, protocol.Stream):
            session.streaming = True
            session.draft = protocol.Verify(request.seq, [], [])
        else:
            children = set(zip(request.parents, request.tokens, strict=True))
            if len(children) < len(request.tokens):
                raise Refused("message", "two children of a node are the same token")
            session.draft = request
        session.reply = ReplyBuffer(request.seq, functools.partial(self._stream_on, session))
        self._enqueue(session)
        return session.reply

    def _enqueue(self, session: SplitSession) -> None:
        """Queues a session that has tokens to prefill or a draft."""
        session.arrival = next(self._arrivals)
        self._wake.set()

    def disconnect(self, session: SplitSession) -> None:
        """Marks the connection of a session as lost; the slot is kept for `resume_seconds`."""
        session.owner, session.lost_at = None, self._clock()

    def close(self, session: SplitSession, reason: str) -> None:
        """Ends a session and frees its slot; a pending request ends with Fault `gone`."""
        if session.closed:
            return
        session.closed, session.draft, session.reading = True, None, None
        del self._sessions[session.id]
        if not session.reply.complete:
            session.reply.refuse(Refused("gone", f"this session has ended ({reason}): replay it"))
        # The worker runs jobs in order, so the slot is closed before it is opened again.
        closing = self._on_worker(self._close_slot, session)
        closing.add_done_callback(functools.partial(self._note_failure, []))
        self._queue.give_back()
        facts = {"tokens": session.length, "seq": session.reply.seq}
        self._log("close", session=session.id[:8], reason=reason, **session.counts, **facts)

    # ---- sessions that lost their connection ----------------------------------------------

    async def _expire(self) -> None:
        """Ends sessions whose clients do not resume in time."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.resume_seconds / 4))
            oldest = self._clock() - self.limits.resume_seconds
            for session in list(self._sessions.values()):
                if session.owner is None and session.lost_at <= oldest:
                    self._log("expire", session=session.id[:8])
                    self.close(session, "expired")
            if self._queue.num_waiting:  # a session may have lost its connection meanwhile
                self._evict()

    def _evict(self) -> bool:
        """Ends the session that lost its connection first; False if all sessions are connected."""
        lost = [session for session in self._sessions.values() if session.owner is None]
        if lost:
            self.close(min(lost, key=lambda session: session.lost_at), "evicted")
        return bool(lost)

    # ---- work loop ------------------------------------------------------------------------

    async def _work(self) -> None:
        """Prefills chunks and verifies batches in a loop that no exception ends."""
        while True:
            self._wake.clear()
            busy = False
            try:
                for piece in self._scheduler.schedule():
                    busy = True
                    if isinstance(piece, PrefillChunk):
                        await self._read_chunk(piece.of)
                    else:
                        await self._verify(piece.rows)
            except Exception as error:
                busy = True
                self._fail(self._scheduler.affected(await self._caches_are_lost()), error)
            if not busy:
                await self._wake.wait()

    async def _caches_are_lost(self) -> bool:
        """Whether an exception of `TargetSlots` lost all caches; allocates new ones if so."""
        try:
            return await self._on_worker(self._slots.recover)
        except Exception as error:  # perhaps no memory for new caches; the next pass tries again
            self._fail([], error)
            return True

    def _to_verify(self) -> list[SplitSession]:
        """Sessions with a pending draft, the oldest first."""
        found = [session for session in self._sessions.values() if session.draft is not None]
        return sorted(found, key=lambda session: session.arrival)

    async def _verify(self, sessions: list[SplitSession]) -> None:
        """Verifies the drafts of `sessions` in one pass."""
        batch = [(session, session.draft) for session in sessions]
        for session in sessions:
            session.draft = None  # the next draft may arrive during the pass
        began = time.perf_counter()
        results = await self._on_worker(self._verify_slots, batch)
        self._failures = 0
        self.metrics.batch.observe(len(batch))
        self.metrics.verify_seconds.observe(time.perf_counter() - began)
        for (session, draft), result in zip(batch, results, strict=True):
            if result.error:
                self._refuse(session, result.error)
                continue
            drafted, accepted = len(draft.tokens), max(result.count - 1, 0)
            session.length += len(result.tokens)
            session.finished = result.done
            session.counts.update(rounds=1, drafted=drafted, accepted=accepted)
            self.metrics.count_draft(drafted, accepted, len(result.tokens))
            if not session.streaming:
                self._publish(session, result, last=True)
                continue
            self._publish(session, result._replace(count=0, rows=[]), last=bool(result.done))
            session.paused = not result.done
            self._stream_on(session)

    def _refuse(self, session: SplitSession, error: str) -> None:
        """Ends a session whose logits were not finite."""
        self._log("error", what=error, session=session.id[:8])
        session.reply.refuse(Refused("not_finite", error))
        self.close(session, "not_finite")

    def _stream_on(self, session: SplitSession) -> None:
        """Queues the next token of a stream, unless MOST_UNREAD parts are unsent."""
        if session.paused and not session.closed and session.reply.unread < MOST_UNREAD:
            session.paused = False
            session.draft = protocol.Verify(session.reply.seq, [], [])
            self._enqueue(session)

    def _to_read(self) -> list[SplitSession]:
        """Sessions with tokens to prefill, the oldest first."""
        found = [session for session in self._sessions.values() if session.reading is not None]
        return sorted(found, key=lambda session: session.arrival)

    async def _read_chunk(self, session: SplitSession) -> None:
        """Prefills the next chunk of a session's pending tokens."""
        reading = session.reading
        chunk = reading.chunk(self.limits.chunk)
        self._scheduler.on_chunk_done(reading.has_root + len(chunk))
        seen = reading.seen + len(chunk)
        last = seen == len(reading.tokens)
        began = time.perf_counter()
        try:
            pick_root = last and reading.pick_root
            result = await self._on_worker(self._read_slot, session, chunk, pick_root)
        except InputError as error:  # a limit that only `TargetSlots` checks
            session.reply.refuse(Refused("too_long", str(error)))
            self.close(session, "refused")
            return
        self._failures = 0
        self.metrics.read_seconds.observe(time.perf_counter() - began)
        self.metrics.prompt_tokens.inc(len(chunk))
        self.metrics.committed.inc(pick_root)
        if result.error:
            self._refuse(session, result.error)
        if session.closed:
            return
        if last:
            session.reading = None
            session.length += reading.pick_root
            session.finished = result.done
            result = result._replace(tokens=reading.committed(result.tokens[-1]))
        else:
            session.reading = reading._replace(seen=seen, has_root=True)
            result = result._replace(tokens=[], done="")
        self._publish(session, without_known(result, session.request.known), last)

    # ---- worker thread --------------------------------------------------------------------

    def _on_worker(self, work: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)

    def _verify_slots(self, batch: list[tuple[SplitSession, protocol.Verify]]) -> list[Reply]:
        return self._slots.verify(
            [DraftRequest(session.slot, draft.tokens, draft.parents) for session, draft in batch]
        )

    def _read_slot(self, session: SplitSession, chunk: list[int], pick_root: bool) -> Reply:
        if session.slot is None:  # the first chunk
            given = session.request
            session.slot = self._slots.open(
                Sampling(**given.sampling), given.stop_ids, given.total, given.prompt_length
            )
        return self._slots.read(session.slot, chunk, pick_root=pick_root)

    def _close_slot(self, session: SplitSession) -> None:
        if session.slot is not None:
            self._slots.close(session.slot)

    # ---- replies --------------------------------------------------------------------------

    def _publish(self, session: SplitSession, result: Reply, last: bool) -> None:
        """Encodes a result on the encoder thread and adds its parts, in order, to the reply."""
        if session.closed or not (last or result.count or result.tokens):
            return
        self._log_text(session, result.tokens)
        loop = asyncio.get_running_loop()
        given = (loop, session.reply, result, last, session.encoding)
        encoding = loop.run_in_executor(self._encoder, encode_parts, *given)
        encoding.add_done_callback(functools.partial(self._note_failure, [session]))

    def _log_text(self, session: SplitSession, tokens: list[int]) -> None:
        if self._text_of is not None and tokens:
            self._log("text", session=session.id[:8], text=self._text_of(tokens))

    def _note_failure(self, sessions: list[SplitSession], work: asyncio.Future[Any]) -> None:
        if not work.cancelled() and (error := work.exception()):
            self._fail(sessions, error)

    def _fail(self, sessions: list[SplitSession], error: BaseException) -> None:
        """Logs an internal exception and ends the sessions whose slots it may have corrupted."""
        self._failures += 1
        self.metrics.failures.inc()
        self._log("error", what=place_of(error), sessions=len(sessions))
        for session in sessions:
            self.close(session, "failed")
