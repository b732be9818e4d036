"""However requests and engines end or fail, each request hears of one end."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import NoReturn

import jax
import pytest

from moa_jax.config import Sampling
from moa_jax.decode.engine import Closed, Engine, Full, News, Request, Ticket
from moa_jax.decode.engine.rows import given_of
from moa_jax.decode.session import GREEDY
from moa_jax.errors import InputError
from tests.decode.engines import (
    LAWS,
    NO_STOP,
    WAIT_S,
    Listener,
    alone,
    answers,
    assert_as_alone,
    at_once,
    engine_of,
    failing,
    mixed,
    serving,
    split,
)
from tests.decode.test_chunks import target
from tests.meeting import wait_for

# ---- ends ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_may_be_cancelled_at_any_time(started):
    """While it waits, is read, or is decoded; it hears so once, and its neighbours hear nothing."""
    engine = engine_of("moa-1", num_slots=2)
    requests = [Request((index, 9), 190, NO_STOP, LAWS[index % 3]) for index in range(6)]
    requests += [Request((50, 3), 30, NO_STOP)]
    listeners = [Listener() for _ in requests]
    first = listeners[0] = Listener(lambda: [engine.cancel(tickets[0]) for _ in range(2)])
    engine.submit(Request((1,) * 150, 40, NO_STOP), gone := Listener())
    tickets = [
        engine.submit(request, listener)
        for request, listener in zip(requests, listeners, strict=True)
    ]
    engine.cancel(Ticket(0))
    engine.cancel(tickets[3])
    started(engine)
    for listener in (gone, first, listeners[3]):
        assert listener.wait().finish == "cancelled"
        listener.assert_one_end()
    assert listeners[3].token_ids == [] == gone.token_ids
    said = first.token_ids
    assert said == alone(requests[0])[0][: len(said)]
    kept = [index for index in range(len(requests)) if index not in (0, 3)]
    for index in kept:
        listeners[index].wait()
    assert_as_alone([requests[i] for i in kept], [listeners[i] for i in kept])
    engine.cancel(tickets[-1])
    assert engine.load().finished == {"cancelled": 3, "length": 5}
    assert engine.load().running == engine.load().waiting == 0


def test_who_waits_too_long_in_line_is_turned_away(started):
    engine = engine_of(None, max_waiting=2, num_slots=1)
    request = Request((5,), 3, NO_STOP)
    listeners = [Listener() for _ in range(3)]  # one of them need not wait long
    for listener in listeners:
        engine.submit(request, listener)
    with pytest.raises(Full, match="try again later"):
        engine.submit(request, Listener())
    assert engine.load().waiting == 3
    started(engine)
    for listener in listeners:
        listener.wait()
    assert_as_alone([request] * 3, listeners)


def test_those_who_come_together_find_room_together():
    engine = engine_of(None, max_waiting=2, num_slots=1)
    request = Request((5,), 3, NO_STOP)
    with pytest.raises(Full):
        engine.submit(request, Listener(), others=3)
    assert engine.load().waiting == 0
    for others in (2, 1, 0):
        engine.submit(request, Listener(), others)
    assert engine.load().waiting == 3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 3, ()), "empty"),
        (Request((64,), 3, ()), "outside the vocabulary"),
        (Request((1,) * 190, 11, ()), "201|at most"),
        (Request((1,) * 300, 11, ()), "positions"),
        (Request((1,), 0, ()), "at least 1"),
        (Request((1,), 3, tuple(range(65))), "65 stop ids"),
        (Request((1,), 3, (), top_logprobs=21), "21 top tokens"),
        (Request((1,), 3, (), Sampling(logit_bias=((64, 1.0),))), "id 64 of 64"),
    ],
)
def test_what_cannot_be_answered_is_refused(request_, message):
    engine = Engine(target(), max_tokens=200)
    with pytest.raises(InputError, match=message):
        engine.submit(request_, Listener())
    assert engine.load().waiting == 0


def test_a_request_of_exactly_max_tokens_is_taken():
    engine = Engine(target(), max_tokens=200)
    engine.submit(Request((1,) * 190, 10, ()), Listener())
    assert engine.load().waiting == 1


def test_a_stop_that_is_no_token_stops_nothing():
    given = given_of(GREEDY, 2, 9, (2**40, 3, -5, 64), 64)
    assert set(given.stop_ids_BX[0].tolist()) == {3, -1}


def test_a_request_is_taken_without_work_for_the_device():
    """An event loop submits, and must not wait behind the calls that the device is at."""
    engine, biases = Engine(target(), max_tokens=200), ((5, 2.0), (7, float("-inf")))
    with jax.transfer_guard("disallow_explicit"):
        for sampling in (*LAWS, Sampling(1.0, seed=2**32 - 1, logit_bias=biases)):
            engine.submit(Request((5, 9), 20, (3,), sampling, top_logprobs=2), Listener())


@pytest.mark.parametrize("settings", [{"max_tokens": 257}, {"max_tokens": 1}, {"num_slots": 0}])
def test_an_engine_that_cannot_be_is_refused(settings):
    with pytest.raises(InputError, match="choose"):
        Engine(target(), **settings)


@pytest.mark.slow
def test_closing_lets_answers_end_in_the_time_they_have():
    engine = engine_of("moa-1", num_slots=1)
    soon, late = Request((5,), 5, NO_STOP), Request((6,), 190, NO_STOP)
    engine.start()
    engine.submit(soon, one := Listener())
    engine.close(drain_s=WAIT_S)
    assert_as_alone([soon], [one])
    with pytest.raises(Closed):
        engine.submit(soon, Listener())
    hurried = engine_of(None, num_slots=1)
    listeners = [Listener(), Listener()]
    hurried._orders.put(lambda: wait_for(lambda: hurried._orders.qsize() >= 3))  # two and the end
    for listener in listeners:
        hurried.submit(late, listener)
    hurried.start()
    hurried.close()
    assert [listener.wait().finish for listener in listeners] == ["cancelled"] * 2


def test_an_engine_starts_once_and_a_listener_may_close_it():
    """Those who are answered hear so, and nobody waits for himself."""
    engine = engine_of(None, num_slots=2)
    names = lambda: [each.name for each in threading.enumerate()].count("engine")
    before = names()
    engine.start()
    engine.start()
    assert names() == before + 1
    listeners = [Listener(), Listener()]

    def closing(news: News) -> None:
        listeners[0](news)
        if not news.finish:
            engine.close(drain_s=0.0)

    with at_once(engine):
        engine.submit(Request((6,), 190, NO_STOP), listeners[1])
        engine.submit(Request((5,), 190, NO_STOP), closing)
    assert [listener.wait().finish for listener in listeners] == ["cancelled"] * 2
    engine.close()
    for listener in listeners:
        listener.assert_one_end()
    assert names() == before


def test_an_answer_that_takes_too_long_to_drain_is_cut(monkeypatch):
    engine = engine_of(None, num_slots=1)
    run = engine.shelf.run
    slowly = lambda name, *arrays: (time.sleep(0.1), run(name, *arrays))[1]
    monkeypatch.setattr(engine.shelf, "run", slowly)
    engine.start()
    engine.submit(Request((5,), 190, NO_STOP), cut := Listener())
    wait_for(lambda: len(cut.token_ids) > 1)
    engine.close(drain_s=0.2)
    assert cut.wait().finish == "cancelled" and 1 < len(cut.token_ids) < 190


# ---- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "most"),
    [("call", 4), ("insert", 4), ("read", 1), ("first", 1), ("restart", 1)],
)
def test_a_pass_that_fails_ends_those_in_it_alone(what, most, monkeypatch):
    """Of a call those who sit, of a chunk the one who is read; the engine goes on."""
    engine = serving("moa-1")
    failures = engine.load().failures
    failing(engine, monkeypatch, what, [4])
    requests = mixed(12, 5)
    lost, fine = split(found := answers(engine, requests))
    assert 1 <= len(lost) <= most and engine.load().failures == failures + 1
    assert_as_alone([requests[i] for i in fine], [found[i] for i in fine])


@pytest.mark.parametrize(("what", "tokens"), [("call", 9), ("first", 1)])
def test_three_failed_passes_in_a_row_show_in_health_until_one_works(what, tokens, monkeypatch):
    engine, request = serving("moa-1"), Request((5, 6), tokens, NO_STOP)
    run, breaks = engine.shelf.run, [False]

    def broken(name, *arrays):
        if name[0] == what and breaks[0]:
            raise RuntimeError("the device is on fire")
        return run(name, *arrays)

    monkeypatch.setattr(engine.shelf, "run", broken)
    healthy = []
    for breaks[0] in (True, True, False, True, True, True, False):
        assert (answers(engine, [request])[0].all[-1].finish == "error") == breaks[0]
        healthy.append(engine.healthy)
    assert healthy == [True, True, True, True, True, False, True]


def test_an_engine_without_its_thread_is_not_healthy():
    engine = serving("moa-1")
    assert engine.healthy
    engine._thread, running = None, engine._thread
    assert not engine.healthy
    engine._thread = threading.Thread()  # one that has ended, or does not run yet
    assert not engine.healthy
    engine._thread = running


@pytest.mark.parametrize("what", ["copy", "keep"])
def test_a_text_that_cannot_be_kept_is_not_lost(what, monkeypatch, caplog):
    """Neither is anybody else: what is kept for later prompts is not needed now."""
    engine, requests = serving("moa-1"), [Request((7, i), 30, NO_STOP) for i in range(8)]
    failures, prefixes = engine.load().failures, engine._readings.prefixes
    monkeypatch.setattr(prefixes, "wants", lambda tokens: True)

    def full(of: object) -> NoReturn:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nwherever")

    # That of an answer, which is about to end, or of a prompt, which is about to take a seat.
    monkeypatch.setattr(engine._seats if what == "copy" else prefixes, what, full)
    found = answers(engine, requests)
    assert_as_alone(requests, found)
    assert engine.load().failures == failures and "not kept: RESOURCE_EXHAUSTED" in caplog.text


def test_news_that_cannot_be_read_are_a_failed_pass(monkeypatch):
    """An error of the device shows when its arrays are read."""
    engine = serving("moa-1")
    hear, count = engine._seats.hear, itertools.count()

    def broken(flight):
        if next(count) == 3:
            raise RuntimeError("the device is on fire")
        return hear(flight)

    monkeypatch.setattr(engine._seats, "hear", broken)
    requests = [Request((5, index), 60, NO_STOP) for index in range(6)]
    lost, fine = split(found := answers(engine, requests))
    assert 1 <= len(lost) <= 4
    assert_as_alone([requests[i] for i in fine], [found[i] for i in fine])


def test_those_whom_a_stuck_engine_has_not_met_hear_an_error(monkeypatch):
    """A process that is about to end tells all, also who came while a pass blocked its thread."""
    engine, found = Engine(target(), num_slots=1, max_tokens=64), [Listener() for _ in range(2)]
    for each in found:
        engine.submit(Request((5,), 3, NO_STOP), each)  # nobody takes orders
    engine.abandon("process 1 has died")
    for each in found:
        assert (each.wait().finish, each.all[0].error) == ("error", "process 1 has died")
        each.assert_one_end()
    engine.close()
    assert [len(each.all) for each in found] == [1, 1]


def test_an_engine_that_is_abandoned_while_a_call_is_heard_has_no_failed_pass(started, monkeypatch):
    engine = Engine(target(), num_slots=1, max_tokens=64)
    hear = engine._seats.hear

    def abandoned(flight):
        engine.abandon("process 1 has died")  # by another thread, as it happens
        return hear(flight)

    monkeypatch.setattr(engine._seats, "hear", abandoned)
    engine.submit(Request((5,), 9, NO_STOP), found := Listener())
    started(engine)
    assert found.wait().finish == "error"
    found.assert_one_end()
    engine.close()
    assert engine.load().failures == 0


def test_a_first_token_that_cannot_be_read_harms_nobody_where_no_more_follow(monkeypatch):
    engine, get = serving(None), jax.device_get
    broken_is_next = threading.Event()

    def broken(found):
        if isinstance(found, list) and broken_is_next.is_set():
            broken_is_next.clear()
            raise RuntimeError("the device is on fire")
        return get(found)

    monkeypatch.setattr(jax, "device_get", broken)
    sitting, short = Request((5, 9), 150, NO_STOP), Request((7, 8), 1, NO_STOP)
    ask_more = lambda: (broken_is_next.set(), engine.submit(short, found[1]))
    found = [Listener(ask_more), Listener()]
    engine.submit(sitting, found[0])
    for listener in found:
        listener.wait()
    assert split(found) == ([1], [0])
    assert_as_alone([sitting], found[:1])


def test_a_first_token_outlives_a_call_that_it_is_no_part_of(monkeypatch):
    engine, has_failed = serving(None), threading.Event()
    hear = engine._seats.hear

    def broken(flight):
        if any(not first.task.request.takes_seat for first in engine._readings.firsts):
            if not has_failed.is_set():
                has_failed.set()
                raise RuntimeError("the device is on fire")
        return hear(flight)

    monkeypatch.setattr(engine._seats, "hear", broken)
    sitting, short = Request((5, 9), 150, NO_STOP), Request((7, 8), 1, NO_STOP)
    found = [Listener(lambda: engine.submit(short, found[1])), Listener()]
    engine.submit(sitting, found[0])
    for listener in found:
        listener.wait()
    assert split(found) == ([0], [1])
    assert_as_alone([short], found[1:])


def test_prompts_to_score_find_rows_of_their_size_the_next_time(monkeypatch):
    engine, made, shorter = serving("moa-1"), [], 7
    monkeypatch.setattr(engine.shelf, "row_size", lambda rows: shorter)
    monkeypatch.setattr(engine._readings, "keep", lambda *_: None)
    monkeypatch.setattr(engine._maker, "make", lambda wanted: made.extend(wanted))
    own = {"stop_ids": NO_STOP, "top_logprobs": 2, "prompt_logprobs": True}
    answers(engine, [Request((5, 9), 0, **own)])
    assert (engine.shelf.make_score, (shorter,)) in [(each.func, each.args) for each in made]


def test_nobody_waits_for_a_program():
    """What is there at the start serves all kinds of requests."""
    engine = serving("moa-1")
    before = len(engine.shelf)
    own = {"stop_ids": NO_STOP, "top_logprobs": 2}
    requests = [Request((5, 9), 20, NO_STOP, law) for law in LAWS]
    requests += [Request((5, 9), 20, **own), Request((7, 8) * 40, 1, **own, prompt_logprobs=True)]
    requests += [replace(requests[-1], max_new_tokens=0), Request((7,) * 180, 5, **own)]
    found = answers(engine, requests)
    assert [len(each.token_ids) for each in found] == [20] * (len(LAWS) + 1) + [1, 0, 5]
    assert {each.all[-1].finish for each in found} == {"length"}
    assert len(engine.shelf) == before


def test_a_listener_that_fails_harms_nobody():
    engine = serving(None)

    def broken(news: News) -> None:
        raise ValueError("a bug of somebody else")

    request = Request((5, 9), 20, NO_STOP)
    engine.submit(request, broken)
    assert_as_alone([request] * 3, answers(engine, [request] * 3))
