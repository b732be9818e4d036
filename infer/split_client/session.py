"""A client's session on its server during one answer, over any number of links.

    ensure_session  ensures a link and a session with all committed tokens
    ask, reply      send the next request; receive the messages of its reply
    apply_reply     checks the complete reply, then settles its tokens
    disconnect      gives up a lost link; `join` dials until a new link is open

The session tracks the committed tokens of the answer and the number of their received rows, or of
the received tokens of a stream. It is independent of the drafter and of the reader of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Sequence
from typing import Any

from infer.split_client import replies
from infer.split_client.link import (
    ConnectionLost,
    Link,
    LinkTraffic,
    Refused,
    ServerAddress,
    SessionExpired,
)
from infer.split_client.state import AnswerText, ClientOptions, Counts
from moa_jax.config import Sampling
from moa_jax.split import protocol
from moa_jax.split.rows import LeafSpec

MOST_STALE = 16  # most repeats of earlier replies that are skipped before a reply
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds between attempts to connect again


class Backoff:
    """Exponential backoff between attempts to dial, and the deadline for giving up."""

    def __init__(self, give_up_seconds: float) -> None:
        self._give_up_seconds = give_up_seconds
        self._random = random.Random()
        self.reset()

    def reset(self) -> None:
        """Restarts from the shortest pause, after the answer has grown."""
        self._wait = 0.0  # before the next attempt
        self._give_up: float | None = None  # deadline; set by the first wait

    async def pause(self) -> None:
        """Sleeps before an attempt, and doubles the next pause."""
        await asyncio.sleep(self._wait * self._random.uniform(0.5, 1.5))
        self._wait = min(max(FIRST_WAIT, 2 * self._wait), LONGEST_WAIT)

    async def wait_for(self, task: asyncio.Task[Any]) -> Any:
        """The task's result; None if the task is not done at the deadline."""
        while not task.done():
            now = time.monotonic()
            if self._give_up is None:
                self._give_up = now + self._give_up_seconds
            if now >= self._give_up:
                return None
            await asyncio.wait([task], timeout=self._give_up - now)
        return task.result()


