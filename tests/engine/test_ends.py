"""Each request gets exactly one last output, for every end of a request and of an engine."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from moa_jax.config import Sampling
from moa_jax.decode.row_settings import full_bitmask, row_settings
from moa_jax.engine import Engine, EngineClosed, QueueFull, Request, RequestOutput
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
    """In the queue, in prefill and while it decodes; the slot serves the next request."""
    engine = engine_of(None, num_slots=1)
    requests = [Request((1,) * 150, 40, NO_STOP), Request((5, 9), 190, NO_STOP, LAWS[1])]
    requests += [Request((6,), 9, NO_STOP), Request((50, 3), 30, NO_STOP)]
    listeners = [Listener() for _ in requests]
    listeners[1] = Listener(lambda: [engine.cancel(1) for _ in range(2)])
    assert [engine.submit(*each) for each in zip(requests, listeners, strict=True)] == [*range(4)]
    engine.cancel(0)
    engine.cancel(2)
    started(engine)
    assert [each.wait().finish_reason for each in listeners] == [*["cancelled"] * 3, "length"]
    said = listeners[1].token_ids
    assert said and said == alone(requests[1])[0][: len(said)]
    assert_as_alone(requests[3:], listeners[3:])
    engine.cancel(3)
    assert engine.stats().finished == {"cancelled": 3, "length": 1}
    assert engine.stats().running == engine.stats().waiting == 0


SCORED = Request((5,), 3, (), top_logprobs=1, prompt_logprobs=True)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 3, ()), "empty"),
        (Request((64,), 3, ()), "outside the vocabulary"),
        (Request((1,) * 190, 11, ()), "201|at most"),
        (Request((1,) * 300, 11, ()), "positions"),
        (Request((1,), 0, (), top_logprobs=2), "at least 1"),
        (Request((1,), 3, tuple(range(65))), "65 stop ids"),
        (Request((1,), 3, (), top_logprobs=21), "21 top tokens"),
        (Request((1,), 3, (), Sampling(logit_bias=((64, 1.0),))), "id 64 of 64"),
        (Request((1,), 3, (), Sampling(bad_words=((1,) * 17,))), "longest of 17 tokens; give at"),
        (Request((1,), 3, (), Sampling(bad_words=((64,),))), "sequences of ids below 64"),
        (replace(SCORED, max_new_tokens=-1), "ask for at least 1"),
        (replace(SCORED, prompt_ids=(5,) * 200, max_new_tokens=0), "1 are to follow"),
    ],
)
def test_invalid_requests_are_refused(request_, message):
    engine = Engine(target(), max_tokens=200)
    with pytest.raises(InputError, match=message):
        engine.submit(request_, Listener())
    engine.submit(Request((1,) * 190, 10, ()), Listener())  # of exactly max_tokens
    assert engine.stats().waiting == 1


def test_an_engine_that_cannot_be_is_refused(monkeypatch):
    """Memory is checked before anything is allocated, and the error names the flags."""
    for settings in ({"max_tokens": 257}, {"max_tokens": 1}, {"num_slots": 0}):
        with pytest.raises(InputError, match="choose"):
            Engine(target(), **settings)
    monkeypatch.setattr("moa_jax.runtime.memory.free_bytes", lambda: 200_000)
    with pytest.raises(InputError, match="lower --slots, --max-tokens or --prefix-bytes"):
        Engine(target(), num_slots=16, max_tokens=200)
    plan = Engine(target(), num_slots=2, prefix_bytes=0, max_tokens=200).memory
    assert plan.slots > plan.weights > 0 == plan.prefix_cache


@pytest.mark.slow
def test_closing_lets_answers_end_in_the_time_they_have():
    engine, request = engine_of(None, num_slots=1), Request((5,), 5, NO_STOP)
    engine.start()
    engine.submit(request, one := Listener())
    engine.close(drain_s=WAIT_S)
    assert_as_alone([request], [one])
    with pytest.raises(EngineClosed):
        engine.submit(request, Listener())


def test_a_device_that_does_not_respond_does_not_keep_an_engine_from_closing(monkeypatch):
    monkeypatch.setattr("moa_jax.engine.engine.STUCK_S", 0.1)
    engine, reads, is_stuck = engine_of(None), threading.Event(), threading.Event()
    read = lambda call: (reads.set(), is_stuck.wait(WAIT_S))
    monkeypatch.setattr(engine._batch, "read", read)
    engine.start()
    engine.submit(Request((5,), 60, NO_STOP), found := Listener())
    assert reads.wait(WAIT_S)
    engine.close()
    assert found.wait().error == "the device does not respond"
    is_stuck.set()
    engine._thread.join(WAIT_S)


def test_a_full_queue_takes_nothing_more(started):
    engine = engine_of(None, max_waiting=2)
    request = Request((5,), 3, NO_STOP)
    with pytest.raises(QueueFull):  # requests that belong together are accepted together
        engine.submit(request, Listener(), others=6)
    listeners = [Listener() for _ in range(6)]  # four of them do not have to wait
    for others, listener in zip((5, 4, 3, 2, 1, 0), listeners, strict=True):
        engine.submit(request, listener, others)
    with pytest.raises(QueueFull, match="try again later"):
        engine.submit(request, Listener())
    assert engine.stats().waiting == 6
    started(engine)
    for listener in listeners:
        listener.wait()
    assert_as_alone([request] * 6, listeners)
    assert engine.stats().waiting == 0


def test_a_stop_that_is_no_token_stops_nothing():
    settings = row_settings(Sampling(), 2, 9, (2**40, 3, -5, 64), 64)
    assert set(settings.stop_ids_BX[0].tolist()) == {3, -1}


def test_a_request_is_taken_without_work_for_the_device():
    """`submit` runs on an event loop; a matcher is made when the request gets a slot."""
    engine, biases = Engine(target(), max_tokens=200), ((5, 2.0), (7, float("-inf")))
    grammar = SimpleNamespace(bitmask_W=full_bitmask(64), row=pytest.fail)
    with jax.transfer_guard("disallow_explicit"):
        for sampling in (*LAWS, Sampling(1.0, seed=2**32 - 1, logit_bias=biases)):
            request = Request((5, 9), 20, (3,), sampling, top_logprobs=2, grammar=grammar)
            engine.submit(request, Listener())


def test_a_client_may_close_an_engine():
    """A close on the engine's thread does not wait for this thread."""
    engine, found = engine_of(None), Listener(lambda: engine.close())
    engine.start()
    engine.start()
    engine.submit(Request((5,), 190, NO_STOP), found)
    assert found.wait().finish_reason == "cancelled"
    engine.close()
    found.assert_one_end()
    assert not engine.healthy


