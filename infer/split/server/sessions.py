"""The server's view of one client: its session, the reply to its last request, its slot.

SplitSession   one client's text, in a slot that SlotQueue handed out
ReplyBuffer    the encoded parts of one reply, kept until the next request
PendingRead    tokens that a session has yet to read, a chunk at a time
SlotQueue      who has a slot, and who waits for one
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from infer.split.server.metrics import ServerMetrics
from moa_jax.config import MAX_DEPTH
from moa_jax.errors import InputError
from moa_jax.split import rows, wire
from moa_jax.split.slots import Reply

FATAL = {"version", "pairing", "token", "state", "message"}  # codes that end the connection
PART_BYTES = 32 << 10  # of rows in one part: a link counts as lost that takes too long for one


class Refused(Exception):
    """The refusal of a request; it becomes a Fault."""

    def __init__(self, code: wire.FaultCode, text: str) -> None:
        self.code, self.text = code, text
        super().__init__(text)

    @property
    def fatal(self) -> bool:
        """Whether it ends the connection."""
        return self.code in FATAL


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """How much one server offers, to how many clients, and for how long."""

    num_slots: int = 4
    max_prompt: int = 4096
    max_tokens: int = 8192  # of one session, prompt included
    max_nodes: int = MAX_DEPTH - 1  # of one draft, the root left out
    chunk: int = 128  # tokens of a prompt that are read at once
    max_queue: int = 32  # clients that wait for a slot
    queue_seconds: float = 30.0  # that a client waits for a slot
    resume_seconds: float = 60.0  # that a slot is kept for a client whose connection was lost

    def __post_init__(self) -> None:
        if self.chunk < 2:  # the last root and one token more
            raise InputError(f"a chunk of {self.chunk} tokens: choose 2 at least")


class Encoding(NamedTuple):
    """How a session's rows are sent."""

    codec: wire.Codec
    compress: bool


class ReplyBuffer:
    """The reply to one request, part by part as it is made; kept until the next request."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.parts: list[bytes] = []
        self.known = 0  # rows that the client has: parts that hold no others are left out
        self.complete = False
        self.refused: Refused | None = None
        self.on_read: Callable[[], None] | None = None  # called after each part was taken
        self._changed = asyncio.Event()
        self._num_read = 0
        self._ends: list[int] = []  # for each part, the row after its last; 0 without rows

    @property
    def unread(self) -> int:
        """Number of parts that were not taken yet."""
        return len(self.parts) - self._num_read

    def add(self, part: bytes, complete: bool, end: int = 0) -> None:
        """Appends a part whose last row is `end` - 1, and wakes the readers."""
        self.parts.append(part)
        self._ends.append(0 if complete else end)
        self.complete = complete
        self._wake()

    def refuse(self, refused: Refused) -> None:
        """Ends the reply early; the first reason counts."""
        self.refused = self.refused or refused
        self._wake()

    async def read(self) -> AsyncIterator[bytes]:
        """Yields the parts that the client does not have; raises Refused if the reply ends early.

        Several readers may run, one after the other; each starts at the first part.
        """
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


class PendingRead(NamedTuple):
    """Tokens that a session has yet to read, a chunk at a time."""

    tokens: list[int]
    pick_root: bool  # the target chooses a token after them
    seen: int = 0  # tokens read so far
    has_root: bool = False  # the next chunk also processes the present root
    is_new: bool = False  # reading commits the tokens; otherwise they were committed before

    @property
    def left(self) -> int:
        """How many tokens were not read."""
        return len(self.tokens) - self.seen

    def chunk(self, most: int) -> list[int]:
        """The next tokens, so that a pass processes at most `most`."""
        return self.tokens[self.seen : self.seen + most - self.has_root]

    def committed(self, root: int) -> list[int]:
        """The tokens that reading them all commits; `root` is the last one, picked or given."""
        return [root] if self.pick_root else self.tokens if self.is_new else []


class SplitSession:
    """One client's text on the server, with its slot and its last reply."""

    def __init__(
        self, request: wire.Open, encoding: Encoding, owner: Callable[[Refused], None]
    ) -> None:
        """`owner` tells a connection that it lost the session."""
        self.id = secrets.token_hex(16)
        self.request, self.encoding = request, encoding
        self.slot: int | None = None  # only the worker sets it
        self.length = len(request.tokens)  # committed tokens, the root included
        self.finished = ""  # why the answer has ended, if it has
        self.reply = ReplyBuffer(request.seq)
        self.draft: wire.Verify | None = None  # waits for a pass
        self.streaming = self.paused = False  # paused: a stream whose reader is too far behind
        self.reading: PendingRead | None = PendingRead(request.tokens, not request.root_given)
        self.owner: Callable[[Refused], None] | None = owner  # None: the connection was lost,
        self.lost_at = 0.0  # at this time
        self.closed = False
        self.counts = {"rounds": 0, "drafted": 0, "accepted": 0, "resumed": 0}
        self.reply.add(wire.encode(wire.Opened(self.id)), complete=False)