class RemoteSession:
    """The link to a server and the session on the server; a lost one is replaced."""

    def __init__(
        self,
        server: ServerAddress | None,
        vocab_size: int,
        leaves: Sequence[LeafSpec],
        options: ClientOptions,
    ) -> None:
        """`server` None never opens a link; `leaves` are the arrays of one token's rows."""
        self._link: Link | None = None
        self._is_joining = False  # a new link is open, and not yet used by the answer
        self.traffic = LinkTraffic()
        self.backoff = Backoff(options.reconnect_seconds)
        self.was_served = False  # a server has opened a session for this or an earlier answer
        self._server, self._vocab_size, self._options = server, vocab_size, options
        self._unpack = functools.partial(replies.unpacked, leaves, server)

    def begin(self, text: AnswerText, sampling: Sampling, counts: Counts) -> None:
        """Starts another answer; an open link is kept from the previous answer."""
        self._text, self._sampling, self._counts = text, sampling, counts
        self._id: str | None = None  # session id on the server
        self._seq = -1  # of the last received reply
        self._request: replies.SessionRequest | None = None  # the last sent request
        self._streaming: int | None = None  # row of a stream's last part, -1 before the first
        self._held: list[replies.TokenRows] = []  # parts of an incomplete reply
        self._received = 0  # received rows, including those in `_held`; in a stream, tokens - root
        self._before = dataclasses.replace(self.traffic)
        self.can_dial = self._server is not None  # False after a server has refused this client
        self.backoff.reset()

    async def finish(self) -> None:
        """Ends the answer: frees its slot on the server and counts its bytes."""
        if self.link is not None:
            try:
                await self.link.send(protocol.Close())
            except (ConnectionLost, Refused):
                self.cut()  # the server detects the lost connection
        self._counts.bytes_up = self.traffic.bytes_up - self._before.bytes_up
        self._counts.bytes_down = self.traffic.bytes_down - self._before.bytes_down

    # ---- the link -------------------------------------------------------------------------

    @property
    def link(self) -> Link | None:
        """The link of the answer; None without one, and until `join` has succeeded."""
        return None if self._is_joining else self._link

    async def connect(self) -> None:
        """Connects to the server, if one is configured; raises ConnectionLost or Refused."""
        if self._server is not None and self._link is None:
            self._link = await Link.open(self._server, self._vocab_size, self.traffic)

    async def close(self) -> None:
        """Closes the connection with a closing handshake, if one is open."""
        if self._link is not None:
            with contextlib.suppress(Exception):
                await self._link.close()
            self._link = None

    def cut(self) -> None:
        """Closes the transport at once, without a close frame, if a connection is open."""
        if self._link is not None:
            self._link.abort()
        self._link = None

    def disconnect(self, error: ConnectionLost | Refused) -> str:
        """Gives up the link after an error; returns a notice with the reason."""
        self._counts.drops += self.link is not None
        self.cut()
        if isinstance(error, SessionExpired):
            self._id = None
        if isinstance(error, Refused):  # no other link follows: the drafter decodes the rest
            self.can_dial = False
            return str(error)
        return f"link lost: {error}"

    # ---- the session ----------------------------------------------------------------------

    async def ensure_session(self) -> list[protocol.Committed]:
        """Ensures a link and a session; returns the reply that the client missed, or [].

        A session without an id is opened with all committed tokens. Raises ConnectionLost or
        Refused.
        """
        await self.connect()
        if self._id is not None:
            try:
                return await self._resumed()
            except SessionExpired:
                self._id = None
        return await self._opened()

    async def join(self) -> list[protocol.Committed]:
        """Like `ensure_session`, but retries until it succeeds; raises Refused."""
        while True:
            await self.backoff.pause()
            self._is_joining = True
            try:
                return await self.ensure_session()
            except ConnectionLost:
                self.cut()
            except BaseException:
                self.cut()
                raise
            finally:
                self._is_joining = False

    async def reopen(self) -> list[protocol.Committed]:
        """Replaces a session whose tokens differ from the client's; returns the reply to Open."""
        await self._link.send(protocol.Close())
        return await self._opened()

    async def _resumed(self) -> list[protocol.Committed]:
        """Resumes the session; returns the missed reply, or []. Raises SessionExpired."""
        await self._link.send(protocol.Resume(self._id, self._seq, self._received))
        found = await self._link.receive(protocol.Resumed)
        if not max(self._seq, 0) <= found.seq <= self._request.seq:  # Open's reply has number 0
            raise SessionExpired(f"the server's last reply is {found.seq}: another session")
        self._streaming = None if found.seq == self._seq else -1
        if found.seq == self._seq or isinstance(self._request, protocol.Stream):
            return []  # `next_part` receives the parts of a stream
        if isinstance(self._request, protocol.Open):  # the server repeats the whole reply
            await self._link.receive(protocol.Opened)
        return await self.reply()

    async def _opened(self) -> list[protocol.Committed]:
        """Opens a session with all committed tokens, and returns the reply.

        The tokens include the root once the answer has one, and the unverified tokens with policy
        `keep`.
        """
        if self._options.policy == "keep":
            self._text.keep_tail()
        self._id, self._seq, self._streaming = None, -1, None
        text = self._text
        root_given = len(text.committed) > len(text.prompt)
        if self._options.stream:
            self._received = len(text.committed) - root_given  # only drafting needs rows
        self._request = protocol.Open(
            seq=0,
            tokens=list(text.committed),
            prompt_length=len(text.prompt),
            root_given=root_given,
            known=self._received,
            total=text.total,
            stop_ids=sorted(text.stops),
            sampling=protocol.sampling_fields(self._sampling),
        )
        await self._link.send(self._request)
        opened = await self._link.receive(protocol.Opened, patience=self._options.patience)
        self._id, self.was_served = opened.session, True
        self._counts.prompts += 1
        return await self.reply()

    # ---- requests and replies -------------------------------------------------------------

    @property
    def room(self) -> int:
        """Most draft nodes within the limits of the server and of the answer."""
        return min(self._link.welcome.max_nodes, self._text.room - 1)

    async def ask(self, kind: type[replies.SessionRequest], *fields: Any) -> None:
        """Sends the next request."""
        self._request = kind(self._seq + 1, *fields)
        await self._link.send(self._request)

    async def reply(self) -> list[protocol.Committed]:
        """Receives the reply to the last request; the caller passes it to `apply_reply`.

        Stores rows of tokens that the request gave on arrival, so that a later link does not
        transfer these rows again. Skips repeats of earlier replies. Raises ConnectionLost for a
        part that leaves a gap.
        """
        seq, known, stale = self._request.seq, self._received, 0
        parts: list[protocol.Committed] = []
        while True:
            part = await self._link.receive(protocol.Committed, patience=self._options.patience)
            if part.seq < seq and (stale := stale + 1) <= MOST_STALE:
                continue
            known = replies.known_after(part, seq, known, self._text.total)
            if part.more and not isinstance(self._request, protocol.Verify):
                given = replies.given_text(self._request, part, self._text)
                self._held.append(self._unpack(part, given))
                self._received = part.start + part.count
                self.backoff.reset()
            else:
                parts.append(part)
            if not part.more:
                return parts

    def take_held(self) -> list[replies.TokenRows]:
        """Returns the stored parts and clears the store."""
        found, self._held = self._held, []
        return found

    def apply_reply(self, parts: Sequence[protocol.Committed]) -> replies.CheckedReply:
        """Checks a complete reply, settles its tokens, and returns its content.

        Raises ConnectionLost, and changes nothing, for a reply that does not fit the last request.
        """
        request, tokens = self._request, parts[-1].tokens
        whole = [*self._text.committed, *tokens]
        replies.check(request, parts, self._text, self._received)
        rows = [self._unpack(part, whole) for part in parts if part.count]
        self._seq, self._received = request.seq, len(whole) - 1
        if isinstance(request, protocol.Read):
            self._counts.prompts += 1
        elif isinstance(request, protocol.Verify):
            self._counts.rounds += 1
            self._counts.drafted += len(request.tokens)
            self._counts.accept_lengths.append(len(tokens))
        if tokens:
            self.backoff.reset()
        # The target did not choose the tokens of Read: the request gave them.
        self._text.settle(tokens, kept=isinstance(request, protocol.Read))
        return replies.CheckedReply(tokens, parts[-1].done, [*self.take_held(), *rows])

    async def next_part(self) -> str:
        """Settles the next tokens of the target's stream; returns the finish reason, or "".

        The first call sends the request. Raises ConnectionLost for a part that does not fit.
        """
        begin = time.perf_counter()
        if self._streaming is None:
            await self.ask(protocol.Stream)
            self._streaming = -1
        part = await self._link.receive(protocol.Committed, patience=self._options.patience)
        self._counts.waiting_s += time.perf_counter() - begin
        reply = replies.stream_part(part, self._request.seq, self._streaming, self._text)
        self._streaming = part.start
        self._received += len(reply.tokens)
        self._text.settle(reply.tokens)
        if reply.tokens:
            self.backoff.reset()
        return reply.done
