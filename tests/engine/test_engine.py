"""Many requests at once: each has the tokens of plain decoding alone, whatever runs beside it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from infer.cli.flags.auto import ways_of
from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.engine import Engine, Request
from moa_jax.engine.batch import RowOutput
from moa_jax.engine.engine import QUIET_S
from moa_jax.engine.pacing import ROUNDS_BESIDE_PREFILL, Pacing
from moa_jax.engine.program_cache import GREEDY, LOGPROBS, SAMPLED, ProgramCache
from moa_jax.engine.requests import RequestState
from moa_jax.engine.stats import COUNTED
from moa_jax.speculation.controller import NO_DRAFT, ShapeChoice
from moa_jax.speculation.cost_table import CostTable
from tests.decode.test_chunks import KINDS, drafter, target
from tests.engine.engines import (
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
from tests.meeting import wait_for


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (None, CHAIN),
        pytest.param("moa-1", TREE, marks=pytest.mark.slow),
        pytest.param("eagle3", TREE, marks=pytest.mark.slow),
        pytest.param("lookup", CHAIN, marks=pytest.mark.slow),
    ],
)
def test_texts_are_those_of_plain_decoding_alone(name, shape):
    """Twenty requests in four slots, of all settings."""
    requests = mixed(20, 1)
    assert_as_alone(requests, answers(serving(name, shape), requests))


def test_counters_have_the_figures_of_sessions():
    """Of rounds, tokens and acceptance by position."""
    engine = serving("moa-1")
    session = Session(target(), drafter("moa-1"), CHAIN, chunk=32)
    requests = [Request((index, 9, 2), 20 + index, NO_STOP) for index in range(4)]
    before = engine.stats()
    for request in requests:
        answers(engine, [request])
    now = engine.stats()
    prompts, lengths = zip(
        *((each.prompt_ids, each.max_new_tokens) for each in requests), strict=True
    )
    results = session.generate(prompts, list(lengths), NO_STOP)
    rounds = [length - 1 for result in results for length in result.accept_lengths]
    assert max(rounds) > 0
    new = {name: getattr(now, name) - getattr(before, name) for name in COUNTED}
    assert new["prompt_tokens"] == 3 * len(requests) and new["generated_tokens"] == sum(lengths)
    assert new["drafts"] == len(rounds)
    assert new["drafted_tokens"] == sum(sum(result.drafted) for result in results)
    positions = range(CHAIN.levels - 1)
    by_position = [sum(count > position for count in rounds) for position in positions]
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
        likely = [each for output in listener.all for each in output.logprobs]
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


def noting(engine: Engine, monkeypatch, kind: str) -> list[tuple]:
    """The names and arrays of the programs of a kind that run."""
    run, found = engine.programs.run, []

    def noted(name, *arrays):
        if name[0] == kind:
            found.append((name, *arrays[1:]))
        return run(name, *arrays)

    monkeypatch.setattr(engine.programs, "run", noted)
    return found


def test_a_call_serves_the_settings_of_all_its_requests(monkeypatch):
    engine = serving(None)
    calls = noting(engine, monkeypatch, "decode")
    monkeypatch.setattr(engine.programs, "decode_name", lambda count, shape, rows: wanted(rows))
    wanted = lambda rows: (rows_asked.append(rows), ("decode", 4, NO_DRAFT, LOGPROBS))[1]
    rows_asked: list[int] = []
    greedy, warm = Request((5, 9), 20, NO_STOP), Request((5, 9), 20, NO_STOP, LAWS[1])
    for requests, rows in (
        ([greedy, greedy], GREEDY),
        ([greedy, warm], SAMPLED),
        ([greedy, warm, replace(greedy, top_logprobs=2)], LOGPROBS),
    ):
        rows_asked.clear()
        answers(engine, requests)
        assert max(rows_asked) == rows
    assert calls


def test_padding_rows_do_nothing(monkeypatch):
    """The slot of a prompt that is being read, in a call of all slots for another request."""
    engine = serving(None)
    engine._slots.clear()
    monkeypatch.setattr(engine.programs, "decode_name", lambda *_: ("decode", 4, NO_DRAFT, SAMPLED))
    calls = noting(engine, monkeypatch, "decode")
    first, long = Request((5, 9), 60, NO_STOP), Request(tuple(range(60)) * 2, 30, NO_STOP, LAWS[1])
    found = [Listener(lambda: engine.submit(long, found[1])), Listener()]
    engine.submit(first, found[0])
    for listener in found:
        listener.wait()
    assert_as_alone([first, long], found)
    assert any(live_B.sum() == 1 for _, slot_B, live_B, *_ in calls)


def test_rounds_that_are_cut_tell_nothing():
    """A stop or the limit cuts the last round of a row, so it is left out of acceptance."""
    rounds = [(3, 2), (1, 2), (2, 2)]
    state = RequestState(0, Request((5,), 9, ()), print, None, False)
    observed = []
    controller = SimpleNamespace(observe=lambda *call, **rest: observed.append(call[2]))
    pacing = Pacing(controller, None, None)
    call = SimpleNamespace(costs={CHAIN: 1.0}, shape=CHAIN, states=[state], is_clean=False)
    for is_done in (False, True):
        pacing.record(call, [RowOutput(state, [], [], is_done, rounds)], 3, 1.0)
    assert observed == [[2, 0, 1], [2, 0]]


def test_calls_are_short_beside_a_prompt_and_end_where_a_slot_is_wanted(monkeypatch):
    engine, rounds = serving(None), []
    run = engine.programs.run

    def noted(name, *arrays):
        if name[0] == "decode":
            waits = bool(engine._scheduler.waiting)
            rounds.append((engine._scheduler.has_prefill(), waits, int(arrays[-1])))
        return run(name, *arrays)

    monkeypatch.setattr(engine.programs, "run", noted)
    requests = [Request((index, 7), 30, NO_STOP) for index in range(5)]
    requests.append(Request((9,) * 150, 20, NO_STOP))
    assert_as_alone(requests, answers(engine, requests))
    assert {most for reads, _, most in rounds if reads} <= {1, ROUNDS_BESIDE_PREFILL}
    assert max(most for *_, most in rounds) == 8
    assert min(most for _, waits, most in rounds if waits) < 8


# ---- draft shapes -------------------------------------------------------------------------


def serving_shapes(name: str = "eagle3") -> Engine:
    """One that may choose, so that its drafter may lag."""

    def make() -> Engine:
        engine = engine_of(name, CHAIN, ways=(TREE, LONG), costs=CostTable())
        for shape in (CHAIN, TREE, LONG):
            engine.programs.compile(("decode", engine.programs.buckets[-1], shape, SAMPLED))
        return engine

    return kept(("shapes", name), make)


def in_turns(engine: Engine, monkeypatch, *turns: tuple[DraftShape, int]) -> None:
    """The controller takes these shapes and rounds in turns; each call is of all slots."""
    order = itertools.cycle(turns)
    costs = dict.fromkeys((NO_DRAFT, CHAIN, TREE, LONG), 1.0)
    for shape, ms in costs.items():
        for length in engine._pacing.lengths():
            engine._pacing.costs.put(engine.programs.buckets[-1], shape, length, ms)
    controller = engine.session.controller
    monkeypatch.setattr(controller, "next", lambda costs, lag_ms: ShapeChoice(*next(order)))
    monkeypatch.setattr(engine.programs, "shapes", lambda batch: list(costs))
    monkeypatch.setattr(engine.programs, "buckets", engine.programs.buckets[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "moa-2"])
def test_every_shape_gives_the_same_texts(name, monkeypatch):
    """From each shape to each other one, with drafters that lag behind plain rounds."""
    engine = serving_shapes(name)
    in_turns(engine, monkeypatch, (CHAIN, 2), (NO_DRAFT, 3), (TREE, 1), (NO_DRAFT, 7), (LONG, 2))
    requests = mixed(10, 4)
    assert_as_alone(requests, answers(engine, requests))
    assert set(engine.stats().rounds_by_shape) >= {CHAIN, NO_DRAFT, TREE, LONG}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moa-2"])  # of which some drafts are accepted
def test_drafts_are_as_good_however_late_their_drafter_reads(name, monkeypatch):
    """As those of a drafter that reads with each chunk and each round: as many are accepted."""
    lagging, in_step = serving_shapes(name), serving(name, CHAIN)
    in_turns(lagging, monkeypatch, (CHAIN, 2))
    beginning = tuple((5 + 3 * i * i) % 61 for i in range(70))  # more than two chunks
    requests = [Request((*beginning, index), 30, NO_STOP) for index in range(3)]
    accepted = []
    for engine in (lagging, in_step):
        engine._slots.clear()
        before = engine.stats()
        for request in requests:
            assert_as_alone([request], answers(engine, [request]))
        now = engine.stats()
        accepted.append((now.drafts - before.drafts, now.accepted_tokens - before.accepted_tokens))
    assert accepted[0] == accepted[1] and accepted[0][1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moa-2"])
def test_a_copied_prefix_is_read_as_far_as_its_drafter_had_read(name, monkeypatch):
    """A drafter that lags behind a text lags behind its copy: drafts are as good as ever."""
    lagging, in_step = serving_shapes(name), serving(name, CHAIN)
    beginning = tuple((5 + 3 * i * i) % 61 for i in range(70))
    first, then = (Request((*beginning, index), 30, NO_STOP) for index in (0, 2))
    accepted = []
    for engine in (lagging, in_step):
        engine._slots.clear()
        with monkeypatch.context() as patch:
            if engine is lagging:
                in_turns(engine, patch, (NO_DRAFT, 8))
            answers(engine, [first])
        with monkeypatch.context() as patch:
            if engine is lagging:
                in_turns(engine, patch, (CHAIN, 2))
            before = engine.stats()
            assert_as_alone([then], answers(engine, [then]))
        now = engine.stats()
        assert now.prefix_tokens - before.prefix_tokens == 70
        accepted.append((now.drafts - before.drafts, now.accepted_tokens - before.accepted_tokens))
    assert accepted[0] == accepted[1] and accepted[0][1] > 0


@pytest.mark.slow
def test_costs_decide_for_a_batch(monkeypatch):
    engine = serving_shapes()
    monkeypatch.setattr(engine.programs, "buckets", engine.programs.buckets[-1:])
    for shape, ms in {NO_DRAFT: 1.0, CHAIN: 50.0, LONG: 60.0, TREE: 70.0}.items():
        for length in engine._pacing.lengths():
            engine._pacing.costs.put(engine.programs.buckets[-1], shape, length, ms)
    before = engine.stats().rounds_by_shape
    requests = [Request((5, 9, index), 60, NO_STOP) for index in range(3)]
    assert_as_alone(requests, answers(engine, requests))
    rounds = Counter(engine.stats().rounds_by_shape) - Counter(before)
    assert rounds[NO_DRAFT] == rounds.total()


# ---- programs -----------------------------------------------------------------------------


def programs_of(name: str | None, num_slots: int, **rest) -> ProgramCache:
    pair = (target(), name and drafter(name), CHAIN)
    return Engine(*pair, num_slots=num_slots, max_tokens=200, **rest).programs


def test_few_programs_serve_the_default_flags():
    """Decode programs, by the flags of infer.serve: 16 slots, and the shapes of mode auto."""
    own = DraftShape(5)
    pair = (target(), drafter("moa-1"), own)
    shapes = ways_of(own, pair[1])
    programs = Engine(*pair, ways=shapes, costs=CostTable(), max_tokens=200).programs
    every = {*programs.first(), *programs.later()}
    assert programs.buckets == (1, 2, 4, 8, 16)
    assert len([name for name in every if name[0] == "decode"]) <= 40  # none is compiled besides
    assert len(every) <= 48


def test_a_larger_batch_and_other_rows_stand_in(monkeypatch):
    programs = programs_of(None, 4)
    monkeypatch.setattr(programs, "_ready", {})
    name = lambda batch, rows: ("decode", batch, NO_DRAFT, rows)
    assert programs.decode_name(1, NO_DRAFT, GREEDY) is None
    for batch, rows in ((4, LOGPROBS), (4, SAMPLED), (1, SAMPLED), (1, GREEDY)):
        programs._ready[name(batch, rows)] = None
        assert programs.decode_name(1, NO_DRAFT, GREEDY) == name(batch, rows)
    assert programs.decode_name(2, NO_DRAFT, GREEDY) == name(4, SAMPLED)
    assert programs.decode_name(1, NO_DRAFT, LOGPROBS) == name(4, LOGPROBS)
    assert programs.decode_name(1, CHAIN, GREEDY) is None


def test_nobody_waits_for_a_program(monkeypatch):
    """Programs of the start serve all kinds of requests, and the thread compiles nothing."""
    engine = serving("moa-1")
    before = len(engine.programs)
    own = {"stop_ids": NO_STOP, "top_logprobs": 2}
    requests = [Request((5, 9), 20, NO_STOP, law) for law in LAWS]
    requests += [Request((5, 9), 20, **own), Request((7, 8) * 40, 1, **own, prompt_logprobs=True)]
    requests += [replace(requests[-1], max_new_tokens=0), Request((7,) * 180, 5, **own)]
    found = answers(engine, requests)
    assert [len(each.token_ids) for each in found] == [20] * (len(LAWS) + 1) + [1, 0, 5]
    assert {each.all[-1].finish_reason for each in found} == {"length"}
    assert len(engine.programs) == before


def compiled(engine: Engine) -> list[tuple]:
    """Programs are not compiled but noted, at once; each is there then."""
    made, make = [], engine.programs.compile

    def noted(name, *arrays):
        if not engine.programs.has(name):
            made.append(name)
            make(name)

    engine.programs.compile = noted
    return made


def test_what_a_request_would_use_is_compiled_beside_it_and_the_rest_when_idle(started):
    engine = engine_of(None, num_slots=2, chunk=16)
    made = compiled(engine)
    requests = [Request((index, 7), 60, NO_STOP) for index in range(2)]
    assert_as_alone(requests, answers(started(engine), requests))
    engine.session.background.wait()
    assert made == [("decode", 2, NO_DRAFT, GREEDY)]
    del engine.programs.later
    answers(engine, requests[:1])
    everything = {*engine.programs.first(), *engine.programs.later()}
    wait_for(lambda: all(map(engine.programs.has, everything)), WAIT_S)
    greedy = [name for name in made if name[0] == "decode" and name[3] == GREEDY]
    assert made.index(greedy[-1]) < made.index(("decode", 1, NO_DRAFT, LOGPROBS))


def test_without_room_for_mappings_nothing_more_is_compiled(monkeypatch, started, caplog):
    engine = engine_of(None, num_slots=2)
    monkeypatch.setattr("moa_jax.engine.compile_queue.can_compile_more", lambda: False)
    made = compiled(engine)
    requests = [Request((index, 7), 60, NO_STOP) for index in range(2)]
    for _ in range(2):
        assert_as_alone(requests, answers(started(engine), requests))
    engine.session.background.wait()
    assert not made and caplog.text.count("no more programs are compiled") == 1


def test_a_slow_stand_in_is_logged_once(caplog):
    """As much as is known of it, and nothing if it is known to be fast."""
    engine = engine_of("lookup", CHAIN, ways=(LONG,), costs=CostTable(), num_slots=8)
    for length in engine._pacing.lengths():
        for batch, ms in ((1, 1.0), (4, 1.2), (8, 4.0)):
            engine._pacing.costs.put(batch, NO_DRAFT, length, ms)
    for _ in range(2):
        for wanted, stand_in in ((1, 4), (1, 8), (2, 8)):
            names = (("decode", batch, NO_DRAFT, GREEDY) for batch in (wanted, stand_in))
            engine._pacing._log_stand_in(*names, 50)
    assert caplog.messages == [
        f"a batch of {batch} decodes in the program of 8 until its own is compiled, {by} slower"
        for batch, by in ((1, "about 4.0 times"), (2, "perhaps"))
    ]


def test_a_program_without_a_cost_leaves_plain_decoding_in_the_choice():
    """It is taken for as slow as the larger one; without plain decoding nothing is chosen."""
    engine = engine_of("lookup", CHAIN, ways=(LONG,), costs=CostTable(), num_slots=4)
    pacing, programs = engine._pacing, engine.programs
    pacing.costs = CostTable()
    programs._ready = {("decode", 4, shape, SAMPLED): None for shape in (NO_DRAFT, CHAIN)}
    states = [RequestState(id, Request((5,), 9, ()), print, None, False) for id in range(2)]
    assert pacing.choose(states, GREEDY, False).costs == {}
    for length in pacing.lengths():
        for shape, ms in ((NO_DRAFT, 1.0), (CHAIN, 90.0)):
            pacing.costs.put(4, shape, length, ms)
    own, larger = ("decode", 2, NO_DRAFT, GREEDY), ("decode", 4, NO_DRAFT, SAMPLED)
    for name, missing in ((larger, [own]), (own, [])):
        choice = pacing.choose(states, GREEDY, False)
        assert choice.costs == {NO_DRAFT: 1.0, CHAIN: 90.0}
        assert (choice.name, choice.missing) == (name, missing)
        programs._ready[own] = None


# ---- costs --------------------------------------------------------------------------------


def measuring(**settings) -> Engine:
    """An engine that measures compiled programs, and compiles only on demand."""
    engine = Engine(
        target(), drafter("lookup"), CHAIN, ways=(LONG,), costs=CostTable(), max_tokens=200,
        num_slots=2, chunk=32, **settings,
    )  # fmt: skip
    engine.programs.later = lambda: iter(())
    return engine


def test_costs_are_measured_at_the_start_and_when_idle_and_handed_on(started):
    saved = []
    engine = measuring(on_calibrated=lambda costs: saved.append(len(costs.entries())))
    engine.prepare()
    lengths = engine._pacing.lengths()
    known = lambda batch, shape: [engine._pacing.costs.has(batch, shape, n) for n in lengths]
    assert known(1, NO_DRAFT) == known(2, NO_DRAFT) == [True, True] and saved == [4]
    started(engine)
    engine.programs.compile(("decode", 1, CHAIN, GREEDY))
    request = Request((5, 9, 2), 40, NO_STOP)
    assert_as_alone([request], answers(engine, [request]))
    wait_for(lambda: all(known(1, CHAIN)), WAIT_S)
    assert_as_alone([request], answers(engine, [request]))
    wait_for(lambda: saved == [4, 6], WAIT_S)


def test_a_request_interrupts_a_measurement(monkeypatch, started):
    engine, timed = measuring(), threading.Event()
    started(engine)
    time_round, waits = engine._batch.time_round, threading.Event()

    def slow(*cell):
        timed.set()
        waits.wait(WAIT_S)
        return time_round(*cell)

    monkeypatch.setattr(engine._batch, "time_round", slow)
    engine.programs.compile(("decode", 1, CHAIN, GREEDY))
    request = Request((5, 9, 2), 10, NO_STOP)
    assert_as_alone([request], answers(engine, [request]))
    timed.wait(WAIT_S)
    found = Listener()
    engine.submit(request, found)
    monkeypatch.setattr("moa_jax.engine.engine.QUIET_S", WAIT_S)  # it is not measured later
    waits.set()
    found.wait()
    assert_as_alone([request], [found])
    assert not engine._pacing.costs.has(1, CHAIN, engine._pacing.lengths()[0])


def test_a_measurement_that_fails_is_not_tried_again(monkeypatch, started):
    engine, tried = measuring(), []
    started(engine)

    def fail(name, *cell):
        tried.append(name)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine._batch, "time_round", fail)
    engine.programs.compile(("decode", 1, CHAIN, GREEDY))
    request = Request((5, 9, 2), 10, NO_STOP)
    for count in (1, 2):  # to warm up, and to measure
        assert_as_alone([request], answers(engine, [request]))
        wait_for(lambda count=count: len(tried) == count)
    answers(engine, [request])
    time.sleep(2 * QUIET_S)
    assert tried == 2 * [("decode", 1, CHAIN, GREEDY)]


def test_only_calls_that_ran_alone_correct_costs():
    """Not those beside a prompt, a drafter's catch-up or a compiler, or of log-probabilities."""
    engine = engine_of("lookup", CHAIN, ways=(LONG,), costs=CostTable())
    pacing = engine._pacing
    for length in pacing.lengths():
        pacing.costs.put(1, NO_DRAFT, length, 1.0)
    state = RequestState(0, Request((5,), 9, ()), print, None, False)
    call = SimpleNamespace(
        costs={NO_DRAFT: 1.0}, shape=NO_DRAFT, states=[state], is_clean=False, batch=1, length=9
    )
    output = RowOutput(state, [1] * 8, [], False, [(1, 0)] * 8)
    for costs, is_clean in (({NO_DRAFT: 1.0}, False), ({}, True), ({NO_DRAFT: 1.0}, True)):
        assert pacing.costs.ms(1, NO_DRAFT, 9) == 1.0
        call.costs, call.is_clean = costs, is_clean
        pacing.record(call, [output], 8, 8.0)
    assert pacing.costs.ms(1, NO_DRAFT, 9) > 1.0


