"""States and programs of an engine grow and shrink with those who sit."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from moa_jax import Session
from moa_jax.decode.auto import PLAIN
from moa_jax.decode.background import MAX_TRIES
from moa_jax.decode.engine import Engine, Request
from moa_jax.decode.engine.rows import EVERY, LIKELY, WARM, Kind, given_of, kind_of, together
from moa_jax.decode.engine.seats import ROUNDS_OF_A_MOVE
from moa_jax.decode.engine.shelf import Shelf, Size
from moa_jax.decode.engine.wanted import wanted_soon
from moa_jax.decode.programs import Programs
from moa_jax.decode.session import GREEDY
from tests.decode.engines import (
    CHAIN,
    LAWS,
    LONG,
    NO_STOP,
    TREE,
    WAIT_S,
    answers,
    assert_as_alone,
    engine_of,
    mixed,
    settle,
)
from tests.decode.test_chunks import drafter, target


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moa-1", "lookup"])
def test_states_grow_and_shrink_around_texts(name, small_steps, started, monkeypatch):
    """Programs of all sizes are there, so every call has the size that its texts need."""
    engine = engine_of(name, num_slots=2)
    for slots, rows in itertools.product(engine.shelf.slots, engine.shelf.rows):
        engine.shelf.make_size(Size(slots, rows))
    sizes, send = [], engine._seats.send

    def noted(program, rounds):
        sizes.append(program[0])
        return send(program, rounds)

    monkeypatch.setattr(engine._seats, "send", noted)
    long = Request((5, 9), 150, NO_STOP, LAWS[1])
    requests = [long, *mixed(6, 2, longest=60)]
    assert_as_alone(requests, answers(started(engine), requests))
    assert set(sizes) >= {Size(2, 128), Size(2, 256)}
    before = len(sizes)
    assert_as_alone([long], answers(engine, [long]))
    assert set(sizes[before:]) == {Size(1, 128), Size(1, 256)}


def without_programs(monkeypatch, sizes: Sequence[Size], **settings: Any) -> Engine:
    """An engine that moves texts between states of these sizes and computes nothing."""
    engine = Engine(target(), **settings)
    for size in sizes:
        engine.shelf._sizes.add(size)
    monkeypatch.setattr(engine.shelf, "kind_of_call", lambda size, way, kind: kind)
    monkeypatch.setattr(engine.shelf, "run", lambda name, *arrays: (None, None))
    return engine


def test_a_smaller_state_is_taken_when_it_pays(monkeypatch):
    """What it saves must be worth the move; nobody moves where more are coming."""
    small, large = Size(1, 256), Size(4, 256)
    engine = without_programs(monkeypatch, (small, large), num_slots=4, max_tokens=200)
    seats, sizes = engine._seats, []
    stays, goes = (engine._text_of(Request((5,), 150, NO_STOP)) for _ in range(2))

    def call(coming: int) -> None:
        program = seats.ready(coming)[PLAIN]
        sizes.append(program[0])
        seats.send(program, 1)

    seats.enter(None, 256, stays)
    call(coming=1)
    assert sizes.pop() == small  # large enough, until the other one is there
    seats.enter(None, 256, goes)
    seats.leave(goes)
    for coming in (*[1] * 9, *[0] * 9):
        call(coming)
    rounds = ROUNDS_OF_A_MOVE // 3 + 1  # each of which saves three rows
    assert sizes == [large] * (9 + rounds) + [small] * (9 - rounds)
    seats.leave(stays)
    seats.enter(None, 256, goes, coming=1)
    assert seats.size == large


def test_a_call_behind_the_drafters_reading_says_so(monkeypatch):
    """For what it and a chunk take together is not what a chunk takes."""
    engine = without_programs(monkeypatch, (Size(1, 256),), num_slots=1, max_tokens=200)
    for caught_up in (True, False):
        text = engine._text_of(Request((5,), 150, NO_STOP))
        engine._seats.enter(None, 256, text, caught_up=caught_up)
        assert engine._seats.send(engine._seats.ready()[PLAIN], 1).caught_up == caught_up
        engine._seats.leave(text)


def test_a_call_has_no_more_rounds_than_its_state_has_rows_for(monkeypatch):
    """Texts stay in a small state until a few rounds may fill it, and never outgrow it."""
    small, large = Size(1, 128), Size(1, 256)
    engine = without_programs(monkeypatch, (small, large), num_slots=1, max_tokens=240)
    seats, sent = engine._seats, []
    text = engine._text_of(Request((5,), 230, NO_STOP))
    text.surely = 105
    seats.enter(None, 128, text)
    for _ in range(4):
        size, *rest = seats.ready()[PLAIN]
        flight = seats.send((size, *rest), 8)
        sent.append((size, flight.rounds))
        assert text.surely + text.ahead + 1 <= size.rows - engine._draft_rows
    assert sent == [(small, 8), (small, 8), (small, 5), (large, 8)]


def test_a_call_that_drafts_has_rows_for_all_levels_of_its_rounds(monkeypatch):
    pair = dict(drafter=drafter("moa-1"), shape=CHAIN, ways=(LONG,))
    sizes = [Size(1, 128), Size(1, 256)]
    engine = without_programs(monkeypatch, sizes, num_slots=1, max_tokens=200, **pair)
    seats, sent = engine._seats, []
    text = engine._text_of(Request((5,), 199, NO_STOP))
    seats.enter(None, 128, text)
    while text.ahead < 120:
        size, *rest = seats.ready()[CHAIN]
        sent.append((size, seats.send((size, *rest), 8).rounds))
        assert text.surely + text.ahead + 1 <= size.rows - engine._draft_rows
    assert {size for size, _ in sent} == set(sizes) and min(rounds for _, rounds in sent) < 8


def test_several_stay_in_a_small_state_until_they_are_drafted_for(monkeypatch):
    """Drafts take rows, and in a larger state each round takes longer; one text may soon draft."""
    sizes = [Size(slots, rows) for slots in (1, 2) for rows in (128, 256)]
    pair = dict(drafter=drafter("moa-1"), shape=CHAIN, ways=(LONG,))
    engine = without_programs(monkeypatch, sizes, num_slots=2, max_tokens=200, **pair)
    seats, found = engine._seats, []
    texts = [engine._text_of(Request((5,) * 100, 20, NO_STOP)) for _ in range(2)]
    for drafts in (False, True, False):
        monkeypatch.setattr(seats, "_would_draft", lambda slots, drafts=drafts: drafts)
        for text in texts:
            seats.enter(None, 256, text)
        found.append((seats.ready().keys(), seats.size))
        for text in texts:
            seats.leave(text)
        seats.reset()
    small, large = ({PLAIN}, Size(2, 128)), ({PLAIN, CHAIN, LONG}, Size(2, 256))
    assert found == [small, large, small]
    seats.enter(None, 256, texts[0], coming=1)
    assert seats.ready(coming=1).keys() == {PLAIN} and seats.size == Size(2, 128)
    assert seats.ready().keys() >= {CHAIN} and seats.size == Size(1, 256)


@pytest.mark.parametrize(("way", "expected"), [(PLAIN, [8, 5, 4]), (CHAIN, [5, 4, 4])])
def test_a_call_for_several_ends_when_one_of_them_may(way, expected, monkeypatch):
    """Who ends in the middle of a long call has a seat in vain until the host has heard of it."""
    sizes = [Size(slots, 256) for slots in (1, 2)]
    pair = dict(drafter=drafter("moa-1"), shape=CHAIN, ways=(LONG,))
    engine = without_programs(monkeypatch, sizes, num_slots=2, max_tokens=200, **pair)
    seats = engine._seats
    for new in (14, 90):  # the first token comes with the prompt
        seats.enter(None, 256, engine._text_of(Request((5,), new, NO_STOP)))
    rounds = []
    for _ in expected:
        rounds.append(min(8, seats.rounds_to_an_end(way)))
        seats.send(seats.ready()[way], rounds[-1])
    assert rounds == expected
    seats.leave(seats.texts[0])
    assert seats.rounds_to_an_end(way) == math.inf


def test_a_call_serves_the_settings_of_all_its_requests(monkeypatch):
    """Those of each alone serve no other: one is greedy, one warm, one has log-probabilities."""
    engine = without_programs(monkeypatch, [Size(4, 256)], num_slots=4, max_tokens=200)
    kinds = []
    for law, top in ((LAWS[0], None), (LAWS[1], None), (LAWS[0], 2), (LAWS[2], None)):
        text = engine._text_of(Request((5,), 20, NO_STOP, law, top_logprobs=top))
        engine._seats.enter(None, 256, text)
        kinds.append(engine._seats.kind)
    assert kinds == [kind_of(GREEDY), Kind(WARM), Kind(WARM, likely=True), LIKELY]


@pytest.mark.parametrize("is_trying", [False, True])
def test_calls_are_cut_at_an_end_but_for_trials(is_trying, monkeypatch):
    """In a short call it counts much when it was heard."""
    sizes = [Size(slots, 256) for slots in (1, 2)]
    engine = without_programs(monkeypatch, sizes, num_slots=2, max_tokens=200)
    for new in (6, 90):
        engine._seats.enter(None, 256, engine._text_of(Request((5,), new, NO_STOP)))
    monkeypatch.setattr(engine._maker, "make", lambda wanted: None)
    monkeypatch.setattr(engine._pace, "choose", lambda slots, programs, *rest: (programs[PLAIN], 8))
    engine._pace.is_trying = is_trying
    assert engine._send().rounds == (8 if is_trying else 5)


def test_a_size_serves_with_the_ways_that_there_are_rows_for(monkeypatch):
    """In one where only a way of drafts is compiled, plain decoding's rows may be too few."""
    engine = without_programs(monkeypatch, [Size(2, 128)], num_slots=2, max_tokens=100)
    there = lambda size, way, kind: kind if way.num_drafted else None
    monkeypatch.setattr(engine.shelf, "kind_of_call", there)
    for ways, expected in (([PLAIN], None), ([PLAIN, CHAIN], Size(2, 128))):
        assert engine.shelf.best(2, 100, EVERY, ways) == expected


