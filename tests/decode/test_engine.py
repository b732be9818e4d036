"""Many answers at once: each is that of plain decoding alone, whatever happens beside it."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from moa_jax import Session
from moa_jax.config import DraftShape, Sampling
from moa_jax.decode.auto import PLAIN
from moa_jax.decode.costs import Costs
from moa_jax.decode.engine import Closed, Engine, Full, News, Request, Ticket
from moa_jax.decode.engine.engine import MOST_REHEARSALS
from moa_jax.decode.engine.prefixes import LEAST_REUSED, Kept, Prefixes
from moa_jax.decode.engine.rows import EVERY, WARM, Kind, given_of, kind_of, together
from moa_jax.decode.engine.seats import ROUNDS_OF_A_MOVE
from moa_jax.decode.engine.shelf import Shelf, Size
from moa_jax.decode.engine.wanted import wanted_soon
from moa_jax.decode.order import MOST_CHUNKS
from moa_jax.decode.programs import Programs
from moa_jax.decode.session import GREEDY
from moa_jax.errors import InputError
from tests.decode.test_chunks import KINDS, drafter, target

NO_STOP: tuple[int, ...] = ()
CHAIN, TREE, LONG = DraftShape(3), DraftShape(3, 2, 4), DraftShape(5)
WAIT_S = 120.0
LAWS = (
    Sampling(),
    Sampling(0.9, seed=4),
    Sampling(0.8, top_k=20, top_p=0.9, seed=3),
    Sampling(1.2, min_p=0.02, repetition_penalty=1.3, seed=9),
    Sampling(repetition_penalty=1.2, logit_bias=((5, 2.0), (7, float("-inf")))),
    Sampling(0.7, presence_penalty=0.5, frequency_penalty=0.8, seed=2),
)


class Listener:
    """Keeps what a request hears, in its order."""

    def __init__(self) -> None:
        self.all: list[News] = []
        self._end: queue.SimpleQueue[News] = queue.SimpleQueue()

    def __call__(self, news: News) -> None:
        self.all.append(news)
        if news.finish:
            self._end.put(news)

    def wait(self) -> News:
        return self._end.get(timeout=WAIT_S)

    @property
    def token_ids(self) -> list[int]:
        return [token for news in self.all for token in news.token_ids]

    def assert_one_end(self) -> None:
        assert [bool(news.finish) for news in self.all] == [False] * (len(self.all) - 1) + [True]


@functools.cache
def plain() -> Session:
    return Session(target())


@functools.cache
def alone(request: Request) -> tuple[list[int], str]:
    """What plain decoding says, and how it ends."""
    prompts, stops = [list(request.prompt_ids)], list(request.stop_ids)
    (row,) = plain().generate(prompts, request.max_new_tokens, stops, [request.sampling])
    return row.token_ids, row.finish_reason


def mixed(count: int, seed: int, longest: int = 90) -> list[Request]:
    """Requests of mixed lengths, settings and seeds, some of which end at a stop."""
    random, requests = np.random.default_rng(seed), []
    for index in range(count):
        prompt = tuple(random.integers(0, 61, random.integers(1, longest)).tolist())
        sampling = LAWS[index % len(LAWS)]
        stops = (11, 23) if index % 3 == 0 else ()
        requests.append(Request(prompt, int(random.integers(1, 40)), stops, sampling))
    return requests


def engine_of(name: str | None, shape: DraftShape | None = CHAIN, **rest) -> Engine:
    settings = dict(num_slots=4, max_tokens=200, chunk=32) | rest
    found = Engine(target(), name and drafter(name), shape if name else None, **settings)
    found.prepare()
    found._make_ahead = lambda: None  # most of a test is compiling
    return found


@functools.cache
def serving(name: str | None, shape: DraftShape | None = CHAIN) -> Engine:
    """An engine that runs until the end of this file, since most of a test is compiling."""
    return _started(engine_of(name, shape))


def _started(engine: Engine) -> Engine:
    engine.session.background.submit = lambda *job, **rest: None  # what is there serves
    engine.start()
    SERVING.append(engine)
    return engine


@functools.cache
def serving_ways() -> Engine:
    """One that may choose; its drafter waits behind at most five rounds of plain decoding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moa_jax.decode.session.MOST_BEHIND", 5)
        engine = engine_of("eagle3", CHAIN, ways=(TREE, LONG))
    for way in engine.shelf.ways:
        engine.shelf.make_call(engine.shelf.largest, way, EVERY)
    return _started(engine)


SERVING: list[Engine] = []


@pytest.fixture(scope="module", autouse=True)
def _closing():
    yield
    for engine in SERVING:
        engine.close()


@pytest.fixture
def started():
    """Engines that are closed in the end: `started(engine)`."""
    engines = []

    def start(engine: Engine) -> Engine:
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.close()


def answers(engine: Engine, requests: list[Request]) -> list[Listener]:
    """Sends all at once, and waits for all."""
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        engine.submit(request, listener)
    for listener in listeners:
        listener.wait()
    return listeners