def test_calls_are_clean_without_a_prompt_and_a_compiler(monkeypatch):
    engine, clean = serving(None), []
    record = engine._pacing.record

    def noted(call, *rest):
        clean.append(call.is_clean)
        return record(call, *rest)

    monkeypatch.setattr(engine._pacing, "record", noted)
    answers(engine, [Request((5,) * 70, 30, NO_STOP)])
    assert not clean[0] and all(clean[1:])
    clean.clear()
    engine._compiler.is_busy = True
    answers(engine, [Request((5,), 30, NO_STOP)])
    engine._compiler.is_busy = False
    assert not any(clean)


def test_a_long_prompt_does_not_keep_a_lagging_drafter_from_drafting(monkeypatch):
    """Its tokens are read once, with drafts or without; those of plain rounds are a debt."""
    engine = Engine(target(), drafter("moa-1"), CHAIN, ways=(LONG,), max_tokens=200)
    pacing, lag = engine._pacing, []
    monkeypatch.setattr(
        engine.session.controller, "next", lambda costs, ms: lag.append(ms) or (NO_DRAFT, 8)
    )
    pacing.catch_up_ms = 1.0
    engine.programs._ready = {("decode", 1, NO_DRAFT, GREEDY): None}
    pacing.costs.put(1, NO_DRAFT, 50, 1.0)
    state = RequestState(0, Request((5,) * 150, 9, ()), print, None, False, lags=True)
    pacing.choose([state], GREEDY, False)
    state.num_plain = 8
    pacing.choose([state], GREEDY, False)
    assert lag == [0.0, 8.0]


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
    engine, drafted = serving(name), []
    for reuses in (True, False):
        engine._slots.clear()
        monkeypatch.setattr(engine._slots, "reuses", reuses)
        before = engine.stats()
        for request in requests:
            assert_as_alone([request], answers(engine, [request]))
        now = engine.stats()
        new = {name: getattr(now, name) - getattr(before, name) for name in COUNTED}
        drafted.append((new["drafted_tokens"], now.accepted_tokens - before.accepted_tokens))
        if reuses:
            tokens = sum(len(request.prompt_ids) for request in requests)
            assert (new["prefix_lookups"], new["prefix_hits"]) == (6, 5)
            assert new["prefix_lookup_tokens"] == new["prompt_tokens"] == tokens
            # The beginning; two tokens more; the beginning; all but the last of a prompt that
            # was read; and a whole answer but its last token, which no cache holds.
            assert new["prefix_tokens"] == 40 + 42 + 40 + 42 + (43 + 19)
            assert now.kept_bytes > 0
        else:
            assert new["prefix_lookups"] == new["prefix_hits"] == new["prefix_tokens"] == 0
    assert drafted[0] == drafted[1]


