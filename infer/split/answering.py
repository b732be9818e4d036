"""One answer of a split pair, from the client's side, through everything that a link can do.

    with a link     draft, ask, draft ahead while the reply is under way, take in what it brings
    without one     the drafter goes on alone; its tokens are the unverified tail of the text

    text   prompt | verified ............ root | tail           (text.py)
    rows   the target's (known)  | root          | the drafter's own

A lost link is dialled again beside the writing. Then the session goes on: its last reply, if it
was missed, comes again, and the tail is either a draft like any other (policy `verify`: the
target keeps what it would have written and the rest is rewritten) or committed as it is (`keep`).
Where the server has no such session any more, all committed tokens make a new one.

Nothing that a server sends is taken in before all of it was checked. What does not fit counts as
a lost link, and every reply brings the text forward, so that an answer ends whatever comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from infer.split.link import Denied, Gone, Link, Lost, Server, Traffic, ended
from infer.split.pace import Pace
from infer.split.text import Event, Text
from moa_jax.config import DraftShape, Sampling
from moa_jax.serve import wire
from moa_jax.serve.half import CHUNK, EXACT, MOST_STEPS, DraftHalf
from moa_jax.serve.rows import unpack

Policy = Literal["keep", "verify"]
Request = wire.Open | wire.Draft | wire.Read | wire.Stream
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds between attempts to connect again
PIECE = 8  # tokens that are written alone before anyone sees them
MOST_STALE = 16  # replies of before that may come again while one is waited for


@dataclasses.dataclass(frozen=True)
class Ways:
    """How a client drafts and behaves."""

    shape: DraftShape | None = None  # a tree; None drafts chains
    lengths: tuple[int, ...] = (1, 2, 3, 5, 7, 11, 15)  # levels to choose from; () is plain
    draft_ahead: bool = True
    policy: Policy = "verify"
    prompt_timeout: float = 60.0  # for a reply of a server that lives: a slot may have to come
    reconnect_seconds: float = 30.0  # to wait for a link once the answer is written alone
    slowdown: float = 1.0  # drafting takes this many times as long, to play a slower device
    stream: bool = False  # with no `lengths`: the target writes alone, as behind an API

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels of a draft to choose from; of a tree all or half, for each is a program."""
        if self.shape is None:
            return self.lengths
        most = self.shape.depth - 1
        return tuple(sorted({max(1, most // 2), most}))

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """The trees that may be drafted."""
        if self.shape is None:
            return ()
        return tuple(dataclasses.replace(self.shape, depth=1 + level) for level in self.levels)


@dataclasses.dataclass
class Counts:
    """What one answer cost."""

    rounds: int = 0  # drafts that the server verified
    drafted: int = 0
    ahead: int = 0  # rounds whose draft was made ahead
    prompts: int = 0  # times that the server read tokens: the prompt, and replays
    drops: int = 0  # links that were lost
    rewritten: int = 0  # unverified tokens that the target took back
    drafting_s: float = 0.0
    waiting_s: float = 0.0  # for replies, with nothing to draft
    alone_s: float = 0.0
    bytes_up: int = 0  # of messages; known when the answer has ended
    bytes_down: int = 0
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    round_trips_s: list[float] = dataclasses.field(default_factory=list)


class Part(NamedTuple):
    """Tokens and the target's rows of them, checked."""

    start: int
    tokens: list[int]
    rows: list[Any]


class Answering:
    """Decodes one prompt after the other; nothing here belongs to two of them at once."""

    def __init__(
        self, half: DraftHalf, server: Server | None, ways: Ways, worker: ThreadPoolExecutor
    ) -> None:
        """`worker` has one thread, to which `half` belongs; without a server, all is alone."""
        self.half, self.ways, self.traffic = half, ways, Traffic()
        self._server, self._worker = server, worker
        self.pace = Pace(ways.levels) if ways.levels else None
        self._link: Link | None = None
        self._was_served = False  # a server has opened a session for one answer or another
        self._random = random.Random()

    @property
    def welcome(self) -> wire.Welcome | None:
        """What the server said when it took the connection; None without one."""
        return self._link and self._link.welcome

    async def connect(self) -> None:
        """Says Hello, if there is a server; raises Lost or Denied where it does not welcome us."""
        if self._server is not None and self._link is None:
            try:
                self._link = await self._connected()
            except Gone as error:
                raise Lost(str(error)) from error

    async def warm(self, prompts: Iterable[int]) -> None:
        """Compiles what answers to prompts of these lengths need."""
        replies = range(1, 2 + max(self.ways.levels, default=0))
        counts = [*replies, *(min(length, CHUNK) for length in prompts)]
        await self._on_half(self.half.warm, counts, self.ways.shapes)

    async def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._link is not None:
            with contextlib.suppress(Exception):
                await self._link.close()
            self._link = None

    async def answer(
        self, prompt: Sequence[int], total: int, stop_ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Event]:
        """Yields the answer as it grows; `text`, `done` and `counts` tell the rest.

        Raises Lost if there is no server at the start, Denied if it will not have this client.
        """
        self.text, self._sampling = Text(prompt, total, stop_ids), sampling
        self._known = 0  # rows that the target has filled
        self._blank = 0  # rows of the prompt that say nothing of the target
        self._fed = 0  # rows of the whole text that stand, the drafter's own included
        self._held: list[Part] = []  # of a reply whose end has not come
        self._received = 0  # rows known or held
        self._session: str | None = None
        self._seq = -1  # of the last reply seen
        self._request: Request | None = None  # the last one sent
        self._streaming: int | None = None  # row of a stream's last part, -1 before it
        self._ahead: list[int] = []
        self._denied: Denied | None = None
        self._wait, self._give_up = 0.0, None  # before dialling; when to end the answer alone
        self.counts, self.done = Counts(), ""
        self._before = dataclasses.replace(self.traffic)
        await self._on_half(self.half.reset, sampling)
        if self._server is not None:
            yield self.text.event(await self._begin())
        while not self.done:
            if self._link is None:
                async with contextlib.aclosing(self._alone()) as events:
                    async for event in events:
                        yield event
                continue
            try:
                await (self._streamed() if self.ways.stream else self._round())
            except (Lost, Gone, Denied) as error:
                yield self.text.event(self._drop(error))
            else:
                yield self.text.event()
        await self._finish()

    async def stop(self, count: int) -> None:
        """Ends the answer after so many of its tokens, which hold all that was wanted."""
        self.text.cut(count)
        self.done = "stop"
        await self._finish()
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
                if self._link is None:
                    self._link = await self._connected()
                await self._take(await self._joined(self._link))
                return ""
            except (Lost, Gone) as error:
                notice = self._drop(error)
                if is_last and not self._was_served:
                    raise error if isinstance(error, Lost) else Lost(str(error)) from error
            except Denied:
                self._unlink()
                raise
        return notice

    async def _connected(self) -> Link:
        return await Link.open(self._server, self.half.cfg.vocab_size, self.traffic)

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
        if not self._seq <= found.seq <= self._request.seq:
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
        if self.ways.policy == "keep":
            self.text.keep_tail()
        self._session, self._seq, self._streaming = None, -1, None
        text = self.text
        root_given = len(text.settled) > len(text.prompt)
        if self.ways.stream:
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
        opened = await link.receive(wire.Opened, patience=self.ways.prompt_timeout)
        self._session, self._was_served = opened.session, True
        self.counts.prompts += 1
        return await self._reply(link)

    async def _round(self) -> None:
        """Draft, ask, draft ahead, take in."""
        tokens, parents, ahead = await self._draft()
        begin = time.perf_counter()
        await self._ask(wire.Draft(self._seq + 1, tokens, parents))
        reply, ends = asyncio.create_task(self._reply(self._link)), []
        reply.add_done_callback(lambda _: ends.append(time.perf_counter()))  # whatever is drafted
        try:
            await self._draft_ahead(reply, _levels(parents))
            waiting = time.perf_counter()
            verdicts = await reply
        finally:
            await ended(reply)
        self.counts.waiting_s += time.perf_counter() - waiting
        seconds = ends[0] - begin
        committed = verdicts[-1].tokens
        await self._take(verdicts)
        self.counts.ahead += ahead
        self.counts.round_trips_s.append(seconds)
        if self.pace is not None:
            self.pace.saw_reply(seconds, _levels(parents), len(committed) - 1, ahead)
        # The rows of what follows stand as long as none of those before them came padded.
        right = self._ahead[: len(committed)] == committed and len(committed) <= EXACT
        self._ahead = self._ahead[len(committed) :] if right else []

    async def _streamed(self) -> None:
        """The next part of what the target writes alone."""
        begin = time.perf_counter()
        if self._streaming is None:
            await self._ask(wire.Stream(self._seq + 1))
            self._streaming = -1
        part = await self._link.receive(wire.Verdict, patience=self.ways.prompt_timeout)
        self.counts.waiting_s += time.perf_counter() - begin
        have = len(self.text.settled) - part.start - 1  # after a lost link all parts come again
        in_place = part.seq == self._request.seq and part.start > self._streaming
        new = part.tokens[max(have, 0) :]
        done = self.text.end_of([*self.text.settled, *new])
        ended = done == part.done and bool(done) != part.more
        if not in_place or have < 0 or part.count or not part.tokens or (new and not ended):
            raise Lost("the server sent a part out of place")
        self._streaming = part.start
        if new:
            self.text.settle(new)
            self.done = part.done
            self._wait, self._give_up = 0.0, None

    async def _draft(self) -> tuple[list[int], list[int], bool]:
        """Nodes and parents of the next draft, and whether it was made ahead."""
        room = min(self._link.welcome.max_nodes, self.text.room - 1)
        if self.pace is None or room < 1:
            self._ahead = []
            return [], [], False
        steps, ahead = self.pace.choose(len(self._ahead))
        if ahead:
            tokens = self._ahead[: min(steps, room)]
            return tokens, list(range(len(tokens))), True
        self._ahead = []
        if self.ways.shape is None:
            tokens = self._ahead = await self._chain([], min(steps, room))
            return list(tokens), list(range(len(tokens))), False
        # The tree's own rows give way to those of a chain drafted ahead.
        shape = dataclasses.replace(self.ways.shape, depth=1 + steps)
        begin = time.perf_counter()
        tokens, parents = await self._drafting(self.half.tree, list(self.text.settled), shape)
        self.pace.saw_draft(time.perf_counter() - begin, steps)
        return tokens[:room], parents[:room], False

    async def _draft_ahead(self, reply: asyncio.Task[Any], levels: int) -> None:
        """Goes on along the likeliest path while the reply is under way: the bonus token and
        the next draft, should all of it be right. Token by token, for the reply interrupts none;
        not at all where it is expected before the first token that would be of use."""
        if self.pace is None or not self.ways.draft_ahead or self.half.functions.go_on is None:
            return
        if not self.pace.has_time(levels + 2 - len(self._ahead)):
            return
        wanted = levels + 1 + self.pace.lengths[-1]
        room = self.text.room - 1
        while not reply.done() and len(self._ahead) < min(wanted, room, MOST_STEPS):
            self._ahead += await self._chain(self._ahead, 1)
            await asyncio.sleep(0)

    async def _chain(self, after: list[int], steps: int) -> list[int]:
        begin = time.perf_counter()
        text = [*self.text.whole, *after]
        known = max(self._known, self._blank)
        tokens = await self._drafting(self.half.chain, text, known, steps)
        if self.pace is not None:
            self.pace.saw_draft(time.perf_counter() - begin, len(tokens))
        return tokens

    async def _ask(self, request: wire.Draft | wire.Read | wire.Stream) -> None:
        self._request = request
        await self._link.send(request)

    async def _reply(self, link: Link) -> list[wire.Verdict]:
        """The reply to the last request, without rows of given tokens, which are held at once
        so that no other link has to bring them; replies of before that come again are left out.
        Raises Lost for a part that does not go on from what is here."""
        seq, known, stale = self._request.seq, self._received, 0
        parts: list[wire.Verdict] = []
        while True:
            part = await link.receive(wire.Verdict, patience=self.ways.prompt_timeout)
            if part.seq < seq and (stale := stale + 1) <= MOST_STALE:
                continue
            if part.seq != seq:
                raise Lost(f"the server answered request {part.seq}, not {seq}")
            end = part.start + part.count
            early = part.more and (part.tokens or end <= known)
            if part.start > known or early or end > self.text.total:
                raise Lost("the server sent rows out of place")
            known = max(known, end)
            if part.more and not isinstance(self._request, wire.Draft):
                self._hold(part)
            else:
                parts.append(part)
            if not part.more:
                return parts

    def _hold(self, part: wire.Verdict) -> None:
        """Keeps rows of tokens that the request gave; raises Lost for others."""
        before = [] if isinstance(self._request, wire.Open) else self.text.settled
        given, end = [*before, *self._request.tokens], part.start + part.count
        if end >= len(given):
            raise Lost("the server sent rows out of place")
        self._held.append(self._part(part, given))
        self._received = end
        self._wait, self._give_up = 0.0, None

    async def _take(self, verdicts: Sequence[wire.Verdict]) -> None:
        """A whole reply: new tokens, the end, and the target's rows for the caches.

        Raises Lost, and has changed nothing, for one that does not answer the last request.
        """
        tokens = verdicts[-1].tokens
        text = [*self.text.settled, *tokens]
        self._check(verdicts, text)
        parts = [self._part(part, text) for part in verdicts if part.count]
        self.text.settle(tokens, kept=isinstance(self._request, wire.Read))
        self.done = verdicts[-1].done
        self._count(len(tokens))
        self._seq = self._request.seq
        if tokens:
            self._wait, self._give_up = 0.0, None
        await self._absorb(parts)
        self._known = self._received = len(text) - 1

    def _part(self, part: wire.Verdict, text: Sequence[int]) -> Part:
        """A part's tokens and rows; raises Lost where these are damaged."""
        server = self._server
        try:
            rows = unpack(part.rows, part.count, self.half.leaves, server.codec, server.compress)
        except wire.BadMessage as error:
            raise Lost(f"the server sent {error}") from error
        return Part(part.start, list(text[part.start : part.start + part.count]), rows)

    async def _absorb(self, parts: Sequence[Part] = ()) -> None:
        """Takes in all that is held, and these parts behind it."""
        held, self._held = self._held, []
        for part in (*held, *parts):
            await self._on_half(self.half.absorb, *part)
            self._known = max(self._known, part.start + len(part.tokens))
            if len(part.tokens) > EXACT:  # it came padded, which hides what stood behind it
                self._blank = self._fed = 0

    def _check(self, verdicts: Sequence[wire.Verdict], text: Sequence[int]) -> None:
        """Raise Lost where a reply, with which the text would be this, is none to the request."""
        request, tokens = self._request, verdicts[-1].tokens
        if isinstance(request, wire.Read):
            fits = tokens == request.tokens
        elif isinstance(request, wire.Open):
            fits = len(tokens) == (not request.root_given)
        else:
            fits = 1 <= len(tokens) <= len(request.tokens) + 1
        known = max(self._received, *(part.start + part.count for part in verdicts))
        fits = fits and known == len(text) - 1 and self.text.end_of(text) == verdicts[-1].done
        stopped = not self.text.stops.isdisjoint(tokens[:-1])
        if not fits or stopped or len(text) > self.text.total:
            raise Lost("the server sent a reply that does not fit the request")

    def _count(self, committed: int) -> None:
        """One more reply to the last request."""
        if isinstance(self._request, wire.Read):
            self.counts.prompts += 1
        elif isinstance(self._request, wire.Draft):
            self.counts.rounds += 1
            self.counts.drafted += len(self._request.tokens)
            self.counts.accept_lengths.append(committed)

    async def _finish(self) -> None:
        """The slot goes back; a failure to say so does not matter any more."""
        if self._link is not None:
            try:
                await self._link.send(wire.Close())
            except (Lost, Gone, Denied):
                self._unlink()
        self.counts.bytes_up = self.traffic.bytes_up - self._before.bytes_up
        self.counts.bytes_down = self.traffic.bytes_down - self._before.bytes_down

    def _drop(self, error: Lost | Gone | Denied) -> str:
        """The link is lost; why, as a notice."""
        self.counts.drops += self._link is not None
        self._unlink()
        if isinstance(error, Gone):
            self._session = None
        if isinstance(error, Denied):  # there will be no other link: the rest is written alone
            self._denied = error
            return str(error)
        return f"link lost: {error}"

    def _unlink(self) -> None:
        if self._link is not None:
            self._link.abort()
        self._link = None

    # ---- without one ----------------------------------------------------------------------

    async def _alone(self) -> AsyncIterator[Event]:
        """Writes on while somebody dials; ends with a link, or with the answer."""
        begin = time.perf_counter()
        if not self.text.tail:  # what was drafted ahead begins it
            self.text.write(self._ahead)
            if self._ahead:
                self._fed = len(self.text.whole) - 1
        self._ahead = []
        await self._absorb()
        joining = None
        if self._server is not None and self._denied is None:
            joining = asyncio.create_task(self._join())
        try:
            yield self.text.event()
            async with contextlib.aclosing(self._write(joining)) as events:
                async for event in events:
                    yield event
            missed = None if self.done else await self._wait_for(joining)
            if missed is None and not self.done:
                self._end_alone()
        except Denied as error:
            yield self.text.event(self._drop(error))
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
            yield self.text.event(self._drop(error))
        else:
            yield self.text.event("connected again")

    async def _join(self) -> list[wire.Verdict]:
        """A link, sooner or later, and the reply that was missed; raises Denied where there will
        be none. Each failed attempt lets the next one wait longer."""
        while True:
            await asyncio.sleep(self._wait * self._random.uniform(0.5, 1.5))
            self._wait = min(max(FIRST_WAIT, 2 * self._wait), LONGEST_WAIT)
            try:
                link = await self._connected()
                try:
                    missed = await self._joined(link)
                except BaseException:
                    link.abort()
                    raise
            except (Lost, Gone):
                continue
            self._link = link
            return missed

    async def _wait_for(self, joining: asyncio.Task[Any] | None) -> list[wire.Verdict] | None:
        """What the link brings, if one comes before an answer that is not moving is given up."""
        if joining is None:
            return None
        while not joining.done():
            now = time.monotonic()
            if self._give_up is None:
                self._give_up = now + self.ways.reconnect_seconds
            if now >= self._give_up:
                return None
            await asyncio.wait([joining], timeout=self._give_up - now)
        return joining.result()

    async def _feed(self, joining: asyncio.Task[Any] | None) -> bool:
        """The drafter's own rows for tokens of which none stand; false if a link came first."""
        blank = self.text.prompt[:-1]
        if max(self._known, self._blank) < len(blank):  # the target has not said a thing
            await self._on_half(self.half.absorb_nothing, blank, self._known)
            self._blank, self._fed = len(blank), 0
        whole, known = self.text.whole, max(self._known, self._blank)
        for end in range(max(known, self._fed) + 1, len(whole)):
            await self._drafting(self.half.chain, whole[:end], known, 1)
            self._fed = end
            if joining is not None and joining.done():
                return False
        return True

    @property
    def _can_write(self) -> bool:
        return self.half.functions.go_on is not None and not self.ways.stream

    async def _write(self, joining: asyncio.Task[Any] | None) -> AsyncIterator[Event]:
        """The tail, piece by piece, until it ends the answer or there is a link."""
        while self._can_write and not self.text.is_written:
            if not await self._feed(joining):
                return
            self.text.write(await self._chain([], PIECE))
            self._fed = len(self.text.whole) - 1
            yield self.text.event()
            await asyncio.sleep(0)
            if joining is not None and joining.done():
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
            await self._link.send(wire.Close())  # it committed what nobody here has seen
            missed = await self._opened(self._link)
        if missed:
            await self._take(missed)
            self._replace_tail(missed[-1].tokens)
        while self.text.tail and not self.done:
            await (self._commit_tail() if keeps else self._verify_tail())
            verdicts = await self._reply(self._link)
            await self._take(verdicts)
            self._replace_tail(verdicts[-1].tokens)

    def _replace_tail(self, tokens: Sequence[int]) -> None:
        """The target wrote these where the tail begins."""
        if rewritten := self.text.replace_tail(tokens):
            self.counts.rewritten += rewritten
            self._fed = 0

    async def _verify_tail(self) -> None:
        """The tail as a draft like any other."""
        room = min(self._link.welcome.max_nodes, self.text.room - 1)
        tokens = self.text.tail[:room]
        await self._ask(wire.Draft(self._seq + 1, tokens, list(range(len(tokens)))))

    async def _commit_tail(self) -> None:
        """The tail as it is: the server reads it, and the text goes on behind it."""
        await self._ask(wire.Read(self._seq + 1, list(self.text.tail)))

    # ---- the drafter ----------------------------------------------------------------------

    async def _drafting(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Work of the drafter whose time counts, stretched to that of a slower device."""
        begin = time.perf_counter()
        found = await self._on_half(function, *arguments)
        seconds = time.perf_counter() - begin
        if self.ways.slowdown > 1:
            await asyncio.sleep(seconds * (self.ways.slowdown - 1))
        self.counts.drafting_s += time.perf_counter() - begin
        return found

    def _on_half(self, function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)


def _levels(parents: Sequence[int]) -> int:
    """How deep a draft is."""
    depth = [0]
    for parent in parents:
        depth.append(depth[parent] + 1)
    return max(depth)
