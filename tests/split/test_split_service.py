"""The split service: batches, long prompts between them, and waits and losses of slots."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from infer.split_server.metrics import ServerMetrics
from infer.split_server.service import Service
from infer.split_server.sessions import Encoding, Refused, ReplyBuffer, ServerLimits, SplitSession
from moa_jax.split import protocol
from tests.split.split_server import LIMITS, PATIENCE, ToySlots, next_token, opening, plain

AS_IS = Encoding("float32", False)


def ignore_refusal(refused: Refused) -> None:
    """A callback that ignores the refusal."""


class Work:
    """A service over toy slots, with a clock that the test sets."""

    def __init__(self, slots: ToySlots, limits: ServerLimits, text_of: Any = None) -> None:
        self.slots, self.now, self.events = slots, 0.0, []
        self.metrics = ServerMetrics()
        log = lambda event, **facts: self.events.append((event, facts))
        self.service = Service(slots, limits, self.metrics, log, lambda: self.now, text_of)

    async def open(self, tokens: list[int], **changes) -> SplitSession:
        """Opens a session, and waits until its prompt is read."""
        session = await self.service.open(opening(tokens, **changes), AS_IS, ignore_refusal)
        await verdicts(session.reply)
        return session

    def step(self, session: SplitSession, seq: int = 1) -> ReplyBuffer:
        """Submits a pass without drafts."""
        return self.service.submit(session, protocol.Verify(seq, [], []))

    async def tokens(self, session: SplitSession, seq: int = 1) -> list[int]:
        """Returns the tokens of such a pass."""
        return (await verdicts(self.step(session, seq)))[0].tokens

    def entries(self, kind: str) -> list[tuple]:
        return [entry[1:] for entry in self.slots.diary if entry[0] == kind]


def over_work(
    num_slots: int = 4, chunk: int = 8, text_of: Any = None, **limits: Any
) -> Callable[..., Callable[[], None]]:
    """Runs a test with its own service, in its own event loop."""

    def decorated(check: Callable[[Work], Awaitable[None]]) -> Callable[[], None]:
        async def run() -> None:
            slots = ToySlots(num_slots, chunk)
            given = {"num_slots": num_slots, "chunk": chunk, "max_tokens": 512} | limits
            work = Work(slots, ServerLimits(**given), text_of)
            async with work.service:
                await check(work)
                slots.hold.set()
            assert slots.slots == [None] * len(slots.slots)  # nothing leaks
            assert all(name.startswith("target") for name in slots.threads)  # one thread's alone
            assert text_of or "text" not in {event for event, _ in work.events}

        def test() -> None:
            asyncio.run(run())

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorated


async def verdicts(answer) -> list[protocol.Committed]:
    async with asyncio.timeout(PATIENCE):
        parts = [protocol.decode_down(part, LIMITS) async for part in answer.read()]
    return [part for part in parts if isinstance(part, protocol.Committed)]


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


async def refusal(awaitable) -> tuple[str, str]:
    with pytest.raises(Refused) as error:
        await awaitable
    return error.value.code, error.value.text


@over_work(chunk=4)
async def test_split_rows_that_the_client_has_are_not_sent(work):
    text = list(range(12))
    for known in (0, 3, 4, 12):
        ask = opening(text, root_given=True, known=known)
        session = await work.service.open(ask, AS_IS, ignore_refusal)
        parts = await verdicts(session.reply)
        rows = [i for part in parts for i in range(part.start, part.start + part.count)]
        assert rows == list(range(known, 11)) and not parts[-1].tokens
        assert await work.tokens(session) == [next_token(text)]
        work.service.close(session, "done")


@over_work()
async def test_split_requests_come_one_at_a_time_and_in_order(work):
    session = await work.open([1, 2])
    work.slots.hold.clear()
    answer = work.step(session)
    assert work.step(session) is answer
    for seq, text in ((2, "before the reply"), (0, "was expected"), (7, "was expected")):
        with pytest.raises(Refused, match=text) as error:
            work.step(session, seq)
        assert error.value.code == "state"
    work.slots.hold.set()
    parts = await verdicts(answer)
    assert await verdicts(work.step(session)) == parts
    assert len(work.entries("verify")) == 1


@over_work(num_slots=1, queue_seconds=PATIENCE)
async def test_split_slot_is_waited_for_in_order_and_never_leaks(work):
    held = await work.open([1])
    waiting = [asyncio.create_task(work.open([n])) for n in (2, 3, 4)]
    await until(lambda: work.service._queue.num_waiting == 3)
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    work.service.close(held, "done")
    second = await waiting[1]
    assert not waiting[2].done()
    # The slot is assigned in the moment that the wait is cancelled: it is freed again.
    work.service.close(second, "done")
    waiting[2].cancel()
    await asyncio.gather(waiting[2], return_exceptions=True)
    assert b"split_slots_in_use 0.0" in work.metrics.text()
    await work.open([5])


@over_work(num_slots=1, max_queue=1, queue_seconds=PATIENCE)
async def test_split_queue_has_an_end_and_a_deadline(work):
    await work.open([1])
    waiting = asyncio.create_task(work.open([2]))
    await until(lambda: work.service._queue.num_waiting)
    code, text = await refusal(work.open([3]))
    assert code == "busy" and "queue is full" in text
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    queue = work.service._queue
    queue._limits = dataclasses.replace(queue._limits, queue_seconds=0.05)
    assert "in time" in (await refusal(work.open([2])))[1]
    assert not work.service._queue.num_waiting
    queue._limits = dataclasses.replace(queue._limits, queue_seconds=PATIENCE)
    waiting = asyncio.create_task(work.open([2]))
    await until(lambda: queue.num_waiting)
    work.service.drain()
    assert [(await refusal(each))[0] for each in (waiting, work.open([3]))] == ["draining"] * 2


@over_work(resume_seconds=0.2)  # checked four times in that time
async def test_split_lost_sessions_expire_by_the_clock(work):
    lost, kept = await work.open([1]), await work.open([2])
    work.service.disconnect(lost)
    await asyncio.sleep(0.3)
    assert not lost.closed
    work.now = 0.3
    await until(lambda: lost.closed)
    assert not kept.closed
    ask = protocol.Resume(lost.id, 0)
    with pytest.raises(Refused) as error:
        work.service.resume(ask, AS_IS, ignore_refusal)
    assert error.value.code == "gone"
    assert work.service.num_connected == 1


@over_work(num_slots=3)
async def test_split_longest_lost_session_makes_room(work):
    sessions = [await work.open([n]) for n in range(3)]
    for now, index in ((1.0, 1), (2.0, 0)):
        work.now = now
        work.service.disconnect(sessions[index])
    await work.open([7])
    assert [session.closed for session in sessions] == [False, True, False]
    await work.open([8])
    assert [session.closed for session in sessions] == [True, True, False]


@over_work(num_slots=1)
async def test_split_session_closed_at_work_hands_a_clean_slot_on(work):
    session = await work.open([1, 2])
    work.slots.hold.clear()
    answer = work.step(session)
    await until(lambda: work.entries("verify"))
    work.service.close(session, "done")
    asking = asyncio.create_task(work.open([3, 4]))
    work.slots.hold.set()
    assert (await refusal(verdicts(answer)))[0] == "gone"
    other = await asking
    assert await work.tokens(other) == plain([3, 4], 2)[1:]


@over_work()
async def test_split_failures_end_their_sessions_and_show_in_health(work):
    bystander = await work.open([9])
    for _ in range(3):
        session = await work.open([1, 2])
        work.slots.error = RuntimeError("what users wrote")
        assert (await refusal(work.tokens(session)))[0] == "gone"
        work.slots.error = None
    assert "users" not in repr(work.events)
    assert len([1 for event, _ in work.events if event == "error"]) == 3
    assert work.service.healthy  # a step in between succeeded
    work.slots.error = RuntimeError("again")
    for _ in range(3):
        session = await work.service.open(opening([5]), AS_IS, ignore_refusal)
        await refusal(verdicts(session.reply))
    assert not work.service.healthy
    work.slots.error = None
    await work.tokens(bystander)
    assert work.service.healthy


@over_work()
async def test_split_streams_run_to_the_end_beside_drafts(work):
    streams = [await work.open([n], total=12, known=1) for n in (1, 2)]
    drafting = await work.open([3])
    work.slots.hold.clear()
    answers = [work.service.submit(s, protocol.Stream(1)) for s in streams]
    await until(lambda: work.entries("verify"))
    drafted = work.step(drafting)
    work.slots.hold.set()
    for n, answer in zip((1, 2), answers, strict=True):
        parts = await verdicts(answer)
        assert [token for part in parts for token in part.tokens] == plain([n], 11)[1:]
        assert [part.more for part in parts] == [True] * 9 + [False]
    assert (await verdicts(drafted))[0].tokens == plain([3], 2)[1:]
    assert work.entries("verify")[:2] == [(0, 1), (2, 0, 1)]


@over_work(text_of=str)
async def test_split_text_is_logged_on_request(work):
    await work.open([61, 62, 63])
    texts = [facts["text"] for event, facts in work.events if event == "text"]
    assert texts == ["[61, 62, 63]", str(plain([61, 62, 63], 1))]


@over_work()
async def test_split_stream_pauses_for_a_slow_reader(work):
    session = await work.open([1], total=41)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infer.split_server.service.MOST_UNREAD", 5)
        answer = work.service.submit(session, protocol.Stream(1))
        await until(lambda: session.paused)
        other = await work.open([2])  # no other session waits for it
        await work.tokens(other)
        assert session.paused and 5 <= len(answer.parts) < 20
        with pytest.raises(Refused, match="before the reply"):
            work.service.submit(session, protocol.Stream(2))
        parts = await verdicts(answer)
    assert sum((part.tokens for part in parts), []) == plain([1], 40)[1:]
    assert parts[-1].done == "length"