class SlotQueue:
    """Hands out slots: first come, first served, up to a limit and a deadline."""

    def __init__(
        self, limits: ServerLimits, metrics: ServerMetrics, evict: Callable[[], bool]
    ) -> None:
        """`evict` frees the slot of a session that lost its connection, if there is one."""
        self.closed = False
        self._limits, self._metrics, self._evict = limits, metrics, evict
        self._free = limits.num_slots
        self._queue: deque[asyncio.Future[None]] = deque()
        metrics.slots.set(limits.num_slots)

    @property
    def num_waiting(self) -> int:
        """Number of clients that wait for a slot."""
        return len(self._queue)

    def close(self) -> None:
        """Refuses slots from now on, also to clients that wait."""
        self.closed = True
        for waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(_draining())

    async def take(self) -> None:
        """Waits for a slot; raises Refused if there is none in time."""
        if self.closed:
            raise _draining()
        if self._free or (not self._queue and self._evict()):
            self._free -= 1
            self._update_gauges()
            return
        if len(self._queue) >= self._limits.max_queue:
            raise Refused("busy", "all slots are taken and the queue is full: try again later")
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._update_gauges()
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back()  # a slot came just when the wait was over
            if isinstance(error, TimeoutError):
                raise Refused("busy", "no slot became free in time: try again later") from None
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._queue.remove(turn)
            self._update_gauges()

    def give_back(self) -> None:
        """Hands a slot to the first client that waits, or frees it."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                break
        else:
            self._free += 1
        self._update_gauges()

    def _update_gauges(self) -> None:
        self._metrics.slots_used.set(self._limits.num_slots - self._free)
        self._metrics.queue.set(len(self._queue))


def _draining() -> Refused:
    return Refused("draining", "the server is shutting down: try another one, or try again later")


def encoded(seq: int, result: Reply, encoding: Encoding, more: bool) -> bytes:
    """One part of reply `seq` as the bytes of a Committed message."""
    data = rows.pack(result.rows, *encoding)
    part = wire.Committed(seq, result.start, result.count, result.tokens, result.done, more, data)
    return wire.encode(part)


def without_known(result: Reply, known: int) -> Reply:
    """A result without the rows of the session's first `known` tokens."""
    skip = min(max(known - result.start, 0), result.count)
    return result._replace(
        start=result.start + skip,
        count=result.count - skip,
        rows=[row[skip:] for row in result.rows],
    )


def in_parts(result: Reply) -> list[Reply]:
    """Splits a result into parts of few bytes; its tokens and its end come with the last one."""
    each = sum(row.nbytes for row in result.rows) // max(result.count, 1)
    most = max(PART_BYTES // max(each, 1), 1)
    parts = []
    for at in range(0, result.count or 1, most):
        rows_of_part = [row[at : at + most] for row in result.rows]
        count = min(most, result.count - at)
        parts.append(Reply(result.start + at, count, [], "", rows_of_part))
    return [*parts[:-1], parts[-1]._replace(tokens=result.tokens, done=result.done)]
