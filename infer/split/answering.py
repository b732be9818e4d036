"""One answer of a split pair, from the client's side, through everything that a link can do.

    with a link     draft, ask, draft ahead while the reply is under way, take in what it brings
    without one     the drafter goes on alone; its tokens are the unverified tail of the text

    text   prompt | verified ............ root | tail
    rows   the target's (known)  | root          | the drafter's own

A lost link is dialled again beside the writing. Then the session goes on: its last reply, if it
was missed, comes again, and the tail is either a draft like any other (policy `verify`: the
target keeps what it would have written and the rest is rewritten) or committed as it is (`keep`).
Where the server has no such session any more, all committed tokens make a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from infer.split.link import Denied, Gone, Link, Lost, Server, Traffic
from infer.split.pace import Pace
from moa_jax.config import DraftShape, Sampling
from moa_jax.serve import wire
from moa_jax.serve.half import EXACT, MOST_STEPS, DraftHalf
from moa_jax.serve.rows import unpack

Policy = Literal["keep", "verify"]
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds between attempts to connect again
PIECE = 8  # tokens that are written alone before anyone sees them


class Event(NamedTuple):
    """What a reader learns: tokens at the end of the answer, after `keep` of those before."""

    tokens: list[int]
    keep: int  # generated tokens that stay; fewer than were shown means a rewrite
    verified: int  # of the answer so far, this event included
    notice: str = ""  # of the link


@dataclasses.dataclass(frozen=True)
class Ways:
    """How a client drafts and behaves."""

    shape: DraftShape | None = None  # a tree; None drafts chains
    lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8)  # levels of a draft to choose from; () is plain
    draft_ahead: bool = True
    policy: Policy = "verify"
    offline: bool = False  # never dial at all
    prompt_timeout: float = 60.0  # for the first reply, which may wait for a slot
    reconnect_seconds: float = 30.0  # to wait for a link once the answer is written alone
    slowdown: float = 1.0  # drafting takes this many times as long, to play a slower device
    stream: bool = False  # with no `lengths`: the target writes alone, as behind an API


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
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    round_trips_s: list[float] = dataclasses.field(default_factory=list)


class Answering:
    """Decodes one prompt after the other; nothing here belongs to two of them at once."""

    def __init__(
        self, half: DraftHalf, server: Server | None, ways: Ways, worker: ThreadPoolExecutor
    ) -> None:
        """`worker` has one thread, to which `half` belongs; without a server, all is alone."""
        self.half, self.ways, self.traffic = half, ways, Traffic()
        self._server, self._worker = server, worker
        levels = range(1, ways.shape.depth) if ways.shape else ways.lengths
        self.pace = Pace(levels) if levels else None
        self._link: Link | None = None
        self._random = random.Random()

    async def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._link is not None:
            with contextlib.suppress(Exception):
                await self._link.close()
            self._link = None

    async def answer(
        self, prompt: Sequence[int], total: int, stop_ids: Sequence[int], sampling: Sampling
    ) -> AsyncIterator[Event]:
        """Yields the answer as it grows; `counts`, `tokens` and `verified` tell the rest.

        Raises Lost if there is no server at the start, Denied if it will not have this client.
        """
        self._prompt, self._total = list(prompt), total
        self._stops, self._sampling = frozenset(stop_ids), sampling
        self._text, self._tail, self._known = list(prompt), [], 0
        self._session: str | None = None
        self._seq, self._asked = -1, -1  # last reply seen, last request sent
        self._ahead: list[int] = []
        self._streaming = False  # whether the server goes on without being asked
        self._shown = 0
        self._denied: Denied | None = None
        self.counts, self.done = Counts(), ""
        self._kept = [False] * len(prompt)  # for each token of the text: unverified but kept
        await self._on_half(self.half.reset, sampling)
        if self._server is None:
            await self._on_half(self.half.absorb_nothing, prompt[:-1])
            self._known = len(prompt) - 1
        else:
            await self._begin()
            yield self._event()
        while not self.done:
            if self._link is None:
                async for event in self._alone():
                    yield event
                continue
            try:
                await (self._streamed() if self.ways.stream else self._round())
            except (Lost, Gone) as error:
                await self._drop(error)
                yield self._event(f"link lost: {error}")
                continue
            yield self._event()
        await self._finish()

    async def stop(self, count: int) -> None:
        """Ends the answer after so many of its tokens, which hold all that was wanted."""
        kept = len(self._prompt) + count
        self._text, self._tail = [*self._text, *self._tail][:kept], []
        self._kept, self.done = self._kept[:kept], "stop"
        await self._finish()
        if self.ways.stream:
            await self.close()  # with what is still on its way

    @property
    def tokens(self) -> list[int]:
        """The answer so far."""
        return [*self._text, *self._tail][len(self._prompt) :]

    @property
    def unverified(self) -> int:
        """Tokens of the answer that the target has not chosen."""
        return sum(self._kept) + len(self._tail)

    def _event(self, notice: str = "") -> Event:
        """What is new since the last event."""
        tokens = self.tokens
        same = 0
        for old, new in zip(self._last if self._shown else [], tokens, strict=False):
            if old != new:
                break
            same += 1
        self._last, self._shown = tokens, len(tokens)
        return Event(tokens[same:], same, len(tokens) - self.unverified, notice)

    # ---- with a link ----------------------------------------------------------------------

    async def _begin(self) -> None:
        """The prompt goes up; its rows and the first token come down."""
        try:
            if self._link is None:
                self._link = await Link.open(self._server, self.half.cfg.vocab_size, self.traffic)
            await self._open(root_given=False)
        except (Lost, Gone):  # a connection of before may have died unnoticed: once more
            await self._drop(None)
            self._link = await Link.open(self._server, self.half.cfg.vocab_size, self.traffic)
            await self._open(root_given=False)

    async def _open(self, root_given: bool) -> None:
        """A session from the text so far, the root included if there is one."""
        self._session, self._seq, self._asked = None, -1, 0
        if self.ways.stream:
            self._known = len(self._text)  # no rows: they are for drafting
        await self._link.send(
            wire.Open(
                seq=0,
                tokens=self._text,
                root_given=root_given,
                known=self._known,
                total=self._total,
                stop_ids=sorted(self._stops),
                sampling=wire.sampling_fields(self._sampling),
            )
        )
        opened = await self._link.receive(wire.Opened, timeout=self.ways.prompt_timeout)
        self._session = opened.session
        self.counts.prompts += 1
        await self._take(await self._reply(0, self.ways.prompt_timeout))

    async def _round(self) -> None:
        """Draft, ask, draft ahead, take in."""
        tokens, parents, ahead = await self._draft()
        begin = time.perf_counter()
        await self._ask(wire.Draft(self._asked + 1, tokens, parents))
        reply = asyncio.create_task(self._reply(self._asked))
        try:
            await self._draft_ahead(reply, tokens)
            waiting = time.perf_counter()
            verdicts = await reply
        finally:
            reply.cancel()
            with contextlib.suppress(BaseException):
                await reply
        self.counts.waiting_s += time.perf_counter() - waiting
        seconds = time.perf_counter() - begin
        committed = verdicts[-1].tokens
        self.counts.rounds += 1
        self.counts.drafted += len(tokens)
        self.counts.ahead += ahead
        self.counts.round_trips_s.append(seconds)
        self.counts.accept_lengths.append(len(committed))
        if self.pace is not None:
            levels = _levels(parents)
            self.pace.saw_reply(seconds, levels, len(committed) - 1, ahead)
        await self._take(verdicts)
        # The rows of what follows stand as long as none of those before them came padded.
        right = self._ahead[: len(committed)] == committed and len(committed) <= EXACT
        self._ahead = self._ahead[len(committed) :] if right else []

    async def _streamed(self) -> None:
        """The next part of what the target writes alone."""
        begin = time.perf_counter()
        if not self._streaming:
            await self._ask(wire.Stream(self._asked + 1))
            self._streaming = True
        part = await self._link.receive(wire.Verdict)
        self.counts.waiting_s += time.perf_counter() - begin
        if part.seq < self._asked:
            return
        have = len(self._text) - part.start - 1  # after a lost link all parts come again
        if part.seq > self._asked or part.count or have < 0:
            raise Lost("the server sent a part out of place")
        self._text += part.tokens[have:]
        self._kept += [False] * len(part.tokens[have:])
        self.done = part.done

    async def _draft(self) -> tuple[list[int], list[int], bool]:
        """Nodes and parents of the next draft, and whether it was made ahead."""
        room = min(self._link.welcome.max_nodes, self._total - len(self._text) - 1)
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
        tokens, parents = await self._drafting(self.half.tree, self._text, shape)
        self.pace.saw_draft(time.perf_counter() - begin, steps)
        return tokens[:room], parents[:room], False

    async def _draft_ahead(self, reply: asyncio.Task[Any], drafted: list[int]) -> None:
        """Goes on along the likeliest path while the reply is under way: the bonus token and
        the next draft, should all of it be right."""
        if self.pace is None or not self.ways.draft_ahead or self.half.functions.go_on is None:
            return
        wanted = len(drafted) + 1 + self.pace.lengths[-1]
        room = self._total - len(self._text) - 1
        while not reply.done() and len(self._ahead) < min(wanted, room, MOST_STEPS):
            self._ahead += await self._chain(self._ahead, 1 if self._ahead else len(drafted) or 1)
            await asyncio.sleep(0)

    async def _chain(self, after: list[int], steps: int) -> list[int]:
        begin = time.perf_counter()
        text = [*self._text, *self._tail, *after]
        tokens = await self._drafting(self.half.chain, text, self._known, steps)
        if self.pace is not None:
            self.pace.saw_draft(time.perf_counter() - begin, len(tokens))
        return tokens

    async def _ask(self, request: wire.Draft | wire.Read) -> None:
        self._asked = request.seq
        await self._link.send(request)

    async def _reply(self, seq: int, timeout: float | None = None) -> list[wire.Verdict]:
        """All parts of the reply to a request; replies of before that come again are left out."""
        parts: list[wire.Verdict] = []
        while True:
            part = await self._link.receive(wire.Verdict, timeout=timeout)
            if part.seq < seq:
                continue
            if part.seq > seq:
                raise Lost(f"the server answered request {part.seq} before {seq}")
            parts.append(part)
            if not part.more:
                return parts

    async def _take(self, verdicts: Sequence[wire.Verdict]) -> None:
        """A whole reply: new tokens, the end, and the target's rows for the caches."""
        self._text += verdicts[-1].tokens
        self._kept += [False] * len(verdicts[-1].tokens)
        self.done = verdicts[-1].done
        for part in verdicts:
            if part.start > self._known or part.start + part.count > len(self._text):
                raise Lost("the server sent rows out of place")
            rows = unpack(
                part.rows,
                part.count,
                self.half.leaves,
                self._server.codec,
                self._server.compress,
            )
            if part.count:
                tokens = self._text[part.start : part.start + part.count]
                await self._on_half(self.half.absorb, part.start, tokens, rows)
            self._known = max(self._known, part.start + part.count)
        self._seq = verdicts[-1].seq

    async def _finish(self) -> None:
        """The slot goes back; a failure to say so does not matter any more."""
        if self._link is not None:
            with contextlib.suppress(Lost, Gone, Denied):
                await self._link.send(wire.Close())

    async def _drop(self, error: Exception | None) -> None:
        if self._link is not None:
            self._link.abort()
        self._link = None
        if error is not None:
            self.counts.drops += 1

    # ---- without one ----------------------------------------------------------------------

    async def _alone(self) -> AsyncIterator[Event]:
        """Writes on while somebody dials; ends with a link, or with the answer."""
        begin = time.perf_counter()
        dialling = None
        if self._server is not None and self._denied is None:
            dialling = asyncio.create_task(self._dial())
        try:
            await self._prepare_tail()
            yield self._event()
            async for event in self._write(dialling):
                yield event
            if dialling is not None and not dialling.done() and not self.done:
                await asyncio.wait([dialling], timeout=self.ways.reconnect_seconds)
            self.counts.alone_s += time.perf_counter() - begin
            if dialling is None or not dialling.done():
                self._end_alone()
                yield self._event()
                return
            self._link = dialling.result()
        except Denied as error:  # there will be no other link: what is left is written alone
            self._denied = error
            yield self._event(str(error))
            return
        finally:
            if dialling is not None and not dialling.done():
                dialling.cancel()
                with contextlib.suppress(BaseException):
                    await dialling
        try:
            await self._rejoin()
        except (Lost, Gone) as error:
            await self._drop(error)
        yield self._event("connected again" if self._link else "link lost again")

    async def _prepare_tail(self) -> None:
        """What was drafted ahead begins the tail; an older one is fed to the drafter again."""
        ahead, self._ahead = self._ahead, []
        if not self._tail:
            self._tail = self._cut(ahead)
            return
        whole = [*self._text, *self._tail]
        if self.half.functions.go_on is not None:
            for end in range(len(self._text), len(whole)):
                await self._drafting(self.half.chain, whole[:end], self._known, 1)

    def _cut(self, tokens: Sequence[int]) -> list[int]:
        """Tokens up to the first stop and the answer's limit."""
        room = self._total - len(self._text) - len(self._tail)
        kept = list(tokens[:room])
        stop = next((i for i, token in enumerate(kept) if token in self._stops), None)
        return kept if stop is None else kept[: stop + 1]

    @property
    def _written(self) -> bool:
        """Whether the tail ends the answer."""
        ended = bool(self._tail) and self._tail[-1] in self._stops
        return ended or len(self._text) + len(self._tail) >= self._total

    async def _write(self, dialling: asyncio.Task[Link] | None) -> AsyncIterator[Event]:
        """The tail, piece by piece, until it ends the answer or there is a link."""
        if self.half.functions.go_on is None or self.ways.stream:
            return
        while not self._written and not (dialling and dialling.done()):
            tokens = await self._chain([], PIECE)
            self._tail += self._cut(tokens)
            yield self._event()
            await asyncio.sleep(0)
        if self._written and self.ways.policy == "keep":
            self._end_alone()

    def _end_alone(self) -> None:
        """The answer ends as it was written."""
        ended = self._written
        self._keep_tail()
        self.done = "stop" if self._text[-1] in self._stops else "length"
        if not ended:
            self.done = "lost"

    def _keep_tail(self) -> None:
        self._text += self._tail
        self._kept += [True] * len(self._tail)
        self._tail = []

    async def _dial(self) -> Link:
        """A link, sooner or later; raises Denied where there will be none."""
        wait = FIRST_WAIT
        while True:
            try:
                return await Link.open(self._server, self.half.cfg.vocab_size, self.traffic)
            except Lost:
                await asyncio.sleep(wait * self._random.uniform(0.5, 1.5))
                wait = min(2 * wait, LONGEST_WAIT)

    # ---- together again -------------------------------------------------------------------

    async def _rejoin(self) -> None:
        """The session goes on where the link was lost, or starts again from its tokens."""
        if self.ways.stream:
            return await self._rejoin_stream()
        try:
            missed = await self._resume()
        except Gone:
            await self._replay()
            missed = []
        if missed:
            tokens = missed[-1].tokens
            if self.ways.policy == "keep" and self._tail[: len(tokens)] != tokens:
                await self._link.send(wire.Close())  # it committed what nobody here has seen
                await self._replay()
            else:
                await self._take(missed)
                self._settle(tokens)
        if self.ways.policy == "keep" and self._tail:
            await self._commit_tail()
        while self._tail and not self.done:
            await self._verify_tail()
        self._ahead = []

    async def _resume(self) -> list[wire.Verdict]:
        """The reply that was missed, if one was; raises Gone without a session."""
        if self._session is None:
            raise Gone("no session")
        await self._link.send(wire.Resume(self._session, self._seq))
        found = await self._link.receive(wire.Resumed)
        self._asked = found.seq
        return await self._reply(found.seq) if found.seq > self._seq else []

    async def _rejoin_stream(self) -> None:
        """The stream from its beginning, of which `_streamed` takes what is new."""
        self._streaming = False
        try:
            if self._session is None or self._seq < 0:
                raise Gone("no session")
            await self._link.send(wire.Resume(self._session, self._seq))
            found = await self._link.receive(wire.Resumed)
            self._asked, self._streaming = found.seq, found.seq > self._seq
        except Gone:
            await self._replay()

    async def _replay(self) -> None:
        """A new session from all committed tokens; with `keep`, the tail is one of them."""
        if self.ways.policy == "keep":
            self._keep_tail()
        await self._open(root_given=len(self._text) > len(self._prompt))

    def _settle(self, tokens: Sequence[int]) -> None:
        """Takes what the target wrote off the tail; where they differ, all of the tail."""
        count = len(tokens)
        if self._tail[:count] == list(tokens[: len(self._tail)]):
            self._tail = self._tail[count:]
        else:
            self.counts.rewritten += len(self._tail)
            self._tail = []

    async def _verify_tail(self) -> None:
        """The tail as a draft like any other."""
        room = min(self._link.welcome.max_nodes, self._total - len(self._text) - 1)
        tokens = self._tail[:room]
        await self._ask(wire.Draft(self._asked + 1, tokens, list(range(len(tokens)))))
        verdicts = await self._reply(self._asked)
        self.counts.rounds += 1
        self.counts.drafted += len(tokens)
        self.counts.accept_lengths.append(len(verdicts[-1].tokens))
        await self._take(verdicts)
        self._settle(verdicts[-1].tokens)

    async def _commit_tail(self) -> None:
        """The tail as it is: the server reads it, and the text goes on behind it."""
        tail = self._tail
        await self._ask(wire.Read(self._asked + 1, tail))
        verdicts = await self._reply(self._asked)
        self.counts.prompts += 1
        self._keep_tail()
        verdicts[-1] = dataclasses.replace(verdicts[-1], tokens=[])  # they are in the text
        await self._take(verdicts)

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
