"""However requests and engines end or fail, each request gets one last output."""

from __future__ import annotations

import threading
import time

import jax
import pytest

from moa_jax.config import Sampling
from moa_jax.engine import Engine, EngineClosed, QueueFull, Request, RequestHandle, RequestOutput
from moa_jax.engine.device_ops import row_settings
from moa_jax.engine.engine import Wake
from moa_jax.errors import InputError
from tests.decode.test_chunks import target
from tests.engine.engines import (
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
from tests.meeting import wait_for

# ---- ends ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_request_may_be_cancelled_at_any_time(started):
    """In any phase; the request gets one last output, and other requests get none."""
    engine = engine_of("moa-1", num_slots=2)
    requests = [Request((index, 9), 190, NO_STOP, LAWS[index % 3]) for index in range(6)]
    requests += [Request((50, 3), 30, NO_STOP)]
    listeners = [Listener() for _ in requests]
    first = listeners[0] = Listener(lambda: [engine.cancel(handles[0]) for _ in range(2)])
    engine.submit(Request((1,) * 150, 40, NO_STOP), gone := Listener())
    handles = [
        engine.submit(request, listener)
        for request, listener in zip(requests, listeners, strict=True)
    ]
    engine.cancel(RequestHandle(0))
    engine.cancel(handles[3])
    started(engine)
    for listener in (gone, first, listeners[3]):
        assert listener.wait().finish_reason == "cancelled"
        listener.assert_one_end()
    assert listeners[3].token_ids == [] == gone.token_ids
    said = first.token_ids
    assert said == alone(requests[0])[0][: len(said)]
    kept = [index for index in range(len(requests)) if index not in (0, 3)]
    for index in kept:
        listeners[index].wait()
    assert_as_alone([requests[i] for i in kept], [listeners[i] for i in kept])
    engine.cancel(handles[-1])
    assert engine.stats().finished == {"cancelled": 3, "length": 5}
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_full_queue_takes_nothing_more(started):
    engine = engine_of(None, max_waiting=2, num_slots=1)
    request = Request((5,), 3, NO_STOP)
    with pytest.raises(QueueFull):  # those who come together find room together
        engine.submit(request, Listener(), others=3)
    listeners = [Listener() for _ in range(3)]  # one of them need not wait long
    for others, listener in zip((2, 1, 0), listeners, strict=True):
        engine.submit(request, listener, others)
    with pytest.raises(QueueFull, match="try again later"):
        engine.submit(request, Listener())
    assert engine.stats().waiting == 3
    started(engine)
    for listener in listeners:
        listener.wait()
    assert_as_alone([request] * 3, listeners)
    assert engine.stats().waiting == 0


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
    assert engine.stats().waiting == 0
    engine.submit(Request((1,) * 190, 10, ()), Listener())  # of exactly max_tokens
    assert engine.stats().waiting == 1


def test_a_stop_that_is_no_token_stops_nothing():
    settings = row_settings(Sampling(), 2, 9, (2**40, 3, -5, 64), 64)
    assert set(settings.stop_ids_BX[0].tolist()) == {3, -1}


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


def test_an_engine_that_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch):
    """With what it needs, what there is, and the flags that lower it."""
    monkeypatch.setattr("moa_jax.runtime.memory.free_bytes", lambda: 200_000)
    with pytest.raises(InputError, match="lower --slots, --max-tokens or --prefix-bytes"):
        Engine(target(), num_slots=16, max_tokens=200)
    plan = Engine(target(), num_slots=2, prefix_bytes=0, max_tokens=200).memory
    assert plan.slots > plan.weights > 0 == plan.prefix_cache


@pytest.mark.slow
def test_closing_lets_answers_end_in_the_time_they_have():
    engine = engine_of("moa-1", num_slots=1)
    soon, late = Request((5,), 5, NO_STOP), Request((6,), 190, NO_STOP)
    engine.start()
    engine.submit(soon, one := Listener())
    engine.close(drain_s=WAIT_S)
    assert_as_alone([soon], [one])
    with pytest.raises(EngineClosed):
        engine.submit(soon, Listener())
    hurried = engine_of(None, num_slots=1)
    listeners = [Listener(), Listener()]
    for listener in listeners:
        hurried.submit(late, listener)
    execute = hurried._execute
    hurried._execute = lambda command: (
        wait_for(lambda: hurried._closed),
        execute(command),
    )
    hurried.start()
    hurried.close()
    assert [listener.wait().finish_reason for listener in listeners] == ["cancelled"] * 2


