"""The client side of one answer, with or without a working link.

    with a link     draft, send the draft, draft ahead while the reply is pending, apply the reply
    without a link  the drafter decodes alone; its tokens are the unverified tail of the sequence

    tokens   prompt | verified ............ root | tail                  (state.py)
    rows     the target's (known)  | root        | the drafter's own     (drafter.py)

While the drafter decodes alone, a task reconnects and resumes the session (session.py); the server
repeats the last reply if the client missed it. With policy `verify` the tail then becomes a draft:
the target accepts the tokens that it would have chosen, and the rest is rewritten. With policy
`keep` the tail is committed without verification. If the server no longer has the session, the
client opens a new session with all committed tokens.

The client checks a complete reply before it uses any of its content (replies.py). An invalid reply
counts as a lost link. Every valid reply extends the sequence, so every answer ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from infer.split_client.drafter import SequenceDrafter, chain_of
from infer.split_client.link import ConnectionLost, Refused, ServerAddress, ended
from infer.split_client.session import RemoteSession
from infer.split_client.state import AnswerEvent, AnswerText, ClientOptions, Counts
from moa_jax.config import Sampling
from moa_jax.split import protocol
from moa_jax.split.client_drafter import ClientDrafter


class SplitClient:
    """Answers prompts one at a time, with a session on a server and a drafter."""

    def __init__(
        self,
        drafter: ClientDrafter,
        server: ServerAddress | None,
        options: ClientOptions,
        worker: ThreadPoolExecutor,
    ) -> None:
        """Calls `drafter` only on the single thread of `worker`; `server` None decodes offline."""
        self.options = options
        self.session = RemoteSession(server, drafter.cfg.vocab_size, drafter.leaves, options)
        self.drafter = SequenceDrafter(drafter, worker, options)

    async def answer(
        self, prompt: Sequence[int], total: int, stop_ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[AnswerEvent]:
        """Yields an event per change of the answer; `text`, `done` and `counts` hold its state.

        Prompt and answer have at most `total` tokens. Raises ConnectionLost if the server is
        unreachable at the start, and Refused if the server refuses this client.
        """
        self.text, self.counts, self.done = AnswerText(prompt, total, stop_ids), Counts(), ""
        self.session.begin(self.text, sampling, self.counts)
        await self.drafter.begin(self.text, sampling, self.counts)
        if self.session.can_dial:
            yield self.text.event(await self._begin())
        while not self.done:
            try:
                if self.session.link is None:
                    async with contextlib.aclosing(self._alone()) as events:
                        async for event in events:
                            yield event
                    continue
                if self.options.stream:
                    self.done = await self.session.next_part()
                else:
                    await self._round()
                yield self.text.event()
            except (ConnectionLost, Refused) as error:
                yield self.text.event(self.session.disconnect(error))
        await self.session.finish()

    async def stop(self, count: int) -> None:
        """Ends the answer early and keeps its first `count` tokens."""
        self.text.cut(count)
        self.done = "stop"
        await self.session.finish()
        if self.options.stream:
            await self.session.close()  # discards the parts still in flight

    # ---- with a link ----------------------------------------------------------------------

    async def _begin(self) -> str:
        """Sends the prompt, applies its rows and the first token; returns a notice.

        Tries twice, because the connection may have failed unnoticed since the last answer. After a
        second failure the drafter starts alone; raises ConnectionLost if no server ever opened a
        session.
        """
        for is_last in (False, True):
            try:
                await self._take(await self.session.ensure_session())
                return ""
            except ConnectionLost as error:
                notice = self.session.disconnect(error)
                if is_last and not self.session.was_served:
                    raise
            except Refused:
                self.session.cut()
                raise
        return notice

    async def _round(self) -> None:
        """One round: draft, send the draft, draft ahead, apply the reply."""
        plan = await self.drafter.draft(self.session.room)
        begin = time.perf_counter()
        await self.session.ask(protocol.Verify, plan.tokens, plan.parents)
        reply, ends = asyncio.create_task(self.session.reply()), []
        # The round trip ends when the reply arrives, even if a token is still being drafted.
        reply.add_done_callback(lambda _: ends.append(time.perf_counter()))
        try:
            await self.drafter.draft_ahead(plan, reply.done)
            waiting = time.perf_counter()
            parts = await reply
        finally:
            await ended(reply)
        self.counts.waiting_s += time.perf_counter() - waiting
        seconds = ends[0] - begin
        committed = await self._take(parts)
        self.counts.ahead += plan.ahead
        self.counts.round_trips_s.append(seconds)
        self.drafter.saw_reply(plan, committed, seconds)

    async def _take(self, parts: Sequence[protocol.Committed]) -> list[int]:
        """Applies a complete reply to the sequence and the caches; returns its tokens.

        Raises ConnectionLost, and changes nothing, for a reply that does not fit the last request.
        """
        reply = self.session.apply_reply(parts)
        self.done = reply.done
        await self.drafter.absorb(reply.parts)
        return reply.tokens

    # ---- without a link -------------------------------------------------------------------

    async def _alone(self) -> AsyncIterator[AnswerEvent]:
        """Decodes alone while a task reconnects, until linked or until the answer ends.

        Raises ConnectionLost if the new link fails, and Refused if the server refuses this client.
        """
        begin = time.perf_counter()
        self.drafter.begin_tail()
        await self.drafter.absorb(self.session.take_held())
        joining = asyncio.create_task(self.session.join()) if self.session.can_dial else None
        is_back = lambda: joining is not None and joining.done()
        missed = None
        try:
            yield self.text.event()
            while self.drafter.can_write and not self.text.is_written and not is_back():
                if not await self.drafter.write(is_back):
                    break
                yield self.text.event()
                await asyncio.sleep(0)
            if self.text.is_written and self.options.policy == "keep" and not is_back():
                self._end_alone()
            if joining is not None and not self.done:
                missed = await self.session.backoff.wait_for(joining)
            if missed is None and not self.done:
                self._end_alone()
        finally:
            self.counts.alone_s += time.perf_counter() - begin
            await ended(joining)
        if not self.done:
            await self._settle_up(missed)
            yield self.text.event("connected again")
        else:
            yield self.text.event()

    def _end_alone(self) -> None:
        """Ends the answer with its tail unverified."""
        self.text.keep_tail()
        self.done = self.text.end_of(self.text.committed) or "lost"

    # ---- reconnected ----------------------------------------------------------------------

    async def _settle_up(self, missed: list[protocol.Committed]) -> None:
        """Applies the missed reply; then the target verifies or commits the tail."""
        keeps = self.options.policy == "keep"
        if missed and keeps and self.text.differs(missed[-1].tokens):
            missed = await self.session.reopen()  # replaces tokens never shown to a reader
        if missed:
            self._replace_tail(await self._take(missed))
        while self.text.unverified and not self.done:
            if keeps:
                await self.session.ask(protocol.Read, list(self.text.unverified))
            else:
                await self._verify_tail()
            self._replace_tail(await self._take(await self.session.reply()))

    def _replace_tail(self, tokens: Sequence[int]) -> None:
        """Updates the tail after the target committed `tokens` at its start."""
        if rewritten := self.text.replace_tail(tokens):
            self.counts.rewritten += rewritten
            self.drafter.tail_rewritten()

    async def _verify_tail(self) -> None:
        """Sends the tail as a draft."""
        plan = chain_of(self.text.unverified[: self.session.room])
        await self.session.ask(protocol.Verify, plan.tokens, plan.parents)
