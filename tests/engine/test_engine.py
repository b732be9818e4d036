"""Many requests at once: each of them has the tokens of plain decoding alone."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from infer.cli.flags.auto import ways_of
from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.state import StaticConfig
from moa_jax.engine import Engine, EngineStats, Request
from moa_jax.engine.batch import Choice, RowOutput
from moa_jax.engine.pacing import ROUNDS_BESIDE_PREFILL, Pacing
from moa_jax.engine.program_cache import GREEDY, LOGPROBS, SAMPLED, ProgramName
from moa_jax.engine.requests import RequestOutput, RequestState
from moa_jax.grammar.compile import json_schema
from moa_jax.speculation.calibrate import TURNS
from moa_jax.speculation.controller import NO_DRAFT, ROUNDS, ShapeChoice
from moa_jax.speculation.cost_table import CostTable
from tests.conftest import slow
from tests.decode.test_chunks import drafter, target
from tests.decode.test_same_text import case_of, engine_for
from tests.decode.tiny import END, TINY, tiny_grammar
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


def test_texts_are_those_of_plain_decoding_alone():
    """Twenty requests with all settings share four slots."""
    requests = mixed(20, 1)
    assert_as_alone(requests, answers(serving(None), requests))


def grown(before: EngineStats, now: EngineStats, name: str) -> int:
    return getattr(now, name) - getattr(before, name)


@pytest.mark.slow
def test_counters_have_the_figures_of_sessions():
    """Compares rounds, tokens, and acceptance by position."""
    engine = serving("moa-2")
    session = Session(target(), drafter("moa-2"), CHAIN, chunk=32)
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
    new = functools.partial(grown, before, now)
    assert new("prompt_tokens") == 3 * len(requests) and new("generated_tokens") == sum(lengths)
    assert new("drafts") == len(rounds)
    assert new("drafted_tokens") == sum(sum(result.drafted) for result in results)
    positions = range(CHAIN.levels - 1)
    by_position = [sum(count > position for count in rounds) for position in positions]
    pairs = zip(now.accepted_by_position, before.accepted_by_position, strict=True)
    assert [one - other for one, other in pairs] == by_position
    assert new("accepted_tokens") == sum(by_position)


def noting(engine: Engine, monkeypatch, kind: str) -> list[tuple]:
    """Records the names and arrays of the programs of a kind that run."""
    run, found = engine.programs.run, []

    def noted(name, *arrays):
        if name.kind == kind:
            found.append((name, *arrays[1:]))
        return run(name, *arrays)

    monkeypatch.setattr(engine.programs, "run", noted)
    return found


def test_a_call_serves_the_settings_of_all_its_requests(monkeypatch):
    engine = serving(None)
    calls = noting(engine, monkeypatch, "decode")
    monkeypatch.setattr(engine.programs, "decode_name", lambda count, shape, rows, _: wanted(rows))
    wanted = lambda rows: (rows_asked.append(rows), ProgramName("decode", 4, NO_DRAFT, LOGPROBS))[1]
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
    """A call of all slots for one request leaves the slot of a request in prefill unchanged."""
    engine = serving(None)
    engine._slots.clear()
    monkeypatch.setattr(
        engine.programs, "decode_name", lambda *_: ProgramName("decode", 4, NO_DRAFT, SAMPLED)
    )
    calls = noting(engine, monkeypatch, "decode")
    first, long = Request((5, 9), 60, NO_STOP), Request(tuple(range(60)) * 2, 30, NO_STOP, LAWS[1])
    found = [Listener(lambda: engine.submit(long, found[1])), Listener()]
    engine.submit(first, found[0])
    for listener in found:
        listener.wait()
    assert_as_alone([first, long], found)
    assert any(call.is_live_B.sum() == 1 for _, call in calls)


def test_calls_are_short_beside_a_prompt_and_end_when_a_waiting_request_may_begin(monkeypatch):
    """A call's time may be a cost, unless the program runs for the first time."""
    engine, seen, clean = serving(None), [], {}
    engine._slots.clear()
    engine._batch._have_run.clear()
    decode, scheduler = engine._batch.decode, engine._scheduler

    def noted(states, choice, slots):
        seen.append((scheduler.has_prefill(), bool(scheduler.waiting), choice.rounds))
        call = decode(states, choice, slots)
        clean.setdefault(choice.name, []).append(call.is_clean)
        return call

    monkeypatch.setattr(engine._batch, "decode", noted)
    requests = [Request((6, 7), 60, NO_STOP), Request((9,) * 150, 20, NO_STOP)]
    requests += [Request((index, 7), 30, NO_STOP) for index in range(4)]
    assert_as_alone(requests, answers(engine, requests))
    assert max(rounds for reads, _, rounds in seen if reads) == ROUNDS_BESIDE_PREFILL
    assert max(rounds for *_, rounds in seen) == ROUNDS
    assert min(rounds for _, waits, rounds in seen if waits) < ROUNDS
    assert all(not first and all(others) for first, *others in clean.values())