def test_bytes_for_texts_are_more_slots():
    row = Engine(target(), num_slots=4, max_tokens=200)._slot_bytes
    slots = lambda **rest: len(Engine(target(), num_slots=4, max_tokens=200, **rest)._slots)
    assert [slots(), slots(prefix_bytes=3 * row), slots(prefix_bytes=row - 1)] == [6, 7, 4]
    assert slots(prefix_bytes=0) == 4
    assert not Engine(target(), max_tokens=200, prefix_bytes=0)._slots.reuses


# ---- load ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_lost_under_load(started):
    """200 requests from 32 threads, a quarter of which are cancelled at some time."""
    engine = started(engine_of("moa-1", CHAIN, ways=(TREE, LONG), costs=CostTable(), num_slots=8))
    requests, listeners = mixed(200, 7, longest=120), [Listener() for _ in range(200)]

    def client(number: int) -> None:
        random = np.random.default_rng(number)
        for index in range(number, 200, 32):
            handle = engine.submit(requests[index], listeners[index])
            if index % 4 == 0:
                threading.Event().wait(random.uniform(0, 0.2))
                engine.cancel(handle)
            else:
                listeners[index].wait()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(32)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    engine.close(WAIT_S)
    ended = Counter(listener.all[-1].finish_reason for listener in listeners)
    assert set(ended) <= {"stop", "length", "cancelled"} and ended["cancelled"] <= 50
    for request, listener in zip(requests, listeners, strict=True):
        listener.assert_one_end()
        token_ids, reason = alone(request)
        if listener.all[-1].finish_reason == "cancelled":
            assert listener.token_ids == token_ids[: len(listener.token_ids)]
        else:
            assert (listener.token_ids, listener.all[-1].finish_reason) == (token_ids, reason)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.failures) == (0, 0, 0)
    assert stats.finished == dict(ended)