def settle(engine: Engine, requests: list[Request]) -> None:
    """Asks again and again, until nothing more is made for such requests."""
    known, before = engine.session.background._known, -1
    while len(known) > before:
        engine.session.background.wait()
        before = len(known)
        answers(engine, requests)


def assert_as_alone(requests: list[Request], listeners: list[Listener]) -> None:
    for request, listener in zip(requests, listeners, strict=True):
        listener.assert_one_end()
        assert (listener.token_ids, listener.all[-1].finish) == alone(request)


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


# ---- sizes --------------------------------------------------------------------------------


@pytest.fixture
def small_steps(monkeypatch):
    """Caches of 128 and 256 rows."""
    monkeypatch.setattr("moa_jax.decode.engine.shelf.LEAST_ROWS", 128)


pairs = pytest.mark.parametrize(
    "name", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in ("moa-1", "lookup"))]
)


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


def without_programs(monkeypatch, sizes: tuple[Size, ...], **settings: int) -> Engine:
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


def test_a_size_that_is_not_there_is_made_while_a_larger_one_serves(started, monkeypatch):
    engine = engine_of(None, num_slots=4)
    assert engine.shelf.best(2, 100, kind_of(LAWS[1])) == Size(4, 256)
    requests = [Request((5, 9, index), 30, NO_STOP, LAWS[1]) for index in range(2)]
    assert_as_alone(requests, answers(started(engine), requests))
    settle(engine, requests)
    assert engine.shelf.best(2, 100, kind_of(LAWS[1])) == Size(2, 256)
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
    monkeypatch.setattr("moa_jax.decode.engine.making.has_room", lambda: False)
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
    blank = lambda slots, kind: together([given_of(GREEDY, 0, 0, (), 64)] * slots, kind)  # noqa: E731
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
    """One after the other, until all is there; what cannot be made is tried twice."""
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
    wanted = [[each] * (1 + (each[0] == "make_state")) for each in dict.fromkeys(wanted)]
    wanted = list(itertools.chain(*wanted))
    monkeypatch.setattr(engine, "prepare", lambda: None)
    engine.start()
    end = time.monotonic() + WAIT_S
    while len(made) < len(wanted) and time.monotonic() < end:
        time.sleep(0.01)
    engine.close()
    assert made == wanted


# ---- ways ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_way_gives_the_same_texts(monkeypatch):
    """From each way to each other one, with drafters that wait behind rounds of plain decoding."""
    engine = serving_ways()
    turns = itertools.cycle([(CHAIN, 2), (PLAIN, 3), (TREE, 1), (PLAIN, 7), (LONG, 2)])
    there = lambda batch, programs, hurry: next(turn for turn in turns if turn[0] in programs)  # noqa: E731
    monkeypatch.setattr(engine._pace, "_way", there)
    requests = mixed(10, 4)
    assert_as_alone(requests, answers(engine, requests))
    assert set(engine.load().rounds_by_way) == {CHAIN, PLAIN, TREE, LONG}


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
    monkeypatch.setattr(engine._pace, "unknown", lambda programs: None)
    before = engine.load().rounds_by_way
    requests = [Request((5, 9, index), 60, NO_STOP) for index in range(3)]
    assert_as_alone(requests, answers(engine, requests))
    rounds = Counter(engine.load().rounds_by_way) - Counter(before)
    assert rounds[PLAIN] > 0.8 * rounds.total()


def test_calls_are_timed_while_nobody_is_there(started):
    """So whoever comes next meets no trials; and texts are as ever."""
    engine = engine_of("lookup", CHAIN, ways=(LONG,), num_slots=1)
    for way in engine.shelf.ways:
        engine.shelf.make_call(engine.shelf.largest, way, EVERY)
    calls = {call: call[1] for call in engine.shelf.calls()}
    assert set(calls.values()) == {PLAIN, CHAIN, LONG}
    started(engine)
    for _ in range(100):
        if engine._pace.unknown(calls) is None:
            break
        time.sleep(0.1)
    assert engine._pace.unknown(calls) is None
    request = Request((5, 9, 2), 40, NO_STOP)
    assert_as_alone([request], answers(engine, [request]))
    assert engine._pace._last_trial == 0 < engine._pace._num_calls


def test_calls_for_nobody_that_fail_are_given_up(started, monkeypatch):
    engine = engine_of("lookup", CHAIN, ways=(LONG,), num_slots=1)
    tried = []

    def fail(*program):
        tried.append(program)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.shelf, "rehearse", fail)
    request = Request((5, 9, 2), 10, NO_STOP)
    assert_as_alone([request], answers(started(engine), [request]))
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
    listeners = at_once(engine, requests)
    for listener in listeners:
        listener.wait()
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


