"""Whose turn it is: batches, long prompts between them, slots that are waited for and lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from infer.split_server.metrics import ServerMetrics
from infer.split_server.service import Service
from infer.split_server.sessions import Encoding, PendingRead, Refused, ServerLimits, SplitSession
from moa_jax.errors import InputError
from moa_jax.split import protocol
from tests.split.split_server import LIMITS, PATIENCE, Steps, ToySlots, next_token, opening, plain

AS_IS = Encoding("float32", False)


def nobody(refused: Refused) -> None:
    """An owner who does not mind."""


class Work:
    """A service over toy slots, with a clock that the test turns."""

    def __init__(self, slots: ToySlots, limits: ServerLimits) -> None:
        self.slots, self.now, self.events = slots, 0.0, []
        self.metrics = ServerMetrics()
        log = lambda event, **facts: self.events.append((event, facts))
        self.service = Service(slots, limits, self.metrics, log, lambda: self.now)

    async def open(self, tokens: list[int], **changes) -> SplitSession:
        """A session whose prompt has been read."""
        session = await self.service.open(opening(tokens, **changes), AS_IS, nobody)
        await verdicts(session.reply)
        return session

    def entries(self, kind: str) -> list[tuple]:
        return [entry[1:] for entry in self.slots.diary if entry[0] == kind]


@contextlib.asynccontextmanager
async def working(slots: ToySlots | None = None, **limits) -> AsyncIterator[Work]:
    slots = slots or ToySlots()
    given = {"num_slots": len(slots.slots), "chunk": slots.chunk, "max_tokens": 512} | limits
    work = Work(slots, ServerLimits(**given))
    async with work.service:
        yield work
        slots.hold.set()
    assert slots.slots == [None] * len(slots.slots)  # nothing leaks
    assert all(name.startswith("target") for name in slots.threads)  # one thread's alone


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


def test_split_waiting_drafts_become_one_batch():
    async def check():
        async with working() as work:
            sessions = [await work.open([n, n + 1]) for n in range(4)]
            work.slots.hold.clear()
            first = work.service.submit(sessions[0], protocol.Verify(1, [], []))
            await until(lambda: work.entries("verify"))
            rest = [work.service.submit(s, protocol.Verify(1, [], [])) for s in sessions[1:]]
            work.slots.hold.set()
            found = [(await verdicts(answer))[0].tokens for answer in (first, *rest)]
            assert found == [plain([n, n + 1], 2)[1:] for n in range(4)]
            assert work.entries("verify") == [(0,), (1, 2, 3)]
            text = work.metrics.text().decode()
            assert "split_batch_size_count 2.0" in text and "split_batch_size_sum 4.0" in text

    asyncio.run(check())


def test_split_big_draft_has_a_pass_of_its_own():
    async def check():
        async with working() as work:
            sessions = [await work.open([n, n + 1]) for n in range(4)]
            work.slots.hold.clear()
            sizes = (1, 3, 62, 7)  # nodes, the root left out
            drafts = [protocol.Verify(1, list(range(size)), [0] * size) for size in sizes]
            submit = lambda i: work.service.submit(sessions[i], drafts[i])
            answers = [submit(0)]
            await until(lambda: work.entries("verify"))
            answers += [submit(1), submit(2), submit(3)]
            work.slots.hold.set()
            for answer in answers:
                assert (await verdicts(answer))[0].tokens
            # The last one goes with the oldest, the big one in between waits for the next pass.
            assert work.entries("verify") == [(0,), (1, 3), (2,)]

    asyncio.run(check())


def test_split_long_prompt_lets_drafts_through_after_each_chunk():
    async def check():
        async with working(ToySlots(chunk=4)) as work:
            session = await work.open([1, 2])
            read = len(work.entries("read"))
            work.slots.hold = held = Steps()
            long = await work.service.open(opening(list(range(60))), AS_IS, nobody)
            for seq in range(1, 6):
                await until(lambda seq=seq: len(work.entries("read")) == read + seq)
                answer = work.service.submit(session, protocol.Verify(seq, [], []))
                held.step()  # the chunk ends, and the draft is next
                await until(lambda seq=seq: len(work.entries("verify")) == seq)
                assert len(work.entries("read")) == read + seq
                held.step()
                await verdicts(answer)
            assert not long.reply.complete
            held.set()
            assert (await verdicts(long.reply))[-1].tokens == plain(list(range(60)), 1)

    asyncio.run(check())


def test_split_prompts_take_turns_and_their_parts_keep_their_order():
    async def check():
        async with working(ToySlots(chunk=4)) as work:
            work.slots.hold.clear()
            prompts = [list(range(20)), list(range(30, 41))]
            sessions = [
                await work.service.open(opening(prompt), AS_IS, nobody) for prompt in prompts
            ]
            work.slots.hold.set()
            for prompt, session in zip(prompts, sessions, strict=True):
                parts = await verdicts(session.reply)
                starts = [part.start for part in parts]
                assert starts == sorted(starts) and parts[-1].tokens == plain(prompt, 1)
                assert sum(part.count for part in parts) == len(prompt)
            turns = [slot for slot, _ in work.entries("read")]
            assert turns[:8] == [0, 1, 0, 1, 0, 1, 0, 1]

    asyncio.run(check())


@pytest.mark.parametrize("chunk", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 25])
def test_split_chunks_hold_at_most_what_a_pass_takes(chunk, count):
    for pick in (True, False):
        reading, processed = PendingRead(list(range(count)), pick), 0
        while reading.seen < count:
            part = reading.chunk(chunk)
            seen = reading.seen + len(part)
            passed = reading.has_root + len(part) - (not (pick and seen == count))
            assert part and passed <= chunk
            processed += passed
            reading = reading._replace(seen=seen, has_root=True)
        assert processed == count - (not pick)


def test_split_rows_that_the_client_has_are_not_sent():
    async def check():
        async with working(ToySlots(chunk=4)) as work:
            for known in (0, 3, 4, 9, 12):
                text = list(range(12))
                ask = opening(text, root_given=True, known=known)
                session = await work.service.open(ask, AS_IS, nobody)
                parts = await verdicts(session.reply)
                rows = [i for part in parts for i in range(part.start, part.start + part.count)]
                assert rows == list(range(known, 11)) and not parts[-1].tokens
                answer = work.service.submit(session, protocol.Verify(1, [], []))
                assert (await verdicts(answer))[0].tokens == [next_token(text)]
                work.service.close(session, "done")

    asyncio.run(check())


def test_split_requests_come_one_at_a_time_and_in_order():
    async def check():
        async with working() as work:
            session = await work.open([1, 2])
            work.slots.hold.clear()
            answer = work.service.submit(session, protocol.Verify(1, [], []))
            assert work.service.submit(session, protocol.Verify(1, [], [])) is answer
            for seq, text in ((2, "before the reply"), (0, "was expected"), (7, "was expected")):
                with pytest.raises(Refused, match=text) as error:
                    work.service.submit(session, protocol.Verify(seq, [], []))
                assert error.value.code == "state"
            work.slots.hold.set()
            parts = await verdicts(answer)
            assert await verdicts(work.service.submit(session, protocol.Verify(1, [], []))) == parts
            assert len(work.entries("verify")) == 1

    asyncio.run(check())


def test_split_slot_is_waited_for_in_order_and_never_leaks():
    async def check():
        async with working(ToySlots(num_slots=1), queue_seconds=PATIENCE) as work:
            held = await work.open([1])
            waiting = [asyncio.create_task(work.open([n])) for n in (2, 3, 4)]
            await until(lambda: work.service._queue.num_waiting == 3)
            waiting[0].cancel()
            await asyncio.gather(waiting[0], return_exceptions=True)
            work.service.close(held, "done")
            second = await waiting[1]
            assert not waiting[2].done()
            # The slot comes and the wait is over in the same moment: it goes on to nobody.
            work.service.close(second, "done")
            waiting[2].cancel()
            await asyncio.gather(waiting[2], return_exceptions=True)
            assert b"split_slots_in_use 0.0" in work.metrics.text()
            await work.open([5])

    asyncio.run(check())


def test_split_queue_has_an_end_and_a_deadline():
    async def check():
        async with working(ToySlots(num_slots=1), max_queue=1, queue_seconds=PATIENCE) as work:
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
            work.service.drain()
            assert (await refusal(work.open([3])))[0] == "draining"

    asyncio.run(check())


def test_split_drain_ends_the_wait_for_slots():
    async def check():
        async with working(ToySlots(num_slots=1)) as work:
            await work.open([1])
            waiting = asyncio.create_task(work.open([2]))
            await until(lambda: work.service._queue.num_waiting)
            work.service.drain()
            assert (await refusal(waiting))[0] == "draining"

    asyncio.run(check())


def test_split_lost_sessions_expire_by_the_clock():
    async def check():
        async with working(resume_seconds=0.2) as work:  # looked after four times in that time
            lost, kept = await work.open([1]), await work.open([2])
            work.service.disconnect(lost)
            await asyncio.sleep(0.3)
            assert not lost.closed
            work.now = 0.3
            await until(lambda: lost.closed)
            assert not kept.closed
            ask = protocol.Resume(lost.id, 0)
            with pytest.raises(Refused) as error:
                work.service.resume(ask, AS_IS, nobody)
            assert error.value.code == "gone"
            assert work.service.num_connected == 1

    asyncio.run(check())


def test_split_longest_lost_session_makes_room():
    async def check():
        async with working(ToySlots(num_slots=3)) as work:
            sessions = [await work.open([n]) for n in range(3)]
            for now, index in ((1.0, 1), (2.0, 0)):
                work.now = now
                work.service.disconnect(sessions[index])
            await work.open([7])
            assert [session.closed for session in sessions] == [False, True, False]
            await work.open([8])
            assert [session.closed for session in sessions] == [True, True, False]
            reasons = [facts["reason"] for event, facts in work.events if event == "close"]
            assert reasons == ["evicted", "evicted"]

    asyncio.run(check())


def test_split_sessions_lost_while_others_wait_make_room():
    async def check():
        async with working(ToySlots(num_slots=1), resume_seconds=0.4) as work:
            first = await work.open([1])
            waiting = asyncio.create_task(work.open([2]))
            await until(lambda: work.service._queue.num_waiting)
            work.service.disconnect(first)
            await asyncio.wait_for(waiting, PATIENCE)
            assert first.closed

    asyncio.run(check())


def test_split_reply_of_a_client_that_left_is_there_when_it_comes_back():
    async def check():
        async with working() as work:
            session = await work.open([1, 2])
            work.slots.hold.clear()
            work.service.submit(session, protocol.Verify(1, [], []))
            work.service.disconnect(session)
            work.slots.hold.set()
            back = work.service.resume(protocol.Resume(session.id, 0), AS_IS, nobody)
            assert (await verdicts(back.reply))[0].tokens == plain([1, 2], 2)[1:]

    asyncio.run(check())


def test_split_session_closed_at_work_hands_a_clean_slot_on():
    async def check():
        async with working(ToySlots(num_slots=1)) as work:
            session = await work.open([1, 2])
            work.slots.hold.clear()
            answer = work.service.submit(session, protocol.Verify(1, [], []))
            await until(lambda: work.entries("verify"))
            work.service.close(session, "done")
            asking = asyncio.create_task(work.open([3, 4]))
            work.slots.hold.set()
            assert (await refusal(verdicts(answer)))[0] == "gone"
            other = await asking
            parts = await verdicts(work.service.submit(other, protocol.Verify(1, [], [])))
            assert parts[0].tokens == plain([3, 4], 2)[1:]

    asyncio.run(check())


def test_split_failures_end_their_sessions_and_show_in_health():
    async def check():
        async with working() as work:
            bystander = await work.open([9])
            for _ in range(3):
                session = await work.open([1, 2])
                work.slots.error = RuntimeError("what users wrote")
                answer = work.service.submit(session, protocol.Verify(1, [], []))
                assert (await refusal(verdicts(answer)))[0] == "gone"
                work.slots.error = None
            assert "users" not in repr(work.events)
            assert len([1 for event, _ in work.events if event == "error"]) == 3
            assert work.service.healthy  # it worked in between
            work.slots.error = RuntimeError("again")
            for _ in range(3):
                session = await work.service.open(opening([5]), AS_IS, nobody)
                await refusal(verdicts(session.reply))
            assert not work.service.healthy
            work.slots.error = None
            await verdicts(work.service.submit(bystander, protocol.Verify(1, [], [])))
            assert work.service.healthy

    asyncio.run(check())


def test_split_failure_behind_the_target_ends_its_session_and_the_work_goes_on():
    async def check():
        async with working() as work:
            bystander = await work.open([9])
            broken = await work.open([1, 2])
            work.service._text_of = lambda tokens: 1 / 0
            answer = work.service.submit(broken, protocol.Verify(1, [], []))
            assert (await refusal(verdicts(answer)))[0] == "gone"
            work.service._text_of = None
            await verdicts(work.service.submit(bystander, protocol.Verify(1, [], [])))
            assert work.service.healthy
            work.service._tasks[0].cancel()  # as no exception does
            await until(lambda: not work.service.healthy)

    asyncio.run(check())


def test_split_failure_that_takes_the_caches_ends_all_who_have_rows():
    async def check():
        async with working() as work:
            sessions = [await work.open([n]) for n in range(2)]
            work.slots.error, work.slots.lost = RuntimeError("out of memory"), True
            answer = work.service.submit(sessions[0], protocol.Verify(1, [], []))
            assert (await refusal(verdicts(answer)))[0] == "gone"
            work.slots.error, work.slots.lost = None, False
            await until(lambda: sessions[1].closed)
            assert (await refusal(submitted(work, sessions[1], protocol.Verify(1, [], []))))[
                0
            ] == "gone"
            await work.open([5])

    asyncio.run(check())


def test_split_text_is_logged_only_if_asked_for():
    async def check(text_of):
        slots, events = ToySlots(), []
        log = lambda event, **facts: events.append((event, facts))
        limits = ServerLimits(num_slots=4, chunk=8)
        async with Service(slots, limits, ServerMetrics(), log, text_of=text_of) as service:
            session = await service.open(opening([61, 62, 63]), AS_IS, nobody)
            await verdicts(session.reply)
        return [facts["text"] for event, facts in events if event == "text"]

    assert asyncio.run(check(None)) == []
    assert asyncio.run(check(str)) == ["[61, 62, 63]", str(plain([61, 62, 63], 1))]


def test_split_rules_need_a_chunk_with_room():
    with pytest.raises(InputError, match="2 at least"):
        ServerLimits(chunk=1)


def test_split_stream_goes_on_to_the_end_beside_drafts():
    async def check():
        async with working() as work:
            streams = [await work.open([n], total=12, known=1) for n in (1, 2)]
            drafting = await work.open([3])
            work.slots.hold.clear()
            answers = [work.service.submit(s, protocol.Stream(1)) for s in streams]
            await until(lambda: work.entries("verify"))
            drafted = work.service.submit(drafting, protocol.Verify(1, [], []))
            work.slots.hold.set()
            for n, answer in zip((1, 2), answers, strict=True):
                parts = await verdicts(answer)
                assert [token for part in parts for token in part.tokens] == plain([n], 11)[1:]
                assert [part.start for part in parts] == list(range(1, 11))
                assert [part.more for part in parts] == [True] * 9 + [False]
                assert {part.done for part in parts} == {"", "length"} == {"", parts[-1].done}
                assert not any(part.count or part.rows for part in parts)
            assert (await verdicts(drafted))[0].tokens == plain([3], 2)[1:]
            assert work.entries("verify")[:2] == [(0, 1), (2, 0, 1)]
            assert (await refusal(submitted(work, streams[0], protocol.Verify(2, [], []))))[
                0
            ] == "state"
            assert work.service.submit(streams[0], protocol.Stream(1)) is answers[0]

    asyncio.run(check())


async def submitted(work: Work, session: SplitSession, ask: object):
    return work.service.submit(session, ask)


def test_split_stream_pauses_while_its_reader_is_behind(monkeypatch):
    monkeypatch.setattr("infer.split_server.service.MOST_UNREAD", 5)

    async def check():
        async with working() as work:
            session = await work.open([1], total=41)
            before = len(work.entries("verify"))
            work.slots.hold = held = Steps()
            answer = work.service.submit(session, protocol.Stream(1))
            for count in range(1, 7):  # the part before the last is being encoded when it counts
                await until(lambda count=count: len(work.entries("verify")) == before + count)
                held.step()
                await until(lambda count=count: len(answer.parts) == count)
            await until(lambda: session.paused)
            held.set()
            other = await work.open([2])  # and nobody else waits for it
            await verdicts(work.service.submit(other, protocol.Verify(1, [], [])))
            done = len(work.entries("verify")) - 1
            assert done == 6 and session.paused
            assert (await refusal(submitted(work, session, protocol.Stream(2))))[0] == "state"
            parts = await verdicts(answer)
            assert sum((part.tokens for part in parts), []) == plain([1], 40)[1:]
            assert parts[-1].done == "length"

    asyncio.run(check())


def test_split_stream_that_is_closed_stops():
    async def check():
        async with working() as work:
            session = await work.open([1], total=400)
            answer = work.service.submit(session, protocol.Stream(1))
            await until(lambda: len(answer.parts) > 3)
            work.service.close(session, "done")
            done = len(work.entries("verify"))
            other = await work.open([2])
            await verdicts(work.service.submit(other, protocol.Verify(1, [], [])))
            assert len(work.entries("verify")) <= done + 2

    asyncio.run(check())