def test_an_engine_starts_once_and_a_client_may_close_it():
    """Answered requests end, and a close on the engine's thread does not wait for this thread."""
    engine = engine_of(None, num_slots=2)
    names = lambda: [each.name for each in threading.enumerate()].count("engine")
    before = names()
    engine.start()
    engine.start()
    assert names() == before + 1
    listeners = [Listener(), Listener()]

    def closing(output: RequestOutput) -> None:
        listeners[0](output)
        if not output.finish_reason:
            engine.close(drain_s=0.0)

    with at_once(engine):
        engine.submit(Request((6,), 190, NO_STOP), listeners[1])
        engine.submit(Request((5,), 190, NO_STOP), closing)
    assert [listener.wait().finish_reason for listener in listeners] == ["cancelled"] * 2
    engine.close()
    for listener in listeners:
        listener.assert_one_end()
    assert names() == before


def test_an_answer_that_takes_too_long_to_drain_is_cut(monkeypatch):
    engine = engine_of(None, num_slots=1)
    run = engine.programs.run
    slowly = lambda name, *arrays: (time.sleep(0.1), run(name, *arrays))[1]
    monkeypatch.setattr(engine.programs, "run", slowly)
    engine.start()
    engine.submit(Request((5,), 190, NO_STOP), cut := Listener())
    wait_for(lambda: len(cut.token_ids) > 1)
    engine.close(drain_s=0.2)
    assert cut.wait().finish_reason == "cancelled" and 1 < len(cut.token_ids) < 190


# ---- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "most"), [("decode", 4), ("prefill", 1), ("copy", 1)])
def test_a_call_that_fails_before_it_runs_ends_those_in_it_alone(what, most, monkeypatch):
    """Of a decode call those who decode, of a chunk the one who is read; the engine goes on."""
    engine = serving("moa-1")
    engine._slots.clear()
    failures = engine.stats().failures
    failing(engine, monkeypatch, what, [1 if what == "copy" else 4])
    requests = mixed(12, 5)
    if what == "copy":
        requests = [Request((*range(40), index), 9, NO_STOP) for index in range(12)]
    lost, fine = split(found := answers(engine, requests))
    assert 1 <= len(lost) <= most and engine.stats().failures == failures + 1
    assert_as_alone([requests[i] for i in fine], [found[i] for i in fine])


def test_a_prefix_of_a_prompt_that_failed_is_not_copied(monkeypatch):
    """Two prompts that begin alike come together, and the first one's chunk fails."""
    engine = serving(None)
    engine._slots.clear()
    failing(engine, monkeypatch, "prefill", [0])
    beginning = tuple((5 + 3 * i * i) % 61 for i in range(30))
    requests = [Request((*beginning, *tail), 9, NO_STOP) for tail in ((), (1, 2), (3,))]
    lost, fine = split(found := answers(engine, requests))
    assert lost == [0]
    assert_as_alone([requests[i] for i in fine], [found[i] for i in fine])


def test_an_idle_engine_that_lost_its_state_allocates_another_one(started, monkeypatch):
    """And is as healthy as before, also where that fails."""
    engine = engine_of(None, num_slots=1)
    del engine._while_idle
    monkeypatch.setattr("moa_jax.engine.engine.QUIET_S", 0.01)
    engine.programs.later = lambda: iter(())
    run, is_full = engine.programs.run, threading.Event()

    def full(name, *arrays):
        if name == ("empty",) and is_full.is_set():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")
        return run(name, *arrays)

    engine.programs.run = full
    started(engine)
    engine._batch.drop()
    is_full.set()
    for _ in range(4):
        engine._commands.put(Wake())
        wait_for(engine._commands.empty)
    assert engine.healthy
    is_full.clear()
    engine._commands.put(Wake())
    wait_for(lambda: not engine._batch.is_lost())


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_who_runs_is_lost_with_the_state_and_who_waits_is_not(what, monkeypatch):
    """A call that fails on the device has taken the only state with it."""
    engine = serving("moa-1")
    run, count = engine.programs.run, iter(range(1000))

    def broken(name, state=None, *arrays):
        if name[0] == what and next(count) == 4:
            jax.tree.map(lambda leaf: leaf.delete(), state)
            raise RuntimeError("the device is on fire")
        return run(name, *(() if state is None else (state, *arrays)))

    monkeypatch.setattr(engine.programs, "run", broken)
    requests = mixed(12, 5)
    lost, fine = split(found := answers(engine, requests))
    assert 1 <= len(lost) <= 4
    assert_as_alone([requests[i] for i in fine], [found[i] for i in fine])


