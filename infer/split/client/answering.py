"""One answer of a split pair, from the client's side, through everything that a link can do.

    with a link     draft, ask, draft ahead while the reply is under way, take in what it brings
    without one     the drafter goes on alone; its tokens are the unverified tail of the text

    text   prompt | verified ............ root | tail           (text.py)
    rows   the target's (known)  | root          | the drafter's own     (desk.py)

A lost link is dialled again beside the writing (dialler.py). Then the session goes on (contact.py):
its last reply, if it was missed, comes again, and the tail is either a draft like any other (policy
`verify`: the target keeps what it would have written and the rest is rewritten) or committed as it
is (`keep`). Where the server has no such session any more, all committed tokens make a new one.

Nothing that a server sends is taken in before all of it was checked (replies.py). What does not
fit counts as a lost link, and every reply brings the text forward, so that an answer ends whatever
comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from infer.split.client.contact import Contact
from infer.split.client.desk import Desk, chain_of
from infer.split.client.dialler import Dialler
from infer.split.client.replies import Unpacker
from infer.split.client.text import Event, Text
from infer.split.client.ways import Counts, Ways
from infer.split.link import Denied, Gone, Lost, Server, Traffic, ended
from moa_jax.config import Sampling
from moa_jax.split import wire
from moa_jax.split.half import DraftHalf


class Answering:
    """Decodes one prompt after the other; nothing here belongs to two of them at once."""

    def __init__(
        self, half: DraftHalf, server: Server | None, ways: Ways, worker: ThreadPoolExecutor
    ) -> None:
        """`worker` has one thread, to which `half` belongs; without a server, all is alone."""
        self.ways = ways
        self._dialler = Dialler(server, half.cfg.vocab_size, ways.reconnect_seconds)
        self._contact = Contact(self._dialler, Unpacker(half.leaves, server), ways)
        self._desk = Desk(half, worker, ways)

    @property
    def welcome(self) -> wire.Welcome | None:
        """What the server said when it took the connection; None without one."""
        return self._dialler.link and self._dialler.link.welcome

    @property
    def is_linked(self) -> bool:
        """Whether the answer goes through a link just now."""
        return self._dialler.link is not None

    @property
    def traffic(self) -> Traffic:
        """What all answers so far cost the network."""
        return self._dialler.traffic

    async def connect(self) -> None:
        """Says Hello, if there is a server; raises Lost or Denied where it does not welcome us."""
        await self._dialler.connect()

    async def warm(self, prompts: Iterable[int]) -> None:
        """Compiles what answers to prompts of these lengths need."""
        await self._desk.warm(prompts)

    async def close(self) -> None:
        """Ends the connection, if there is one."""
        await self._dialler.close()

    async def answer(
        self, prompt: Sequence[int], total: int, stop_ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Event]:
        """Yields the answer as it grows; `text`, `done` and `counts` tell the rest.

        Raises Lost if there is no server at the start, Denied if it will not have this client.
        """
        self.text, self.counts, self.done = Text(prompt, total, stop_ids), Counts(), ""
        self._contact.begin(self.text, sampling, self.counts)
        await self._desk.begin(self.text, sampling, self.counts)
        if self._dialler.has_server:
            yield self.text.event(await self._begin())
        while not self.done:
            if not self.is_linked:
                async with contextlib.aclosing(self._alone()) as events:
                    async for event in events:
                        yield event
                continue
            try:
                await (self._streamed() if self.ways.stream else self._round())
            except (Lost, Gone, Denied) as error:
                yield self.text.event(self._contact.drop(error))
            else:
                yield self.text.event()
        await self._contact.finish()

    async def stop(self, count: int) -> None:
        """Ends the answer after so many of its tokens, which hold all that was wanted."""
        self.text.cut(count)
        self.done = "stop"
        await self._contact.finish()
        if self.ways.stream:
            await self.close()  # with what is still on its way

    # ---- with a link ----------------------------------------------------------------------

    async def _begin(self) -> str:
        """The prompt goes up; its rows and the first token come down. Returns a notice.

        A connection of before may have died unnoticed, so the second attempt counts. Without a
        link after that, an answer of a server that was there before is begun alone.
        """
        for is_last in (False, True):
            try:
                await self._take(await self._contact.reach())
                return ""
            except (Lost, Gone) as error:
                notice = self._contact.drop(error)
                if is_last and not self._contact.was_served:
                    raise error if isinstance(error, Lost) else Lost(str(error)) from error
            except Denied:
                self._dialler.cut()
                raise
        return notice

    async def _round(self) -> None:
        """Draft, ask, draft ahead, take in."""
        plan = await self._desk.draft(self._contact.room)
        begin = time.perf_counter()
        await self._contact.ask(wire.Draft, plan.tokens, plan.parents)
        reply, ends = asyncio.create_task(self._contact.reply()), []
        reply.add_done_callback(lambda _: ends.append(time.perf_counter()))  # whatever is drafted
        try:
            await self._desk.draft_ahead(plan, reply.done)
            waiting = time.perf_counter()
            verdicts = await reply
        finally:
            await ended(reply)
        self.counts.waiting_s += time.perf_counter() - waiting
        seconds = ends[0] - begin
        committed = await self._take(verdicts)
        self.counts.ahead += plan.ahead
        self.counts.round_trips_s.append(seconds)
        self._desk.saw_reply(plan, committed, seconds)

    async def _streamed(self) -> None:
        """The next part of what the target writes alone."""
        reply = await self._contact.next_part()
        self.text.settle(reply.tokens)
        self.done = reply.done

    async def _take(self, verdicts: Sequence[wire.Verdict]) -> list[int]:
        """A whole reply goes into text and caches; its tokens.

        Raises Lost, and has changed nothing, for one that does not answer the last request.
        """
        reply = self._contact.take(verdicts)
        self.text.settle(reply.tokens, kept=reply.kept)
        self.done = reply.done
        await self._desk.absorb(reply.parts)
        return reply.tokens

    # ---- without one ----------------------------------------------------------------------

    async def _alone(self) -> AsyncIterator[Event]:
        """Writes on while somebody dials; ends with a link, or with the answer."""
        begin = time.perf_counter()
        self._desk.begin_tail()
        await self._desk.absorb(self._contact.held())
        joining = asyncio.create_task(self._contact.join()) if self._dialler.can_dial else None
        try:
            yield self.text.event()
            is_back = lambda: joining is not None and joining.done()  # noqa: E731
            async with contextlib.aclosing(self._write(is_back)) as events:
                async for event in events:
                    yield event
            missed = None if self.done else await self._dialler.wait_for(joining)
            if missed is None and not self.done:
                self._end_alone()
        except Denied as error:
            yield self.text.event(self._contact.drop(error))
            return
        finally:
            self.counts.alone_s += time.perf_counter() - begin
            await ended(joining)
        if self.done:
            yield self.text.event()
            return
        try:
            await self._settle_up(missed)
        except (Lost, Gone, Denied) as error:
            yield self.text.event(self._contact.drop(error))
        else:
            yield self.text.event("connected again")

    async def _write(self, is_back: Callable[[], bool]) -> AsyncIterator[Event]:
        """The tail, piece by piece, until it ends the answer or there is a link."""
        while self._desk.can_write and not self.text.is_written:
            if not await self._desk.write(is_back):
                return
            yield self.text.event()
            await asyncio.sleep(0)
            if is_back():
                return
        if self.text.is_written and self.ways.policy == "keep":
            self._end_alone()

    def _end_alone(self) -> None:
        """The answer ends as it was written."""
        self.text.keep_tail()
        self.done = self.text.end_of(self.text.settled) or "lost"

    # ---- together again -------------------------------------------------------------------

    async def _settle_up(self, missed: list[wire.Verdict]) -> None:
        """Takes in what the link brought; the target reads or verifies the tail."""
        keeps = self.ways.policy == "keep"
        if missed and keeps and self.text.differs(missed[-1].tokens):
            missed = await self._contact.reopen()  # it committed what nobody here has seen
        if missed:
            self._replace_tail(await self._take(missed))
        while self.text.tail and not self.done:
            await (self._commit_tail() if keeps else self._verify_tail())
            self._replace_tail(await self._take(await self._contact.reply()))

    def _replace_tail(self, tokens: Sequence[int]) -> None:
        """The target wrote these where the tail begins."""
        if rewritten := self.text.replace_tail(tokens):
            self.counts.rewritten += rewritten
            self._desk.tail_rewritten()

    async def _verify_tail(self) -> None:
        """The tail as a draft like any other."""
        plan = chain_of(self.text.tail[: self._contact.room])
        await self._contact.ask(wire.Draft, plan.tokens, plan.parents)

    async def _commit_tail(self) -> None:
        """The tail as it is: the server reads it, and the text goes on behind it."""
        await self._contact.ask(wire.Read, list(self.text.tail))
