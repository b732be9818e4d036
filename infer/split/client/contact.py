"""A client's session with its server through one answer, over as many links as that takes.

    reach       a link, and on it the session of before or a new one of all settled tokens
    ask, reply  one more request, and the messages of its reply
    take        these once more, checked; nothing of a reply counts before
    drop        the link is lost: `join` dials until there is another

Of the answer's text it knows what is settled, of its rows how many are here, and nothing of who
drafts or reads it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from infer.split.client.dialler import Dialler
from infer.split.client.replies import (
    Part,
    Reply,
    Request,
    Unpacker,
    check,
    given_text,
    row_after,
    streamed,
)
from infer.split.client.text import Text
from infer.split.client.ways import Counts, Ways
from infer.split.link import Denied, Gone, Link, Lost
from moa_jax.config import Sampling
from moa_jax.split import wire

MOST_STALE = 16  # replies of before that may come again while one is waited for


class Contact:
    """One session after the other; each goes on over another link where its own is lost."""

    def __init__(self, dialler: Dialler, unpacker: Unpacker, ways: Ways) -> None:
        """Links are the dialler's; on them rows come as the unpacker says."""
        self.was_served = False  # a server has opened a session for one answer or another
        self._dialler, self._unpack, self._ways = dialler, unpacker.part, ways

    def begin(self, text: Text, sampling: Sampling, counts: Counts) -> None:
        """Another answer; a link may be there."""
        self._text, self._sampling, self._counts = text, sampling, counts
        self._session: str | None = None
        self._seq = -1  # of the last reply seen
        self._request: Request | None = None  # the last one sent
        self._streaming: int | None = None  # row of a stream's last part, -1 before it
        self._held: list[Part] = []  # of a reply whose end has not come
        self._received = 0  # rows that are here, those held too
        self._before = dataclasses.replace(self._dialler.traffic)
        self._dialler.begin()

    async def finish(self) -> None:
        """The slot goes back; a failure to say so does not matter any more."""
        if self._link is not None:
            try:
                await self._link.send(wire.Close())
            except (Lost, Gone, Denied):
                self._dialler.cut()
        before, traffic = self._before, self._dialler.traffic
        self._counts.bytes_up = traffic.bytes_up - before.bytes_up
        self._counts.bytes_down = traffic.bytes_down - before.bytes_down

    def drop(self, error: Lost | Gone | Denied) -> str:
        """The link is lost; why, as a notice."""
        self._counts.drops += self._dialler.link is not None
        self._dialler.cut()
        if isinstance(error, Gone):
            self._session = None
        if isinstance(error, Denied):  # there will be no other link: the rest is written alone
            self._dialler.is_denied = True
            return str(error)
        return f"link lost: {error}"

    # ---- the session ----------------------------------------------------------------------

    async def reach(self) -> list[wire.Verdict]:
        """A link if there is none, a session, and the reply that is not in the text yet."""
        if self._link is None:
            self._dialler.link = await self._dialler.dial()
        return await self._joined(self._link)

    async def join(self) -> list[wire.Verdict]:
        """As `reach`, sooner or later, by one attempt after the other; raises Denied where there
        will be no link."""
        while True:
            await self._dialler.pause()
            try:
                link = await self._dialler.dial()
                try:
                    missed = await self._joined(link)
                except BaseException:
                    link.abort()
                    raise
            except (Lost, Gone):
                continue
            self._dialler.link = link
            return missed

    async def reopen(self) -> list[wire.Verdict]:
        """A new session instead of this one, which went on in another way than the text."""
        await self._link.send(wire.Close())
        return await self._opened(self._link)

    async def _joined(self, link: Link) -> list[wire.Verdict]:
        """A session with all committed tokens; the reply that is not in the text yet, if any."""
        if self._session is not None:
            try:
                return await self._resumed(link)
            except Gone:
                self._session = None
        return await self._opened(link)

    async def _resumed(self, link: Link) -> list[wire.Verdict]:
        """The reply that was missed, if one was; raises Gone without that session."""
        await link.send(wire.Resume(self._session, self._seq, self._received))
        found = await link.receive(wire.Resumed)
        if not max(self._seq, 0) <= found.seq <= self._request.seq:  # Open's reply has number 0
            raise Gone(f"the server's last reply is {found.seq}: another session")
        self._streaming = None if found.seq == self._seq else -1
        if found.seq == self._seq or isinstance(self._request, wire.Stream):
            return []  # the parts of a stream come one by one, from the first
        if isinstance(self._request, wire.Open):  # its answer comes from the beginning
            await link.receive(wire.Opened)
        return await self._reply(link)

    async def _opened(self, link: Link) -> list[wire.Verdict]:
        """A session from the text so far, the root included if there is one; with policy `keep`
        what was written alone is part of it."""
        if self._ways.policy == "keep":
            self._text.keep_tail()
        self._session, self._seq, self._streaming = None, -1, None
        text = self._text
        root_given = len(text.settled) > len(text.prompt)
        if self._ways.stream:
            self._received = len(text.settled) - root_given  # no rows: they are for drafting
        self._request = wire.Open(
            seq=0,
            tokens=list(text.settled),
            root_given=root_given,
            known=self._received,
            total=text.total,
            stop_ids=sorted(text.stops),
            sampling=wire.sampling_fields(self._sampling),
        )
        await link.send(self._request)
        opened = await link.receive(wire.Opened, patience=self._ways.patience)
        self._session, self.was_served = opened.session, True
        self._counts.prompts += 1
        return await self._reply(link)

    # ---- requests and replies -------------------------------------------------------------

    @property
    def _link(self) -> Link | None:
        return self._dialler.link

    @property
    def room(self) -> int:
        """Nodes of a draft that server and answer have room for."""
        return min(self._link.welcome.max_nodes, self._text.room - 1)

    async def ask(self, kind: type[Request], *fields: Any) -> None:
        """Sends the next request."""
        self._request = kind(self._seq + 1, *fields)
        await self._link.send(self._request)

    async def reply(self) -> list[wire.Verdict]:
        """The reply to the last request; see `take`."""
        return await self._reply(self._link)

    async def _reply(self, link: Link) -> list[wire.Verdict]:
        """The reply to the last request, without rows of given tokens, which are held at once
        so that no other link has to bring them; replies of before that come again are left out.
        Raises Lost for a part that does not go on from what is here."""
        seq, known, stale = self._request.seq, self._received, 0
        parts: list[wire.Verdict] = []
        while True:
            part = await link.receive(wire.Verdict, patience=self._ways.patience)
            if part.seq < seq and (stale := stale + 1) <= MOST_STALE:
                continue
            known = row_after(part, seq, known, self._text.total)
            if part.more and not isinstance(self._request, wire.Draft):
                self._hold(part)
            else:
                parts.append(part)
            if not part.more:
                return parts

    def _hold(self, part: wire.Verdict) -> None:
        """Keeps rows of tokens that the request gave; raises Lost for others."""
        given = given_text(self._request, part, self._text)
        self._held.append(self._unpack(part, given))
        self._received = part.start + part.count
        self._dialler.moved()

    def held(self) -> list[Part]:
        """Parts that were held and are not any more."""
        found, self._held = self._held, []
        return found

    def take(self, verdicts: Sequence[wire.Verdict]) -> Reply:
        """A whole reply, which the text now goes on with.

        Raises Lost, and has changed nothing, for one that does not answer the last request.
        """
        request, tokens = self._request, verdicts[-1].tokens
        whole = [*self._text.settled, *tokens]
        check(request, verdicts, self._text, self._received)
        parts = [self._unpack(part, whole) for part in verdicts if part.count]
        self._count(len(tokens))
        self._seq, self._received = request.seq, len(whole) - 1
        if tokens:
            self._dialler.moved()
        is_kept = isinstance(request, wire.Read)
        return Reply(tokens, verdicts[-1].done, is_kept, [*self.held(), *parts])

    async def next_part(self) -> Reply:
        """The next part of what the target writes alone; it has to be asked for only once."""
        begin = time.perf_counter()
        if self._streaming is None:
            await self.ask(wire.Stream)
            self._streaming = -1
        part = await self._link.receive(wire.Verdict, patience=self._ways.patience)
        self._counts.waiting_s += time.perf_counter() - begin
        reply = streamed(part, self._request.seq, self._streaming, self._text)
        self._streaming = part.start
        if reply.tokens:
            self._dialler.moved()
        return reply

    def _count(self, committed: int) -> None:
        """One more reply to the last request."""
        if isinstance(self._request, wire.Read):
            self._counts.prompts += 1
        elif isinstance(self._request, wire.Draft):
            self._counts.rounds += 1
            self._counts.drafted += len(self._request.tokens)
            self._counts.accept_lengths.append(committed)