def test_an_answer_that_takes_too_long_to_drain_is_cut(monkeypatch):
    engine = engine_of(None)
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
    """A failed decode call ends its decoding requests, a failed chunk ends its own request."""
    engine = serving(None)
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
    """Two prompts with a common prefix are submitted together, and the first one's chunk fails."""
    engine = serving(None)
    engine._slots.clear()
    failing(engine, monkeypatch, "prefill", [0])
    beginning = tuple((5 + 3 * i * i) % 61 for i in range(30))
    requests = [Request((*beginning, *tail), 9, NO_STOP) for tail in ((), (1, 2), (3,))]
    lost, fine = split(found := answers(engine, requests))
    assert lost == [0]
    assert_as_alone([requests[i] for i in fine], [found[i] for i in fine])


@pytest.mark.parametrize("what", ["decode", "prefill"])
def test_running_requests_fail_with_the_state_and_waiting_ones_do_not(what, monkeypatch):
    """A call that fails on the device has consumed the only copy of the state."""
    engine = serving(None)
    run, count = engine.programs.run, iter(range(1000))

    def broken(name, state=None, *arrays):
        if name.kind == what and next(count) == 4:
            jax.tree.map(lambda leaf: leaf.delete(), state)
            raise RuntimeError("the device is on fire")
        return run(name, state, *arrays)

    monkeypatch.setattr(engine.programs, "run", broken)
    requests = mixed(12, 5)
    lost, fine = split(found := answers(engine, requests))
    assert 1 <= len(lost) <= 4
    assert_as_alone([requests[i] for i in fine], [found[i] for i in fine])