def at_once(engine: Engine, requests: list[Request]) -> list[Listener]:
    """Submits requests so that all are there when the engine next looks."""
    blocked, free = threading.Event(), threading.Event()
    engine._orders.put(lambda: (blocked.set(), free.wait(WAIT_S)))
    blocked.wait(WAIT_S)
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        engine.submit(request, listener)
    free.set()
    return listeners


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
    listeners = at_once(engine, requests := long + short)
    for listener in listeners:
        listener.wait()
    assert_as_alone(requests, listeners)
    assert max(most) == 1 + 1
    assert told[0] == short[0] and told.index(short[-1]) < told.index(long[-1])


# ---- ends ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_may_be_cancelled_at_any_time(started):
    """While it waits, is read, or is decoded; it hears so once, and its neighbours hear nothing."""
    engine = engine_of("moa-1", num_slots=2)
    requests = [Request((index, 9), 190, NO_STOP, LAWS[index % 3]) for index in range(6)]
    requests += [Request((50, 3), 30, NO_STOP)]
    listeners = [Listener() for _ in requests]
    begun = threading.Event()
    first = listeners[0]

    def heard(news: News) -> None:
        first(news)
        begun.set()

    engine.submit(Request((1,) * 150, 40, NO_STOP), gone := Listener())
    tickets = [
        engine.submit(request, heard if index == 0 else listeners[index])
        for index, request in enumerate(requests)
    ]
    engine.cancel(Ticket(0))
    engine.cancel(tickets[3])
    started(engine)
    begun.wait(WAIT_S)
    engine.cancel(tickets[0])
    engine.cancel(tickets[0])
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


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 3, ()), "empty"),
        (Request((64,), 3, ()), "outside the vocabulary"),
        (Request((1,) * 190, 11, ()), "201|at most"),
        (Request((1,) * 300, 11, ()), "positions"),
        (Request((1,), 0, ()), "at least 1"),
        (Request((1,), 3, tuple(range(65))), "65 stop ids"),
        (Request((1,), 3, (), top_logprobs=21), "21 likeliest"),
        (Request((1,), 3, (), Sampling(logit_bias=((64, 1.0),))), "id 64 of 64"),
    ],
)
def test_what_cannot_be_answered_is_refused(request_, message):
    engine = Engine(target(), max_tokens=200)
    with pytest.raises(InputError, match=message):
        engine.submit(request_, Listener())
    assert engine.load().waiting == 0


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
    for listener in listeners:
        hurried.submit(late, listener)
    hurried.start()
    hurried.close()
    assert [listener.wait().finish for listener in listeners] == ["cancelled"] * 2


def test_an_engine_starts_once_and_a_listener_may_close_it():
    """Those who are answered hear so, and nobody waits for himself."""
    engine = engine_of(None, num_slots=2)
    names = lambda: [each.name for each in threading.enumerate()].count("engine")  # noqa: E731
    before = names()
    engine.start()
    engine.start()
    assert names() == before + 1
    listeners = [Listener(), Listener()]

    def closing(news: News) -> None:
        listeners[0](news)
        if not news.finish:
            engine.close(drain_s=0.0)

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
    slowly = lambda name, *arrays: (time.sleep(0.1), run(name, *arrays))[1]  # noqa: E731
    monkeypatch.setattr(engine.shelf, "run", slowly)
    engine.start()
    engine.submit(Request((5,), 190, NO_STOP), cut := Listener())
    while not cut.all:
        time.sleep(0.01)
    engine.close(drain_s=0.2)
    assert cut.wait().finish == "cancelled" and 1 < len(cut.token_ids) < 190


# ---- failures -----------------------------------------------------------------------------


def failing(engine: Engine, monkeypatch, what: str, times: list[int]) -> None:
    """Programs of this name fail at these runs, counted from 0."""
    run, count = engine.shelf.run, itertools.count()

    def broken(name, *arrays):
        if name[0] == what and next(count) in times:
            raise RuntimeError("the device is on fire")
        return run(name, *arrays)

    monkeypatch.setattr(engine.shelf, "run", broken)


def split(found: list[Listener]) -> tuple[list[int], list[int]]:
    """Which requests ended with an error, and which did not."""
    lost = [index for index, each in enumerate(found) if each.all[-1].finish == "error"]
    for index in lost:
        assert "on fire" in found[index].all[-1].error
        found[index].assert_one_end()
    return lost, [index for index in range(len(found)) if index not in lost]


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
    found = [Listener(), Listener()]
    engine.submit(sitting, found[0])
    while not found[0].all:
        time.sleep(0.001)
    broken_is_next.set()
    engine.submit(short, found[1])
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
    found = [Listener(), Listener()]
    engine.submit(sitting, found[0])
    while not found[0].all:
        time.sleep(0.001)
    engine.submit(short, found[1])
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
        new = lambda count: count(engine.load()) - count(before)  # noqa: E731,B023
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
    row = lambda size: np.zeros(size, np.float32)  # noqa: E731
    text = lambda start, *tail: np.array([start, *range(LEAST_REUSED - 1), *tail])  # noqa: E731
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