def test_truncated_rounds_are_not_counted():
    """A stop or the limit truncates the last round of a row, so acceptance does not count it."""
    rounds = [(3, 2), (1, 2), (2, 2)]
    state = RequestState(0, Request((5,), 9, ()), print, None, GREEDY)
    observed = []
    controller = SimpleNamespace(observe=lambda *call, **rest: observed.append(call[2]))
    session = SimpleNamespace(controller=controller, costs=CostTable())
    pacing = Pacing(SimpleNamespace(session=session), print)
    choice = Choice(ProgramName("decode", 1, CHAIN), 3, {CHAIN: 1.0}, [])
    call = SimpleNamespace(choice=choice, states=[state], is_clean=False)
    for is_done in (False, True):
        pacing.record(call, [RowOutput(state, RequestOutput([], rounds=rounds), is_done)], 1.0)
    assert observed == [[2, 0, 1], [2, 0]]


# ---- draft shapes -------------------------------------------------------------------------


def serving_shapes(name: str) -> Engine:
    """Returns an engine with a choice of shapes, so that its drafter may lag."""

    def make() -> Engine:
        engine = engine_of(name, CHAIN, ways=(TREE, LONG), costs=CostTable())
        for shape in (CHAIN, TREE, LONG):
            engine.programs.compile(
                ProgramName("decode", engine.programs.buckets[-1], shape, SAMPLED)
            )
        return engine

    return kept(("shapes", name), make)


