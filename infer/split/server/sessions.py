"""What the server knows of its clients' texts: what is lent, sessions, answers and their parts."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from moa_jax.config import MAX_DEPTH
from moa_jax.errors import InputError
from moa_jax.split import rows, wire
from moa_jax.split.slots import Reply

FATAL = {"version", "pairing", "token", "state", "message"}
PART_BYTES = 256 << 10  # of rows in one part, which a slow link carries in a second or two


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


def encoded(seq: int, reply: Reply, encoding: Encoding, more: bool) -> bytes:
    """One part of an answer as a Verdict's bytes."""
    data = rows.pack(reply.rows, *encoding)
    verdict = wire.Verdict(seq, reply.start, reply.count, reply.tokens, reply.done, more, data)
    return wire.encode(verdict)


def from_row(reply: Reply, known: int) -> Reply:
    """A reply without the rows of the first `known` tokens."""
    skip = min(max(known - reply.start, 0), reply.count)
    return reply._replace(
        start=reply.start + skip, count=reply.count - skip, rows=[row[skip:] for row in reply.rows]
    )


def pieces(reply: Reply) -> list[Reply]:
    """A reply in parts of few bytes; its tokens and its end come with the last one."""
    each = sum(row.nbytes for row in reply.rows) // max(reply.count, 1)
    most = max(PART_BYTES // max(each, 1), 1)
    parts = []
    for at in range(0, reply.count or 1, most):
        rows_of_part = [row[at : at + most] for row in reply.rows]
        count = min(most, reply.count - at)
        parts.append(Reply(reply.start + at, count, [], "", rows_of_part))
    return [*parts[:-1], parts[-1]._replace(tokens=reply.tokens, done=reply.done)]