@pytest.mark.parametrize("what", ["_read_decode", "_read_prefill"])
def test_a_report_that_cannot_be_read_is_a_failed_step(what, monkeypatch):
    """An error of the device shows when its arrays are read."""
    engine = serving("moa-1")
    read, count = getattr(engine, what), iter(range(1000))

    def broken(*call):
        if next(count) == 3:
            raise RuntimeError("the device is on fire")
        return read(*call)

    monkeypatch.setattr(engine, what, broken)
    requests = [Request((5, index), 60, NO_STOP) for index in range(8)]
    lost, fine = split(found := answers(engine, requests))
    assert 1 <= len(lost) <= 4
    assert_as_alone([requests[i] for i in fine], [found[i] for i in fine])


def test_a_state_that_cannot_be_allocated_ends_one_request_after_the_other(monkeypatch, caplog):
    """In one line that names the flags; the engine serves again when there is room."""
    engine = serving("moa-1")
    run, is_full = engine.programs.run, threading.Event()

    def full(name, *arrays):
        if name == ("empty",) and is_full.is_set():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nwherever")
        return run(name, *arrays)

    monkeypatch.setattr(engine.programs, "run", full)
    engine._batch.drop()
    is_full.set()
    requests = [Request((5, index), 9, NO_STOP) for index in range(6)]
    found = answers(engine, requests)
    assert {each.all[-1].finish_reason for each in found} == {"error"}
    lines = [line for line in caplog.text.splitlines() if "out of memory" in line]
    assert (
        lines and all("lower --slots" in line for line in lines) and "Traceback" not in caplog.text
    )
    is_full.clear()
    assert_as_alone(requests, answers(engine, requests))


@pytest.mark.parametrize(("what", "tokens"), [("decode", 9), ("prefill", 1)])
def test_three_failed_steps_in_a_row_show_in_health_until_one_works(what, tokens, monkeypatch):
    engine, request = serving("moa-1"), Request((5, 6), tokens, NO_STOP)
    run, breaks = engine.programs.run, [False]

    def broken(name, *arrays):
        if name[0] == what and breaks[0]:
            raise RuntimeError("the device is on fire")
        return run(name, *arrays)

    monkeypatch.setattr(engine.programs, "run", broken)
    healthy = []
    for breaks[0] in (True, True, False, True, True, True, False):
        assert (answers(engine, [request])[0].all[-1].finish_reason == "error") == breaks[0]
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


def test_requests_that_a_stuck_engine_has_not_taken_get_an_error():
    """Before a process exits, each request gets an error, though a call blocks the thread."""
    engine, found = Engine(target(), num_slots=1, max_tokens=64), [Listener() for _ in range(2)]
    for each in found:
        engine.submit(Request((5,), 3, NO_STOP), each)  # no thread takes commands
    engine.abandon("process 1 has died")
    for each in found:
        assert (each.wait().finish_reason, each.all[0].error) == ("error", "process 1 has died")
        each.assert_one_end()
    engine.close()
    assert [len(each.all) for each in found] == [1, 1]


def test_an_engine_that_is_abandoned_while_a_call_is_read_has_no_failed_step(started, monkeypatch):
    engine = Engine(target(), num_slots=1, max_tokens=64)
    read = engine._batch.read

    def abandoned(call):
        engine.abandon("process 1 has died")  # by another thread, as it happens
        return read(call)

    monkeypatch.setattr(engine._batch, "read", abandoned)
    engine.submit(Request((5,), 60, NO_STOP), found := Listener())
    started(engine)
    assert found.wait().finish_reason == "error"
    engine.close()
    found.assert_one_end()  # and no token of the call that was read
    assert engine.stats().failures == 0 and engine.stats().running == 0


def test_a_client_that_fails_harms_nobody():
    engine = serving(None)

    def broken(output: RequestOutput) -> None:
        raise ValueError("a bug of somebody else")

    request = Request((5, 9), 20, NO_STOP)
    engine.submit(request, broken)
    assert_as_alone([request] * 3, answers(engine, [request] * 3))
