"""Many answers at once: each is that of plain decoding alone, whatever happens beside it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.auto import PLAIN
from moa_jax.decode.costs import Costs
from moa_jax.decode.engine import Engine, Request
from moa_jax.decode.engine.engine import MOST_REHEARSALS
from moa_jax.decode.engine.load import COUNTED
from moa_jax.decode.engine.prefixes import LEAST_REUSED, Kept, Prefixes
from moa_jax.decode.engine.rows import EVERY
from moa_jax.decode.order import MOST_CHUNKS
from moa_jax.model import attention
from tests.decode.engines import (
    CHAIN,
    LAWS,
    LONG,
    NO_STOP,
    TREE,
    WAIT_S,
    Listener,
    alone,
    answers,
    assert_as_alone,
    engine_of,
    kept,
    mixed,
    serving,
)
from tests.decode.test_chunks import KINDS, drafter, target
from tests.meeting import wait_for


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (None, CHAIN),
        pytest.param("moa-1", CHAIN, marks=pytest.mark.slow),
        pytest.param("eagle3", TREE, marks=pytest.mark.slow),
        pytest.param("lookup", CHAIN, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_plain_decoding_alone(name, shape):
    """Twenty requests on four seats."""
    requests = mixed(20, 1)
    assert_as_alone(requests, answers(serving(name, shape), requests))


def test_counters_have_the_figures_of_sessions(monkeypatch):
    """A round that the limit truncates is counted, but does not tell what the target accepts."""
    engine, accepted = serving("moa-1"), []
    monkeypatch.setattr(engine._pace, "heard", lambda way, counts, rounds: accepted.extend(counts))
    session = Session(target(), drafter("moa-1"), CHAIN, chunk=32)
    requests, before = (
        [Request((index, 9, 2), 20 + index, NO_STOP) for index in range(4)],
        engine.load(),
    )
    for request in requests:
        answers(engine, [request])
    prompts, lengths = zip(
        *((each.prompt_ids, each.max_new_tokens) for each in requests), strict=True
    )
    results, now = session.generate(prompts, list(lengths), NO_STOP), engine.load()
    rounds = [[length - 1 for length in result.accept_lengths] for result in results]
    assert max(map(max, rounds)) > 0 and accepted == sum((each[:-1] for each in rounds), [])
    new = {name: getattr(now, name) - getattr(before, name) for name in COUNTED}
    assert new["prompt_tokens"] == 3 * len(requests) and new["generated_tokens"] == sum(lengths)
    assert new["drafts"] == sum(map(len, rounds))
    assert new["drafted_tokens"] == sum(sum(result.drafted) for result in results)
    by_position = [
        sum(count > position for count in sum(rounds, [])) for position in range(CHAIN.levels - 1)
    ]
    pairs = zip(now.accepted_by_position, before.accepted_by_position, strict=True)
    assert [one - other for one, other in pairs] == by_position
    assert now.accepted_tokens - before.accepted_tokens == sum(by_position)


@pytest.mark.slow  # those of prompts are quick, in test_prompt_logprobs.py
@pytest.mark.parametrize("name", [None, "eagle3"])
def test_log_probabilities_come_with_the_tokens(name, started):
    """Those of a session, beside requests that want none and in any settings."""
    engine = started(engine_of(name, num_slots=3))
    requests = mixed(9, 8)
    wanted = [None, 0, 3, None, 20, 1, 2, None, 5]
    asking = [replace(r, top_logprobs=k) for r, k in zip(requests, wanted, strict=True)]
    found = answers(engine, asking)
    assert_as_alone(requests, found)
    session = Session(target(), top_logprobs=20)
    for request, listener, count in zip(requests, found, wanted, strict=True):
        likely = [each for news in listener.all for each in news.logprobs]
        if count is None:
            assert not likely
            continue
        settings = (request.max_new_tokens, list(request.stop_ids), [request.sampling])
        (row,) = session.generate([list(request.prompt_ids)], *settings)
        assert [len(each.top) for each in likely] == [count] * len(row.token_ids)
        for ours, theirs in zip(likely, row.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            values = [[value for _, value in each.top[:count]] for each in (ours, theirs)]
            assert values[0] == pytest.approx(values[1], abs=1e-4)


# ---- ways ---------------------------------------------------------------------------------


def serving_ways() -> Engine:
    """One that may choose, so that its drafter may be late."""

    def make() -> Engine:
        engine = engine_of("eagle3", CHAIN, ways=(TREE, LONG))
        for way in engine.shelf.ways:
            engine.shelf.make_call(engine.shelf.largest, way, EVERY)
        return engine

    return kept("ways", make)


@pytest.mark.slow
def test_every_way_gives_the_same_texts(monkeypatch):
    """From each way to each other one, with drafters that wait behind rounds of plain decoding."""
    engine = serving_ways()
    turns = itertools.cycle([(CHAIN, 2), (PLAIN, 3), (TREE, 1), (PLAIN, 7), (LONG, 2)])
    there = lambda batch, programs, *alone: next(turn for turn in turns if turn[0] in programs)
    monkeypatch.setattr(engine._pace, "_way", there)
    requests = mixed(10, 4)
    assert_as_alone(requests, answers(engine, requests))
    assert set(engine.load().rounds_by_way) == {CHAIN, PLAIN, TREE, LONG}


@pytest.mark.slow
def test_texts_of_any_length_are_read_as_far_as_the_longest_is_used(monkeypatch):
    """A quarter, a half and all of the caches, by chains, trees and plain rounds."""
    monkeypatch.setattr(attention, "LONG", 16)
    engine = engine_of("moa-1", CHAIN, ways=(TREE,), max_tokens=170)
    for way in engine.shelf.ways:
        engine.shelf.make_call(engine.shelf.largest, way, EVERY)
    engine.start()
    turns = itertools.cycle([(CHAIN, 2), (PLAIN, 3), (TREE, 1), (PLAIN, 7)])
    there = lambda batch, programs, *alone: next(turn for turn in turns if turn[0] in programs)
    monkeypatch.setattr(engine._pace, "_way", there)
    requests = [Request(tuple(range(2, 40)), 130, NO_STOP), *mixed(10, 4)]
    requests += [Request((5, 9, index), 60, NO_STOP) for index in range(3)]
    try:
        assert_as_alone(requests, answers(engine, requests))
    finally:
        engine.close()
    assert set(engine.load().rounds_by_way) == {CHAIN, PLAIN, TREE}


@pytest.mark.slow
def test_costs_decide_for_a_batch_that_the_table_knows(monkeypatch):
    engine, costs = serving_ways(), Costs(None)
    one = engine.shelf.largest._replace(slots=1)  # the first request may be alone for a call
    engine.shelf.make_call(one, PLAIN, EVERY)
    ms = {PLAIN: 1.0, CHAIN: 50.0, LONG: 60.0, TREE: 70.0}
    for slots, (way, cost) in itertools.product(engine.shelf.slots, ms.items()):
        costs.put(slots, way, cost)
    monkeypatch.setattr(engine._pace, "_costs", costs)
    monkeypatch.setattr(engine._pace, "_round_s", {})
    monkeypatch.setattr(engine._pace, "unsure", lambda programs: None)
    before = engine.load().rounds_by_way
    requests = [Request((5, 9, index), 60, NO_STOP) for index in range(3)]
    assert_as_alone(requests, answers(engine, requests))
    rounds = Counter(engine.load().rounds_by_way) - Counter(before)
    assert rounds[PLAIN] > 0.8 * rounds.total()


def test_a_drafter_without_weights_begins_with_plain_rounds():
    """Those are compiled before any request is taken; until calls were timed nothing is drafted."""
    first = lambda name: engine_of(name, CHAIN, ways=(LONG,), num_slots=2).shelf.ways_for(1)[0]
    assert (first("lookup"), first("moa-1")) == (PLAIN, CHAIN)


def test_calls_are_timed_while_nobody_is_there(started):
    """So whoever comes next meets no trials; and texts are as ever."""
    engine = engine_of("lookup", CHAIN, ways=(LONG,), num_slots=1)
    for way in engine.shelf.ways:
        engine.shelf.make_call(engine.shelf.largest, way, EVERY)
    calls = {call: call[1] for call in engine.shelf.calls()}
    assert set(calls.values()) == {PLAIN, CHAIN, LONG}
    started(engine)
    for _ in range(100):
        if engine._pace.unsure(calls) is None:
            break
        time.sleep(0.1)
    assert engine._pace.unsure(calls) is None
    request = Request((5, 9, 2), 40, NO_STOP)
    assert_as_alone([request], answers(engine, [request]))
    assert engine._pace._tried is None and engine._pace._num_calls > 0


def test_a_text_that_begins_alone_is_another_one(monkeypatch):
    engine, begun = serving("lookup"), []
    note = lambda tokens: begun.append((tokens, len(engine._seats.texts)))
    monkeypatch.setattr(engine._pace, "begins", note)
    for request in [Request((5, 9, index), 12, NO_STOP) for index in range(3)]:
        assert_as_alone([request], answers(engine, [request]))
    assert begun == [(3, 0)] * 3
    joined = []
    monkeypatch.setattr(engine._pace, "joins", lambda tokens, others: joined.append(others))
    two = [Request((5, 9, index), 30, NO_STOP) for index in range(2)]
    assert_as_alone(two, answers(engine, two))
    assert len(begun) + len(joined) == 5 and joined


def test_no_call_is_timed_between_two_requests(started, monkeypatch):
    """As of a client who asks again at once: the next request would wait for it."""
    monkeypatch.setattr("moa_jax.decode.engine.engine.QUIET_S", 60.0)
    engine = engine_of("lookup", CHAIN, ways=(LONG,), num_slots=1)
    request = Request((5, 9, 2), 10, NO_STOP)
    for _ in range(3):
        assert_as_alone([request], answers(started(engine), [request]))
    assert not engine._rehearsals


def test_nothing_is_tried_or_learned_behind_a_prompt(started, monkeypatch):
    """Such a call takes as long as what is left of the prompt and itself, which nobody can tell."""
    engine = engine_of("lookup", CHAIN, ways=(LONG,), num_slots=1)
    monkeypatch.setattr("moa_jax.decode.engine.engine.QUIET_S", 60.0)
    choose, learned, tries = engine._pace.choose, [], []

    def chosen(slots, programs, hurry, can_try, sent, unread):
        tries.append(can_try)
        return choose(slots, programs, hurry, can_try, sent, unread)[0], 2

    monkeypatch.setattr(engine._pace, "choose", chosen)
    monkeypatch.setattr(engine._pace, "took_with_chunk", lambda *call: learned.append(call))
    monkeypatch.setattr(engine._maker, "make", lambda wanted: None)
    request = Request(tuple(5 + i % 50 for i in range(70)), 40, NO_STOP)  # three chunks
    assert_as_alone([request], answers(started(engine), [request]))
    assert not tries[0] and all(tries[1:]) and len(tries) > 3
    assert not learned


def test_calls_for_nobody_that_fail_are_given_up(started, monkeypatch):
    engine = engine_of("lookup", CHAIN, ways=(LONG,), num_slots=1)
    tried = []

    def fail(*program):
        tried.append(program)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.shelf, "rehearse", fail)
    monkeypatch.setattr("moa_jax.decode.engine.engine.QUIET_S", 0.0)
    request = Request((5, 9, 2), 10, NO_STOP)
    started(engine)
    wait_for(lambda: tried)
    for _ in range(2):
        assert_as_alone([request], answers(engine, [request]))
    assert 1 <= max(Counter(tried).values()) <= MOST_REHEARSALS


def test_nothing_is_learned_while_something_is_compiled(started, monkeypatch):
    """A compiler takes the cores that a call would have had."""
    engine = engine_of(None, num_slots=1)
    request = Request((5, 9), 60, NO_STOP)
    monkeypatch.setattr(engine.session.background, "submit", lambda *job, **rest: True)
    assert_as_alone([request], answers(started(engine), [request]))
    assert engine._maker._under_way == 1 and not engine._pace._round_s
    engine._maker._under_way = 0
    monkeypatch.setattr(engine.session.background, "submit", lambda *job, **rest: False)
    assert_as_alone([request], answers(engine, [request]))
    assert engine._pace._round_s


# ---- reading ----


def test_more_chunks_are_read_where_more_could_sit_than_do(monkeypatch):
    """Of several prompts, too, but one where few seats are free, as those who sit wait."""
    engine, turns = serving(None), []
    run, send = engine.shelf.run, engine._send

    def noted(name, *arrays):
        if name[0] == "read":
            turns[-1].append((len(engine._seats.texts), name[2]))
        return run(name, *arrays)

    def sent():
        turns.append([])
        return send()

    turns.append([])
    monkeypatch.setattr(engine.shelf, "run", noted)
    monkeypatch.setattr(engine, "_send", sent)
    requests = [Request((index,) * 60, 40, NO_STOP) for index in range(12)]
    listeners = answers(engine, requests)
    assert_as_alone(requests, listeners)
    read = [(turn[0][0], sum(size for _, size in turn)) for turn in turns if turn]
    assert read[0] == (0, MOST_CHUNKS * 32) and sum(tokens for _, tokens in read) == 12 * 64
    assert {tokens for sitting, tokens in read if sitting >= 2} == {32}


def test_a_prompt_that_is_being_read_counts_as_rows_in_use(monkeypatch):
    engine, seen = serving(None), []
    run = engine.shelf.run

    def noted(name, *arrays):
        if name[0] in ("restart", "read", "insert"):
            seen.append(round(engine.load().rows_used * 4 * engine.shelf.largest.rows))
        return run(name, *arrays)

    monkeypatch.setattr(engine.shelf, "run", noted)
    answers(engine, [Request((9,) * 70, 3, NO_STOP)])
    assert seen == [0, 0, 32, 64, 0] and engine.load().rows_used == 0


@pytest.mark.slow
def test_short_prompts_do_not_wait_for_long_ones(monkeypatch):
    """Those that have begun have a row each until they end."""
    engine, most, told = serving(None), [], []
    read_on, tell = engine._read_on, engine._tell

    def reading(task):
        found = read_on(task)
        most.append(len(engine._readings))
        return found

    def telling(task, news):
        told.append(task.request)
        tell(task, news)

    monkeypatch.setattr(engine, "_read_on", reading)
    monkeypatch.setattr(engine, "_tell", telling)
    long = [Request((index,) * 150, 2, NO_STOP, LAWS[index]) for index in range(6)]
    short = [Request((index,) * 70, 2, NO_STOP, LAWS[index]) for index in range(6)]
    listeners = answers(engine, requests := long + short)
    assert_as_alone(requests, listeners)
    assert max(most) == 1 + 1
    assert told[0] == short[0] and told.index(short[-1]) < told.index(long[-1])


# ---- prompts that begin alike -------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("moa-1", "lookup") else pytest.param(name, marks=pytest.mark.slow)
        for name in KINDS
    ],
)
def test_prompts_that_begin_alike_are_read_from_there_on(name, monkeypatch):
    """Chats that go on, and prompts that share a beginning: the same texts, tokens and drafts."""
    beginning = tuple((5 + 3 * i * i) % 61 for i in range(40))
    tails = [(), (10, 8, 7), (10, 8, 6, 5), tuple(range(30)), (10, 8, 7)]  # as no answer begins
    requests = [Request((*beginning, *tail), 20, NO_STOP, LAWS[i]) for i, tail in enumerate(tails)]
    answer = alone(requests[1])[0]
    requests.append(Request((*requests[1].prompt_ids, *answer, 3, 4), 20, NO_STOP))
    engine, drafted = serving(name), {}
    for most_bytes in (1 << 30, 0):
        monkeypatch.setattr(engine._readings, "prefixes", Prefixes(most_bytes))
        before = engine.load()
        for request in requests:
            assert_as_alone([request], answers(engine, [request]))
        new = lambda count: count(engine.load()) - count(before)  # noqa: B023
        drafted[most_bytes] = (new(lambda x: x.drafted_tokens), new(lambda x: x.accepted_tokens))
        if most_bytes:
            assert (new(lambda x: x.prefix_lookups), new(lambda x: x.prefix_hits)) == (6, 5)
            tokens = sum(len(request.prompt_ids) for request in requests)
            assert new(lambda x: x.prefix_lookup_tokens) == new(lambda x: x.prompt_tokens) == tokens
            assert engine.load().kept_bytes == engine._readings.prefixes.num_bytes > 0
            # The beginning; two tokens more; the beginning; all but the last of a prompt that
            # was read; and a whole answer but its last token, which no cache holds.
            assert new(lambda x: x.prefix_tokens) == 40 + 42 + 40 + 42 + (43 + 19)
        else:
            assert new(lambda x: x.prefix_lookups) == new(lambda x: x.prefix_hits) == 0
            assert new(lambda x: x.prefix_lookup_tokens) == engine.load().kept_bytes == 0
            assert len(engine._readings.prefixes) == 0
    assert drafted[1 << 30] == drafted[0]


def test_texts_are_kept_within_their_bytes():
    """The text that was used last stays; one that is too large drives nobody out."""
    row = lambda size: np.zeros(size, np.float32)
    text = lambda start, *tail: np.array([start, *range(LEAST_REUSED - 1), *tail])
    kept, first = Prefixes(100), lambda: [int(each.tokens[0]) for each in kept._kept]
    for start in (1, 2, 3):
        kept.keep(Kept(text(start, 7, 8), row(10), 1))
    assert first() == [2, 3]
    assert kept.longest(text(2, 7, 9, 9))[1] == LEAST_REUSED + 1
    kept.keep(Kept(text(4), row(10), 1))
    assert first() == [2, 4]
    assert kept.longest(text(3, 7))[0] is None
    assert not kept.wants(text(2, 7)) and kept.wants(text(2, 7, 8, 9))
    kept.keep(Kept(text(4, 5), row(5), 1))
    assert first() == [2, 4] and len(kept._kept[1].tokens) == LEAST_REUSED + 1
    kept.keep(Kept(text(6), row(26), 1))
    assert first() == [2, 4] and kept.num_bytes == 60


def test_what_is_too_short_to_be_reused_is_neither_kept_nor_used():
    """All prompts may begin with the same token, which says nothing of what is useful."""
    kept, tokens = Prefixes(1000), np.arange(LEAST_REUSED + 5)
    for last in (1, 2):
        kept.keep(Kept(np.array([0, last, *tokens]), np.zeros(1), 1))
    assert kept.longest((0, 1, *tokens[: LEAST_REUSED - 3]))[0] is None
    assert [int(each.tokens[1]) for each in kept._kept] == [1, 2]
    assert kept.longest((0, 1, *tokens[: LEAST_REUSED - 2]))[1] == LEAST_REUSED
    assert [int(each.tokens[1]) for each in kept._kept] == [2, 1]
    assert not kept.wants(tokens[: LEAST_REUSED - 1]) and kept.wants(3 + tokens[:LEAST_REUSED])
    assert not Prefixes(0).wants(tokens)


# ---- load ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moa-1"])
def test_nothing_is_lost_under_load(name, small_steps, started):
    """200 requests from 32 threads, a quarter of which are cancelled at some time."""
    engine = started(engine_of(name, CHAIN, ways=(TREE, DraftShape(5)), num_slots=8))
    requests, listeners = mixed(200, 7, longest=120), [Listener() for _ in range(200)]

    def client(number: int) -> None:
        random = np.random.default_rng(number)
        for index in range(number, 200, 32):
            ticket = engine.submit(requests[index], listeners[index])
            if index % 4 == 0:
                threading.Event().wait(random.uniform(0, 0.2))
                engine.cancel(ticket)
            else:
                listeners[index].wait()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(32)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    engine.close(WAIT_S)
    ended = Counter(listener.all[-1].finish for listener in listeners)
    assert set(ended) <= {"stop", "length", "cancelled"} and ended["cancelled"] <= 50
    for request, listener in zip(requests, listeners, strict=True):
        listener.assert_one_end()
        token_ids, finish = alone(request)
        if listener.all[-1].finish == "cancelled":
            assert listener.token_ids == token_ids[: len(listener.token_ids)]
        else:
            assert (listener.token_ids, listener.all[-1].finish) == (token_ids, finish)
    load = engine.load()
    assert (load.running, load.waiting, load.failures) == (0, 0, 0)
    assert load.finished == dict(ended)