def test_a_full_device_is_one_line_and_the_engine_serves_again(monkeypatch, caplog):
    """If the state cannot be allocated, each request in turn ends with an error."""
    engine = serving(None)
    with monkeypatch.context() as patch:
        error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nwherever")
        failing(engine, patch, "empty", range(99), error)
        engine._batch.drop()
        requests = [Request((5, index), 9, NO_STOP) for index in range(6)]
        found = answers(engine, requests)
    assert {each.all[-1].finish_reason for each in found} == {"error"}
    lines = [line for line in caplog.text.splitlines() if "out of memory" in line]
    assert lines and all("lower --slots" in line for line in lines)
    assert "Traceback" not in caplog.text
    assert_as_alone(requests, answers(engine, requests))


@pytest.mark.parametrize(("what", "tokens"), [("decode", 9), ("prefill", 1)])
def test_three_failed_steps_in_a_row_show_in_health_until_one_works(what, tokens, monkeypatch):
    engine, request = serving(None), Request((5, 6), tokens, NO_STOP)
    failing(engine, monkeypatch, what, times := [])
    healthy = []
    for fails in (True, True, False, True, True, True, False):
        times[:] = range(999) if fails else []
        end = answers(engine, [request])[0].all[-1]
        assert (end.finish_reason == "error") == fails
        healthy.append(engine.healthy)
    assert healthy == [True, True, True, True, True, False, True]


def test_an_engine_without_its_thread_is_not_healthy(monkeypatch):
    engine = serving(None)
    assert engine.healthy
    for thread in (None, threading.Thread()):  # one that does not run
        monkeypatch.setattr(engine, "_thread", thread)
        assert not engine.healthy


def test_requests_that_a_stuck_engine_has_not_taken_get_an_error():
    """Before a process exits, each request gets an error, even if a call blocks the thread."""
    engine, found = Engine(target(), num_slots=1, max_tokens=64), [Listener() for _ in range(2)]
    for each in found:
        engine.submit(Request((5,), 3, NO_STOP), each)  # no thread takes commands
    engine.abandon("process 1 has died")
    for each in found:
        assert (each.wait().finish_reason, each.all[0].error) == ("error", "process 1 has died")
        each.assert_one_end()
    engine.close()
    assert [len(each.all) for each in found] == [1, 1]


@pytest.mark.parametrize("at, end", [("read", "error"), ("read", "cancelled"), ("_send", "error")])
def test_a_call_in_flight_adds_no_tokens_to_a_request_that_has_ended(at, end, monkeypatch, started):
    """Commands of other threads come while the engine's thread waits for the device, or sends."""
    engine = engine_of(None)
    where, found = engine if at == "_send" else engine._batch, Listener()
    call = getattr(where, at)

    def ended(*arguments):
        setattr(where, at, call)
        engine.cancel(0) if end == "cancelled" else engine.abandon("process 1 has died")
        return call(*arguments)

    setattr(where, at, ended)
    engine.submit(Request((5,), 60, NO_STOP), found)
    started(engine)
    assert found.wait().finish_reason == end
    engine.close()
    found.assert_one_end()
    assert engine.stats().failures == 0


def test_a_client_that_fails_affects_no_other():
    engine = serving(None)

    def broken(output: RequestOutput) -> None:
        raise ValueError("a bug of somebody else")

    request = Request((5, 9), 20, NO_STOP)
    engine.submit(request, broken)
    assert_as_alone([request] * 3, answers(engine, [request] * 3))