def test_a_size_that_is_not_there_is_made_while_a_larger_one_serves(started, monkeypatch):
    engine = engine_of(None, num_slots=4)
    assert engine.shelf.best(2, 100, kind_of(LAWS[1]), engine.shelf.ways) == Size(4, 256)
    requests = [Request((5, 9, index), 30, NO_STOP, LAWS[1]) for index in range(2)]
    assert_as_alone(requests, answers(started(engine), requests))
    settle(engine, requests)
    assert engine.shelf.best(2, 100, kind_of(LAWS[1]), engine.shelf.ways) == Size(2, 256)
    assert engine.shelf.kind_of_call(Size(2, 256), PLAIN, kind_of(LAWS[1])) == Kind(WARM)
    assert_as_alone(requests, answers(engine, requests))
    assert engine._seats.size.slots < 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ways"), [(None, ()), ("moa-1", (LONG, TREE))])
def test_the_thread_of_the_engine_never_compiles(name, ways, small_steps, started):
    """Whatever comes, once it is prepared; other threads may."""
    threads = []

    def compiled(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            threads.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(compiled)
    try:
        engine = engine_of(name, ways=ways, num_slots=3)
        assert "MainThread" in threads
        requests = mixed(12, 3)
        settle(started(engine), requests)
        answers(engine, requests)
    finally:
        jax.monitoring.unregister_event_duration_listener(compiled)
    assert "background" in threads
    assert "engine" not in threads


@pytest.mark.slow
def test_without_room_nothing_more_is_compiled(monkeypatch, started, caplog):
    """Texts are the same, and who asks for log-probabilities has them."""
    monkeypatch.setattr("moa_jax.decode.engine.making.can_compile_more", lambda: False)
    engine = engine_of(None, num_slots=3)
    requests = mixed(6, 5)
    settle(started(engine), requests)
    (line,) = (record.message for record in caplog.records if "room" in record.message)
    assert "programs are compiled and there is room for few more" in line
    prepared = len(engine.shelf)
    (listener,) = answers(engine, [Request((1, 2, 3), 4, NO_STOP, top_logprobs=1)])
    assert len(listener.all[-1].logprobs) and len(engine.shelf) == prepared
    listeners = answers(engine, requests)
    assert_as_alone(requests, listeners)
    engine.session.background.wait()
    before = len(engine.shelf)
    answers(engine, requests)
    engine.session.background.wait()
    assert len(engine.shelf) == before


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices prepare nothing")
def test_a_call_has_run_a_round_before_anybody_waits_for_it(monkeypatch):
    """What XLA's library prepares at a program's first run is inside the loop of rounds."""
    session = Session(target())
    blank = lambda slots, kind: together([given_of(GREEDY, 0, 0, (), 64)] * slots, kind)
    shelf, rounds = Shelf(session, 1, 100, blank), []

    class Noted(Programs):
        def compile(self, function, *like, **static):
            return lambda weights, *arrays: rounds.append(int(arrays[-1]))

    noted = Noted(session.setup, (session.weights,), np.float32, drafts=False)
    monkeypatch.setattr(shelf, "_programs", {(PLAIN, False): noted})
    shelf.make_call(shelf.largest, PLAIN, EVERY)
    assert rounds == [1]


def test_programs_are_wanted_in_the_order_of_use(monkeypatch):
    """One alone, many, log-probabilities, some; then longer texts. Several need not draft."""
    engine = Engine(target(), drafter("moa-1"), CHAIN, ways=(LONG,), num_slots=8, max_tokens=200)
    monkeypatch.setattr(engine.shelf, "rows", (256, 512))
    made = [(making.func.__name__, *making.args) for making in wanted_soon(engine.shelf)]
    greedy, calls = (
        kind_of(GREEDY),
        [each for each in made if each[0] in ("make_size", "make_call")],
    )
    assert [each[1:] for each in calls[:6]] == [
        (Size(1, 256), greedy),
        (Size(1, 256), PLAIN, greedy),
        (Size(8, 256), greedy),
        (Size(8, 256), CHAIN, greedy),
        (Size(1, 256), CHAIN, kind_of(GREEDY, likely=True)),
        (Size(2, 256), greedy),
    ]
    assert engine.shelf.ways_for(1) == [CHAIN, PLAIN, LONG]
    assert engine.shelf.ways_for(2) == [PLAIN, CHAIN]
    monkeypatch.setattr(engine.shelf, "_is_priced", lambda slots: slots in (2, 8))
    assert engine.shelf.ways_for(2) == engine.shelf.ways_for(8) == [PLAIN, CHAIN, LONG]
    assert engine.shelf.ways_for(4) == [PLAIN, CHAIN]
    sizes = [each[1] for each in calls]
    assert sizes[-4:] == [Size(1, 512), Size(8, 512), Size(2, 512), Size(4, 512)]


def test_what_will_be_wanted_is_made_while_nobody_is_there(monkeypatch):
    """One after the other, until all is there; what cannot be made is tried again, not for ever."""
    engine, made = engine_of(None, num_slots=2), []
    del engine._make_ahead

    def make(name: str, *args: object) -> None:
        made.append((name, *args))
        if name == "make_state":
            raise RuntimeError("the device is on fire")

    for each in ("rows", "state", "size", "call", "read", "first", "score"):
        name = f"make_{each}"
        instead = functools.partial(make, name)
        instead.__name__ = name
        monkeypatch.setattr(engine.shelf, name, instead)
    wanted = [(making.func.__name__, *making.args) for making in wanted_soon(engine.shelf)]
    wanted = list(dict.fromkeys(wanted))
    monkeypatch.setattr(engine, "prepare", lambda: None)
    engine.start()
    end = time.monotonic() + WAIT_S
    while set(made) != set(wanted) and time.monotonic() < end:
        time.sleep(0.01)
    engine.close()
    assert list(dict.fromkeys(made)) == wanted
    tries = [made.count(each) for each in wanted if each[0] == "make_state"]
    # A job tries twice, and the next wishes hand it in again until its third failure.
    assert tries and all(2 <= count <= 2 * MAX_TRIES for count in tries)
    assert len(made) - sum(tries) == len(wanted) - len(tries)