def in_turns(engine: Engine, monkeypatch, *turns: tuple[DraftShape, int]) -> None:
    """The controller uses these shapes and rounds in turn; each call covers all slots."""
    order = itertools.cycle(turns)
    costs = dict.fromkeys((NO_DRAFT, CHAIN, TREE, LONG), 1.0)
    for shape, ms in costs.items():
        for length in engine._pacing.lengths():
            engine._pacing.costs.put(engine.programs.buckets[-1], shape, length, ms)
    controller = engine.session.controller
    monkeypatch.setattr(controller, "next", lambda costs, *lags_ms: ShapeChoice(*next(order)))
    monkeypatch.setattr(engine.programs, "shapes", lambda batch: list(costs))
    monkeypatch.setattr(engine.programs, "buckets", engine.programs.buckets[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("before", [(CHAIN, 2), (NO_DRAFT, 8)])
def test_a_lagging_drafter_has_the_same_acceptance(before, monkeypatch):
    """The acceptance equals that of a drafter that reads each chunk and each round at once.

    A drafter that lags after plain rounds also lags in a copied slot.
    """
    beginning = tuple((5 + 3 * i * i) % 61 for i in range(70))  # more than two chunks
    first, *rest = (Request((*beginning, index), 30, NO_STOP) for index in range(3))
    accepted = []
    for engine in (serving_shapes("moa-2"), serving("moa-2")):
        engine._slots.clear()
        start = engine.stats()
        for request, turn in ((first, before), *((each, (CHAIN, 2)) for each in rest)):
            with monkeypatch.context() as patch:
                if engine.session.controller:
                    in_turns(engine, patch, turn)
                assert_as_alone([request], answers(engine, [request]))
            start = engine.stats() if request is first else start
        new = functools.partial(grown, start, engine.stats())
        accepted.append((new("drafts"), new("accepted_tokens")))
        assert new("prefix_tokens") == 140
    assert accepted[0] == accepted[1] and accepted[0][1] > 0


# ---- programs -----------------------------------------------------------------------------


def test_few_programs_serve_the_default_flags():
    """Counts decode programs by the flags of infer.serve: 16 slots, and the shapes of mode auto."""
    own = DraftShape(5)
    pair = (target(), drafter("moa-1"), own)
    shapes = ways_of(own, pair[1])
    programs = Engine(*pair, ways=shapes, costs=CostTable(), max_tokens=200).programs
    every = {*programs.first(), *programs.later()}
    assert programs.buckets == (1, 2, 4, 8, 16)
    assert len([name for name in every if name.kind == "decode"]) <= 40  # none is compiled besides
    assert len(every) <= 48


@pytest.mark.slow
def test_no_request_waits_for_a_compile(monkeypatch):
    """The first programs serve all kinds of requests, and the engine's thread compiles nothing."""
    engine = serving("lookup")
    before = len(engine.programs.ready)
    own = {"stop_ids": NO_STOP, "top_logprobs": 2}
    requests = [Request((5, 9), 20, NO_STOP, law) for law in LAWS]
    requests += [Request((5, 9), 20, **own), Request((7, 8) * 40, 1, **own, prompt_logprobs=True)]
    requests += [replace(requests[-1], max_new_tokens=0), Request((7,) * 180, 5, **own)]
    found = answers(engine, requests)
    assert [len(each.token_ids) for each in found] == [20] * (len(LAWS) + 1) + [1, 0, 5]
    assert {each.all[-1].finish_reason for each in found} == {"length"}
    assert len(engine.programs.ready) == before


def compiled(engine: Engine) -> list[tuple]:
    """Records programs instead of compiling them; each program is available at once."""
    made, make = [], engine.programs.compile

    def noted(name, *arrays):
        if name not in engine.programs.ready:
            made.append(name)
            make(name)

    engine.programs.compile = noted
    return made


@pytest.mark.slow
def test_programs_of_a_request_are_compiled_beside_it_and_the_rest_when_idle(started):
    engine = engine_of(None, num_slots=2, chunk=16)
    made = compiled(engine)
    requests = [Request((index, 7), 60, NO_STOP) for index in range(2)]
    assert_as_alone(requests, answers(started(engine), requests))
    engine.session.background.wait()
    assert made == [ProgramName("decode", 2, NO_DRAFT, GREEDY)]
    del engine.programs.later
    answers(engine, requests[:1])
    everything = {*engine.programs.first(), *engine.programs.later()}
    wait_for(lambda: everything <= engine.programs.ready.keys(), WAIT_S)
    greedy = [name for name in made if name.kind == "decode" and name.rows == GREEDY]
    assert made.index(greedy[-1]) < made.index(ProgramName("decode", 1, NO_DRAFT, LOGPROBS))


# ---- costs ----------------------------------------------------------------------------


def test_a_program_without_a_cost_leaves_plain_decoding_in_the_choice(caplog):
    """Without a cost of plain decoding, nothing is chosen; a larger program is logged once."""
    engine = measuring(num_slots=4)
    pacing, programs = engine._pacing, engine.programs
    programs.ready = {("decode", 4, shape, SAMPLED, False): None for shape in (NO_DRAFT, CHAIN)}
    states = [RequestState(id, Request((5,), 9, ()), print, None, GREEDY) for id in range(2)]
    names = ("decode", 2, NO_DRAFT, GREEDY), ("decode", 4, NO_DRAFT, SAMPLED)
    own, larger = (ProgramName(*name) for name in names)
    for shape, ms in ((NO_DRAFT, 1.0), (CHAIN, 90.0)):
        pacing.costs.put(4, shape, 1, ms)
    assert pacing.choose(states) == (larger, 1, {NO_DRAFT: 1.0, CHAIN: 90.0}, [own])
    programs.ready[own] = None
    assert pacing.choose(states) == (own, 8, {}, [])
    line = "a batch of 2 decodes in the program of 4 until its own is compiled"
    assert caplog.messages == [line]
    name = ("decode", 4, NO_DRAFT, LOGPROBS, False)
    programs.ready[name] = None
    states = [RequestState(id, Request((5,), 9, ()), print, None, LOGPROBS) for id in range(2)]
    pacing._stood_in.clear()
    assert pacing.choose(states) == (name, 8, {}, [])
    assert caplog.messages == [line]  # no program of two rows with log-probabilities is to come


def test_a_call_behind_a_dropped_pass_is_not_clean(monkeypatch):
    """The device runs the pass ahead of the call that follows the last masked one."""
    engine, calls = engine_of(None), []
    record = lambda call, *rest: calls.append((call.choice.name.masked, call.is_clean))
    monkeypatch.setattr(engine._pacing, "record", record)
    monkeypatch.setattr(engine.session.background, "submit", lambda *job, **rest: None)
    engine.prepare_masks()
    engine.start()
    grammar = tiny_grammar(json_schema({"enum": ["5", "7"]}))
    free, masked = Request((5,), 90, ()), Request((5,), 9, (END,), grammar=grammar)
    for requests in ([free], [free, masked]):
        answers(engine, requests)
    engine.close()
    last = len(calls) - 1 - calls[::-1].index((True, False))
    assert calls[last + 1] == (False, False) and (False, True) in calls[last + 2 :]


def test_drafted_calls_are_as_long_as_plain_ones_and_catching_up_has_a_price(monkeypatch):
    """The drafter's pass takes a fixed time and a time per token, of plain rounds and prompts."""
    engine, seen = measuring(num_slots=4), []
    pacing, programs = engine._pacing, engine.programs
    programs.ready = {("decode", 4, shape, SAMPLED, False): None for shape in (NO_DRAFT, CHAIN)}
    for shape, ms in ((NO_DRAFT, 1.0), (CHAIN, 1.9)):
        pacing.costs.put(4, shape, 1, ms)
    (least, most), middle = pacing.lengths(), sum(pacing.lengths()) // 2
    for length, seconds in [(least, 2e-3), (most, 4e-3)] * (1 + TURNS):
        pacing.record_dummy_run(ProgramName("catch_up", 32), length, seconds)
    pacing.dummy_runs.append((larger := ProgramName("decode", 4, LONG), most))
    for _ in range(1 + TURNS):
        pacing.record_dummy_run(larger, least, 2e-3)
    assert pacing.costs.ms(4, LONG, 9) is None  # the other length is not timed yet
    states = [RequestState(id, Request((5,), 9, ()), print, None, GREEDY) for id in range(3)]
    # The answers have 9 tokens.
    states[0].num_prompt, states[1].num_plain, states[2].num_plain = most, middle, most
    choose = lambda costs, *lags_ms: seen.extend(lags_ms) or ShapeChoice(CHAIN, 8)
    monkeypatch.setattr(engine.session.controller, "next", choose)
    assert pacing.choose(states).rounds == 4
    assert seen == pytest.approx([0.0 + 3.0 + 4.0, 4.0, 9.0], rel=0.01)
    monkeypatch.setattr(StaticConfig, "lag_limit", 50)  # a drafter lags no further
    pacing.add_dummy_runs([name := ProgramName("catch_up", 32)])
    assert {at for each, at in pacing.dummy_runs if each == name} == {1, 50}


def measuring(**settings) -> Engine:
    """Returns an engine that compiles only on demand."""
    own = {"ways": (LONG,), "costs": CostTable(), "max_tokens": 200, "chunk": 32, "num_slots": 2}
    engine = Engine(target(), drafter("lookup"), CHAIN, **(own | settings))
    engine.programs.later = lambda: []
    return engine


@pytest.mark.slow
def test_a_closed_loop_of_one_client_measures_a_new_program(started):
    saved = []
    engine = measuring(on_calibrated=lambda costs: saved.append(len(costs.entries())))
    engine.prepare()
    assert not engine._batch._state.round.length_B.any()  # dummy runs leave empty slots
    lengths = engine._pacing.lengths()
    known = lambda batch, shape: [engine._pacing.costs.has(batch, shape, n) for n in lengths]
    assert known(1, NO_DRAFT) == known(2, NO_DRAFT) == [True, True] and saved == [1, 2, 3, 4]
    engine._compile(ProgramName("decode", 1, CHAIN, GREEDY))
    request, asked = Request((5, 9, 2), 180, NO_STOP), []

    def ask() -> None:
        """Submits a request at the end of each answer, on the engine's thread."""
        asked.append(Listener(at_end=lambda: saved[-1] == 6 or ask()))
        engine.submit(request, asked[-1])

    ask()
    started(engine)
    wait_for(lambda: saved == [1, 2, 3, 4, 5, 6], WAIT_S)
    for listener in asked:
        listener.wait()
    assert_as_alone([request] * len(asked), asked)


@pytest.mark.slow
def test_a_dummy_run_that_fails_is_not_tried_again(monkeypatch, started):
    engine, tried = started(measuring()), []

    def fail(name, *cell):
        tried.append(name)
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine._batch, "dummy_run", fail)
    chain, request = ProgramName("decode", 1, CHAIN, GREEDY), Request((5, 9, 2), 10, NO_STOP)
    engine._compile(chain)
    wait_for(lambda: tried == [chain] and not engine._pacing.dummy_runs)
    assert_as_alone([request], answers(engine, [request]))
    assert tried == [chain] and engine.healthy and engine.stats().failures == 0


@pytest.mark.parametrize("num_empty, expected", [(6, [0, 1, 2, 3]), (2, [0, 1]), (0, [0])])
def test_a_dummy_run_drops_a_cached_prefix_only_if_no_slot_is_empty(num_empty, expected):
    engine, seen = measuring(num_slots=4), []
    slots, batch = engine._slots, engine._batch
    for slot in range(num_empty, 6):
        slots._tokens[slot] = np.ones(20, np.int32)
    batch.is_lost, batch.dummy_run = lambda: False, lambda *run: seen.append(run[2]) or 1.0
    engine._pacing.add_dummy_runs([ProgramName("decode", 4, NO_DRAFT)])
    with engine._compiling_masks:  # a compilation would make the measured cost too high
        assert not engine._dummy_run()
    assert engine._dummy_run() and seen == [expected]
    assert slots.num_kept == min(6 - num_empty, 5)


def test_only_calls_that_ran_alone_correct_costs():
    """Calls beside a prompt, a catch-up, a compile, or with log-probabilities correct no cost."""
    engine = measuring()
    pacing = engine._pacing
    for length in pacing.lengths():
        pacing.costs.put(1, NO_DRAFT, length, 1.0)
    state = RequestState(0, Request((5,), 9, ()), print, None, GREEDY)
    name = ProgramName("decode", 1, NO_DRAFT)
    call = SimpleNamespace(states=[state])
    output = RowOutput(state, RequestOutput([1] * 8, rounds=[(1, 0)] * 8), False)
    for costs, is_clean in (({NO_DRAFT: 1.0}, False), ({}, True), ({NO_DRAFT: 1.0}, True)):
        assert pacing.costs.ms(1, NO_DRAFT, 9) == 1.0
        call.choice, call.is_clean = Choice(name, 8, costs, []), is_clean
        pacing.record(call, [output], 8.0)
    assert pacing.costs.ms(1, NO_DRAFT, 9) > 1.0


# ---- prompts that begin alike -------------------------------------------------------------


@pytest.mark.parametrize("name", [None, *map(slow, ("lookup", "eagle3"))])
def test_prompts_that_begin_alike_reuse_the_cached_prefix(name, monkeypatch):
    """Chats that continue, and prompts with a common prefix, have the same texts and drafts."""
    beginning = tuple((5 + 3 * i * i) % 61 for i in range(40))
    tails = [(), (10, 8, 7), (10, 8, 6, 5), tuple(range(30)), (10, 8, 7)]  # no answer begins so
    requests = [Request((*beginning, *tail), 20, NO_STOP, LAWS[i]) for i, tail in enumerate(tails)]
    answer = alone(requests[1])[0]
    requests.append(Request((*requests[1].prompt_ids, *answer, 3, 4), 20, NO_STOP))
    engine, drafted = serving(name), []
    for reuses in (True, False):
        engine._slots.clear()
        monkeypatch.setattr(engine._slots, "reuses", reuses)
        before, outputs = engine.stats(), []
        for request in requests:
            (listener,) = answers(engine, [request])
            assert_as_alone([request], [listener])
            outputs += listener.all
        now = engine.stats()
        new = functools.partial(grown, before, now)
        drafted.append((new("drafted_tokens"), new("accepted_tokens")))
        rounds = [each for output in outputs for each in output.rounds]
        assert sum(count for _, count in rounds) == new("drafted_tokens")
        assert sum(output.num_cached for output in outputs) == new("prefix_tokens")
        if reuses:
            tokens = sum(len(request.prompt_ids) for request in requests)
            assert new("prefix_lookup_tokens") == new("prompt_tokens") == tokens
            # The beginning; two tokens more; the beginning; the last cached prompt but one token;
            # and a whole answer but its last token, which is not in the cache.
            assert new("prefix_tokens") == 40 + 42 + 40 + 42 + (43 + 19)
            assert now.kept_bytes > 0
        else:
            assert new("prefix_lookup_tokens") == new("prefix_tokens") == 0
    assert drafted[0] == drafted[1]


@pytest.mark.slow
def test_a_prefix_whose_rows_a_window_has_dropped_is_computed_again(monkeypatch):
    """A chat continues at its end; earlier tokens are copied from a slot that dropped no row."""
    tiny, tails = TINY.gemma, ((), (), (3, 4), (), (1, 2))
    long, short = (tuple((5 + k * i * i) % 61 for i in range(n)) for k, n in ((3, 20), (7, 18)))
    plain = Session(tiny.target(), cache_rows=128)
    text_of = lambda prompt, new: plain.generate([prompt], new, NO_STOP)[0].token_ids
    prompts = (long, long, (*long, *text_of(long, 60)), short, short)
    given = zip(prompts, tails, (60, 60, 20, 4, 4), strict=True)
    requests = [Request((*prompt, *tail), new, NO_STOP) for prompt, tail, new in given]
    expected = [text_of(each.prompt_ids, each.max_new_tokens) for each in requests]
    monkeypatch.setattr("moa_jax.model.cache.TILE", 96)
    with engine_for(case_of("engine:moa-1+gemma:tree:greedy"), monkeypatch) as engine:
        engine.start()
        found = [answers(engine, [each])[0] for each in requests]
        engine.close()
    assert [each.token_ids for each in found] == expected
    assert [each.all[0].num_cached for each in found] == [0, 0, 79, 0, 18]


# ---- load ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_lost_under_load(started):
    """40 requests are submitted at once, and a quarter of them is cancelled at some time."""
    engine = started(engine_of("moa-2", CHAIN, ways=(TREE, LONG), costs=CostTable()))
    requests, listeners = mixed(40, 7, longest=120), [Listener() for _ in range(40)]
    random = np.random.default_rng(0)
    for index, (request, listener) in enumerate(zip(requests, listeners, strict=True)):
        id = engine.submit(request, listener)
        if index % 4 == 0:
            threading.Timer(random.uniform(0, 2.0), engine.cancel, (id,)).start()
    ends = Counter(listener.wait().finish_reason for listener in listeners)
    assert set(ends) <= {"stop", "length", "cancelled"} and ends["cancelled"] <= 10
    for request, listener in zip(requests, listeners, strict=True):
        listener.assert_one_end()
        wanted, said = alone(request), (listener.token_ids, listener.all[-1].finish_reason)
        if said[1] == "cancelled":
            wanted = wanted[0][: len(said[0])], "cancelled"
        assert said == wanted
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.failures) == (0, 0, 0)
    assert stats.finished == dict(ends)
