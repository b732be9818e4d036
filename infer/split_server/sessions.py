"""The server's state per client: its session, the reply to its last request, its slot.

SplitSession   one client's sequence, in a slot assigned by SlotQueue
ReplyBuffer    the encoded parts of one reply, kept until the next request
PendingRead    the tokens that a session has yet to prefill, in chunks
SlotQueue      slot assignment, and the queue of clients that wait for a slot
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from infer.split_server.metrics import ServerMetrics
from moa_jax.config import MAX_DEPTH
from moa_jax.errors import InputError
from moa_jax.split import protocol, rows
from moa_jax.split.server_target import Reply

FATAL = {"version", "pairing", "token", "state", "message"}  # codes that end the connection
PART_BYTES = 32 << 10  # of rows per part; a part that arrives too late counts as a lost link


class Refused(Exception):
    """A refused request; the server sends a Fault with `code` and `text`."""

    def __init__(self, code: protocol.FaultCode, text: str) -> None:
        self.code, self.text = code, text
        super().__init__(text)


@dataclasses.dataclass(frozen=True)
class ServerLimits:
    """Limits of a server: slots, session sizes, queue length and timeouts."""

    num_slots: int = 4
    max_prompt: int = 4096
    max_tokens: int = 8192  # per session, including the prompt
    max_nodes: int = MAX_DEPTH - 1  # per draft, without the root
    chunk: int = 128  # most tokens per prefill pass
    max_queue: int = 32  # most clients that wait for a slot
    queue_seconds: float = 30.0  # longest wait for a slot
    resume_seconds: float = 60.0  # a slot is kept this long after its connection was lost

    def __post_init__(self) -> None:
        if self.chunk < 2:  # the previous root and one new token
            raise InputError(f"a chunk of {self.chunk} tokens; choose 2 at least")


class Encoding(NamedTuple):
    """The encoding of a session's rows."""

    codec: protocol.Codec
    compress: bool


class ReplyBuffer:
    """The encoded parts of the reply to one request, kept until the next request."""

    def __init__(self, seq: int, on_read: Callable[[], None] = lambda: None) -> None:
        """`on_read` is called after `read` yielded a part."""
        self.seq = seq
        self.parts: list[tuple[bytes, int]] = []  # with their ends; see `add`
        self.known = 0  # `Resume.known`; parts up to this end are skipped
        self.complete = False
        self.refused: Refused | None = None
        self._on_read = on_read
        self._changed = asyncio.Event()
        self._num_read = 0

    @property
    def unread(self) -> int:
        """Number of parts that `read` has not yielded yet."""
        return len(self.parts) - self._num_read

    def add(self, part: bytes, complete: bool, end: int = 0) -> None:
        """Appends a part and wakes the readers.

        `end` is the part's first position plus its number of rows, or of tokens in a stream; a part
        with `end` 0 and the last part are never skipped.
        """
        self.parts.append((part, 0 if complete else end))
        self.complete = complete
        self._wake()

    def refuse(self, refused: Refused) -> None:
        """Ends the reply early; only the first call sets the reason."""
        self.refused = self.refused or refused
        self._wake()

    async def read(self) -> AsyncIterator[bytes]:
        """Yields the parts that the client does not have; raises Refused if the reply ends early.

        Several readers may run one after another; every reader starts at the first part.
        """
        index = 0
        while True:
            while index < len(self.parts):
                part, end = self.parts[index]
                if not 0 < end <= self.known:
                    yield part
                index += 1
                self._num_read = max(self._num_read, index)
                self._on_read()
            if self.refused:
                raise self.refused
            if self.complete:
                return
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class PendingRead(NamedTuple):
    """The tokens that a session has yet to prefill, in chunks."""

    tokens: list[int]
    pick_root: bool  # the target chooses the next token after `tokens`
    seen: int = 0  # tokens prefilled so far
    has_root: bool = False  # the next chunk also processes the current root
    is_new: bool = False  # prefill commits the tokens; otherwise they were committed before

    @property
    def left(self) -> int:
        """Number of tokens not prefilled yet."""
        return len(self.tokens) - self.seen

    def chunk(self, most: int) -> list[int]:
        """The next tokens, for a pass that processes at most `most` tokens."""
        return self.tokens[self.seen : self.seen + most - self.has_root]

    def committed(self, root: int) -> list[int]:
        """The tokens committed by the completed prefill; `root` is the last, picked or given."""
        return [root] if self.pick_root else self.tokens if self.is_new else []


class SplitSession:
    """One client's sequence on the server, with its slot and its last reply."""

    def __init__(
        self, request: protocol.Open, encoding: Encoding, owner: Callable[[Refused], None]
    ) -> None:
        """`owner` is called when another connection takes over the session."""
        self.id = secrets.token_hex(16)
        self.request, self.encoding = request, encoding
        self.slot: int | None = None  # only the worker sets it
        self.length = len(request.tokens)  # committed tokens, including the root
        self.finished = ""  # finish reason, or "" while the answer goes on
        self.reply = ReplyBuffer(request.seq)
        self.draft: protocol.Verify | None = None  # pending, not in a pass yet
        self.streaming = self.paused = False  # paused: too many unsent parts
        self.reading: PendingRead | None = PendingRead(request.tokens, not request.root_given)
        self.owner: Callable[[Refused], None] | None = owner  # None after a lost connection
        self.lost_at = 0.0  # time at which the connection was lost
        self.closed = False
        self.counts = Counter(rounds=0, drafted=0, accepted=0, resumed=0)
        self.arrival = 0  # number of the pending read or draft; the oldest is served first
        self.reply.add(protocol.encode(protocol.Opened(self.id)), complete=False)


class SlotQueue:
    """Assigns slots in order of arrival, with a limit on queue length and waiting time."""

    def __init__(
        self, limits: ServerLimits, metrics: ServerMetrics, evict: Callable[[], bool]
    ) -> None:
        """`evict` frees the slot of a disconnected session, and returns False if none exists."""
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
        """Refuses slots from now on, including to waiting clients."""
        self.closed = True
        for waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(_draining())

    async def take(self) -> None:
        """Waits for a slot; raises Refused if none becomes free in time."""
        if self.closed:
            raise _draining()
        if self._free or (not self._queue and self._evict()):
            self._free -= 1
            self._update_gauges()
            return
        if len(self._queue) >= self._limits.max_queue:
            raise Refused("busy", "all slots are taken and the queue is full; retry later")
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        self._update_gauges()
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back()  # a slot was assigned just as the wait ended
            if isinstance(error, TimeoutError):
                raise Refused("busy", "no slot became free in time; retry later") from None
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._queue.remove(turn)
            self._update_gauges()

    def give_back(self) -> None:
        """Assigns the slot to the first waiting client, or frees it."""
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
    return Refused("draining", "the server is shutting down; try another one, or try again later")


def encode_parts(
    loop: asyncio.AbstractEventLoop,
    reply: ReplyBuffer,
    result: Reply,
    last: bool,
    encoding: Encoding,
) -> None:
    """Encodes a result in parts, and adds each part to the reply in the event loop.

    A part has at most PART_BYTES, or one token. The last part has the tokens and `done`. `last`
    states that the result completes the reply.
    """
    row_bytes = sum(row.nbytes for row in result.rows) // max(result.count, 1)
    most = max(PART_BYTES // max(row_bytes, 1), 1)
    for at in range(0, result.count or 1, most):
        count = min(most, result.count - at)
        is_end = at + count == result.count
        tokens, done = (result.tokens, result.done) if is_end else ([], "")
        data = rows.pack([row[at : at + count] for row in result.rows], *encoding)
        start, ends = result.start + at, last and is_end
        part = protocol.Committed(reply.seq, start, count, tokens, done, not ends, data)
        position = start + max(count, len(tokens))  # a stream has tokens, no rows
        loop.call_soon_threadsafe(reply.add, protocol.encode(part), ends, position)


def without_known(result: Reply, known: int) -> Reply:
    """Removes the rows of the session's first `known` tokens from a result."""
    skip = min(max(known - result.start, 0), result.count)
    return result._replace(
        start=result.start + skip,
        count=result.count - skip,
        rows=[row[skip:] for row in result.rows],
    )
