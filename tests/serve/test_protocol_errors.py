"""The server over a real socket: errors, limits, clients that leave, nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer import serve
from infer.openai.app import OpenAIServer
from infer.openai.errors import APIError
from tests.serve.toy_server import (
    CHATS,
    COMPLETIONS,
    HELLO,
    LONG,
    ToyEngine,
    answer_of,
    error_of,
    running,
    text_of,
    wait_for,
)

# ---- errors ---------------------------------------------------------------------------------


def test_errors_have_openais_shape_and_the_right_status(server):
    error = error_of(server.post(COMPLETIONS, {"prompt": [7], "n": 0}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", "n")
    error = error_of(server.post(CHATS, {"messages": HELLO, "model": "gpt-5"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(server.get("/nowhere"), 404)
    response = server.get(COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    form = {"content-type": "application/x-www-form-urlencoded"}
    error_of(server.post(COMPLETIONS, LONG, **form), 415)
    untyped = httpx.post(f"{server.url}{COMPLETIONS}", content=json.dumps(LONG).encode())
    assert "content-type is missing" in error_of(untyped, 415)["message"]
    error_of(server.post(f"{COMPLETIONS}/", LONG), 404)  # and no redirect


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """All that comes up to some words, which come before the connection is closed."""
    data = b""
    while end not in data:
        assert (more := connection.recv(1 << 16)), data
        data += more
    return data


def test_clients_must_have_one_of_the_keys():
    with running(keys=("first-key", "second-key")) as server:
        for shown in ("", "Bearer wrong", "Basic first-key", "Bearer first-key second-key"):
            headers = {"authorization": shown}
            answers = server.post(COMPLETIONS, LONG, **headers), server.get("/metrics", **headers)
            for response in answers:
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("first-key", "second-key"):
            assert server.get("/v1/models", authorization=f"Bearer {key}").status_code == 200
        assert server.get("/health").status_code == server.get("/ping").status_code == 200
        assert not server.engine.requests


def test_a_body_may_be_too_large_and_too_slow():
    with running(max_body_bytes=1000) as server, running(body_seconds=0.2) as hasty:
        large = LONG | {"user": "x" * 100_000}
        assert error_of(server.post(COMPLETIONS, large), 413)["code"] == "request_too_large"
        chunks = (b"[" * 500 for _ in range(10))
        headers = {"content-type": "application/json"}
        response = httpx.post(f"{server.url}{COMPLETIONS}", content=chunks, headers=headers)
        error_of(response, 413)
        with socket.create_connection(("127.0.0.1", hasty.port), 10) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n")
            slow.sendall(b"Content-Type: application/json\r\n\r\n{")
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert hasty.get("/health").status_code == 200
        assert server.post(COMPLETIONS, LONG).status_code == 200


def test_a_full_queue_says_when_to_come_again():
    engine = ToyEngine(slots=1, max_waiting=2)
    with running(engine) as server:
        engine.go.clear()
        waiting = [server.socket(COMPLETIONS, LONG) for _ in range(3)]
        wait_for(lambda: len(engine.requests) == 3)
        response = server.post(COMPLETIONS, LONG)
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        error_of(server.post(COMPLETIONS, LONG | {"stream": True}), 429)
        engine.go.set()
        for each in waiting:
            assert each.recv(1000).startswith(b"HTTP/1.1 200 ")
            each.close()
        assert server.post(COMPLETIONS, LONG).status_code == 200


def test_a_request_that_does_not_fit_leaves_nothing_behind():
    engine = ToyEngine(slots=1, max_waiting=2)
    with running(engine) as server:
        engine.go.clear()
        with server.socket(COMPLETIONS, LONG):
            wait_for(lambda: engine.requests)
            error_of(server.post(COMPLETIONS, LONG | {"n": 3}), 429)
            assert not engine.cancelled  # so it never took room from others
            error = error_of(server.post(COMPLETIONS, LONG | {"n": 4}), 400)  # at no time
            assert error["param"] == "n" and "ask for 3 at most" in error["message"]
            many = LONG | {"prompt": ["Hello."] * 4}
            assert error_of(server.post(COMPLETIONS, many), 400)["param"] == "prompt"
            assert len(engine.requests) == 1
        engine.go.set()
        wait_for(lambda: not engine._tasks)


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_an_error_of_one_request(stream):
    with running() as server:
        server.engine.error = "a pass failed"
        if stream:
            (event,) = server.stream(COMPLETIONS, LONG)
            error = event["error"]
        else:
            error = error_of(server.post(COMPLETIONS, LONG), 500)
        assert (error["type"], error["message"]) == ("server_error", "a pass failed")
        server.engine.error = ""
        assert server.post(COMPLETIONS, LONG).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_a_time_limit(stream):
    with running(request_seconds=0.2) as server:
        server.engine.go.clear()
        if stream:
            (event,) = server.stream(COMPLETIONS, LONG)
            error = event["error"]
        else:
            response = server.post(COMPLETIONS, LONG)
            error = error_of(response, 504)
            assert response.headers["x-should-retry"] == "false"
        assert (error["type"], error["code"]) == ("server_error", "timeout")
        wait_for(lambda: server.engine.cancelled)
        server.engine.go.set()
        wait_for(lambda: server.engine.ended == {0: "cancelled"})


def test_a_fault_of_ours_is_an_error_without_details(monkeypatch):
    with running() as server:
        server.engine.stats = None
        error = error_of(server.get("/metrics"), 500)
        assert error["message"] == "the server failed at this request"
        (event,) = server.named("error")
        assert "TypeError at metrics.py" in event["what"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["streams.GrowingText.add", "responses.Replies.PART"])
def test_a_fault_while_tokens_become_an_answer_ends_it(stream, place, monkeypatch):
    """Who asked is told at once, also in the middle of a stream, and the slot is free."""

    def fail(*_):
        raise RuntimeError("no such piece")

    name = place.replace("PART", "events" if stream else "whole")
    monkeypatch.setattr(f"infer.openai.{name}", fail)
    with running() as server:
        if stream:
            (event,) = server.stream(COMPLETIONS, LONG)
            error = event["error"]
        else:
            error = error_of(server.post(COMPLETIONS, LONG), 500)
        assert error["message"] == "the server failed at this request"
        wait_for(lambda: not server.engine._tasks)
        (event,) = server.named("error")
        assert "RuntimeError at test_protocol_errors.py" in event["what"]


# ---- clients that leave or do not read ------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(stream):
    with running() as server:
        server.engine.go.clear()
        gone = server.socket(COMPLETIONS, LONG | {"stream": stream, "n": 2})
        wait_for(lambda: len(server.engine.requests) == 2)
        if stream:
            gone.recv(1000)
        gone.close()
        wait_for(lambda: sorted(server.engine.cancelled) == [0, 1])
        server.engine.go.set()
        wait_for(lambda: server.engine.ended == {0: "cancelled", 1: "cancelled"})
        wait_for(lambda: not server.server.answering)
        assert not server.named("error")


def test_a_slow_reader_gets_everything_and_holds_nobody_up():
    engine = ToyEngine(max_tokens=7000)
    with running(engine, send_seconds=600) as server:
        body = LONG | {"max_tokens": 6000, "stream": True, "return_token_ids": True}
        with server.socket(COMPLETIONS, body, receive_bytes=4096) as slow:
            wait_for(lambda: engine.ended == {0: "length"}, 300)  # nothing was read
            assert server.post(COMPLETIONS, LONG).status_code == 200
            data = read_until(slow, b"[DONE]")
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
        found = sum((json.loads(event)["choices"][0]["token_ids"] for event in events), [])
        assert found == answer_of(engine.requests[0])
        assert len(events) < 1900  # what waited came together


def test_a_reader_who_stops_reading_is_given_up():
    engine = ToyEngine(max_tokens=7000)
    with running(engine, send_seconds=0.2) as server:
        body = LONG | {"max_tokens": 6000, "stream": True, "return_token_ids": True}
        with server.socket(COMPLETIONS, body, receive_bytes=4096):
            wait_for(lambda: server.named("slow"), 60)
            wait_for(lambda: not server.server.answering)
        wait_for(lambda: engine.ended)
        assert server.post(COMPLETIONS, LONG).status_code == 200


def test_connections_without_a_request_are_closed(monkeypatch):
    monkeypatch.setattr("infer.http.timeouts.REQUEST_SECONDS", 0.1)
    with running() as server, socket.create_connection(("127.0.0.1", server.port), 10) as idle:
        assert idle.recv(10) == b""


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n"])
def test_connections_that_do_not_get_on_are_closed(monkeypatch, begun):
    monkeypatch.setattr("infer.http.timeouts.REQUEST_SECONDS", 0.5)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running() as server, socket.create_connection(("127.0.0.1", server.port), 10) as slow:
        slow.sendall(whole)
        read_until(slow, b'"ok"')
        slow.sendall(begun)
        if not begun:  # a connection that owes nothing is kept
            time.sleep(1.0)
            slow.sendall(whole)
            assert b" 200 " in slow.recv(1000)
            return
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1000) == b""


def test_a_body_that_is_not_wanted_need_not_come(monkeypatch):
    monkeypatch.setattr("infer.http.timeouts.REQUEST_SECONDS", 0.5)
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with running() as server, socket.create_connection(("127.0.0.1", server.port), 10) as slow:
        slow.sendall(head)
        assert b" 404 " in slow.recv(1000)
        slow.sendall(b"x")
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(1000):
                pass


def test_health_says_whether_the_engine_works():
    with running() as server:
        server.engine.healthy = False
        for path in ("/health", "/ping"):
            response = server.get(path)
            assert (response.status_code, response.json()) == (503, {"status": "failing"})
        server.engine.healthy = True
        assert server.get("/health").status_code == 200


# ---- the end --------------------------------------------------------------------------------


def test_a_drain_lets_answers_end_and_takes_no_new_ones():
    with running() as server, contextlib.ExitStack() as stack:
        server.engine.go.clear()
        runs = stack.enter_context(server.socket(COMPLETIONS, LONG | {"stream": True}))
        wait_for(lambda: server.engine.requests)
        draining = server.drain(20)
        wait_for(lambda: server.server.draining)
        response = server.post(COMPLETIONS, LONG)
        error_of(response, 503)
        assert response.headers["retry-after"] == "1"
        assert server.get("/health").status_code == 503
        assert not draining.done()
        server.engine.go.set()
        read_until(runs, b"[DONE]")
        draining.result(10)
        assert server.engine.ended == {0: "length"}


def test_a_server_that_is_lost_is_unready_until_all_have_heard(monkeypatch):
    """As where another of its processes has died."""
    monkeypatch.setattr(serve, "SECONDS_TO_END", 60.0)
    with running() as server, ThreadPoolExecutor(2) as pool:
        server.engine.go.clear()
        asked = pool.submit(server.post, COMPLETIONS, LONG)
        wait_for(lambda: server.server.answering)
        ending = pool.submit(serve._abandon, server.engine, server.server, "process 1 has died")
        wait_for(lambda: server.engine.error)
        assert server.get("/health").status_code == 503
        assert not ending.done()
        sends = held_up(server.server)
        server.engine.go.set()
        wait_for(lambda: not server.server.answering)  # known, but not sent
        time.sleep(0.1)
        assert not ending.done()
        server.loop.call_soon_threadsafe(sends.set)
        ending.result(10)
        assert error_of(asked.result(10), 500)["message"] == "process 1 has died"


def held_up(server: OpenAIServer) -> asyncio.Event:
    """Errors are not sent from now on, until the event is set."""
    sends, refused = asyncio.Event(), server.refused

    class Held(Response):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await sends.wait()
            await super().__call__(scope, receive, send)

    def held(refusal: APIError) -> Response:
        said = refused(refusal)
        return Held(said.body, said.status_code, dict(said.headers))

    server.refused = held
    return sends


def test_a_body_that_comes_while_the_server_drains_is_refused():
    with running() as server:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
            data = json.dumps(LONG).encode()
            slow.sendall(head + f"Content-Length: {len(data)}\r\n\r\n".encode() + data[:9])
            wait_for(lambda: server.get("/health").status_code == 200)
            server.drain(1).result(10)
            slow.sendall(data[9:])
            assert slow.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert not server.engine.requests


@pytest.mark.parametrize("stream", [False, True])
def test_who_still_runs_after_a_drain_hears_so(stream):
    with running() as server:
        server.engine.go.clear()
        with server.socket(COMPLETIONS, LONG | {"stream": stream}) as runs:
            wait_for(lambda: server.engine.requests)
            server.drain(0.1).result(10)
            data = read_until(runs, b"the server is stopping")
            assert data.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 503 ")
            assert stream or b"retry-after: 1\r\n" in data.lower()
        server.engine.go.set()
        wait_for(lambda: server.engine.ended == {0: "cancelled"})


# ---- nonsense -------------------------------------------------------------------------------

VALUES = [None, True, False, 0, -1, 1, 2**31, 10**30, 1e308, -1.5, "", "x", "\ud800", [], {}, [[]]]
VALUES += [["x"], [7], [True], {"x": 1}, [None], {"type": "text"}, [{}], [[7], "x"], "é" * 500]
NAMES = "model prompt messages n stream stream_options max_tokens max_completion_tokens seed stop"
NAMES += " temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
NAMES += " logprobs top_logprobs logit_bias echo best_of stop_token_ids ignore_eos tools user"
NAMES += " response_format return_token_ids include_stop_str_in_output tool_choice unheard_of"
NAMES += " tokens add_special_tokens skip_special_tokens"
ASKED = {
    COMPLETIONS: {"prompt": [7, 8], "max_tokens": 3},
    CHATS: {"messages": HELLO, "max_tokens": 3},
    "/tokenize": {"prompt": "Good day."},
    "/detokenize": {"tokens": [7, 8]},
}


def malformed(draw: random.Random, path: str) -> bytes:
    """A body that was damaged in one way or another, and that may still be right."""
    body = dict(ASKED[path])
    for _ in range(draw.randint(0, 2)):
        name = draw.choice(NAMES.split())
        body[name] = draw.choice(VALUES)
        if draw.random() < 0.2 and isinstance(body.get("messages"), list):
            body["messages"] = [{draw.choice(("role", "content")): draw.choice(VALUES)}]
    if draw.random() < 0.05:
        body["model"] = "gpt-5"
    data = json.dumps(body).encode()
    damage = draw.random()
    if damage < 0.2:
        place = draw.randrange(len(data))
        data = data[:place] + bytes([draw.randrange(256)]) + data[place + draw.randint(0, 3) :]
    elif damage < 0.3:
        data = data[: draw.randrange(len(data))]
    elif damage < 0.35:
        data = draw.randbytes(draw.randrange(200))
    return data


class Damaged(NamedTuple):
    """A malformed body, and what came of it."""

    path: str
    is_object: bool  # of JSON, so that a field was wrong if anything
    status: int


def is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False


def send_malformed(client: httpx.Client, draw: random.Random, count: int) -> Counter[Damaged]:
    """Sends so many such bodies."""
    statuses: Counter[Damaged] = Counter()
    headers = {"content-type": "application/json"}
    for index in range(count):
        path = draw.choice(list(ASKED))
        data = malformed(draw, path)
        response = client.post(path, content=data, headers=headers)
        assert response.status_code in (200, 400, 404), (index, response.text)
        statuses[Damaged(path, is_object(data), response.status_code)] += 1
        if response.status_code != 200:
            error_of(response, response.status_code)
    return statuses


def assert_fields_were_checked(statuses: Counter[Damaged]) -> None:
    """Of a thousand bodies: on each path some were right, and some had wrong fields."""
    for path in ASKED:
        right, wrong = (statuses[Damaged(path, True, status)] for status in (200, 400))
        assert right > 30 and wrong > (50 if path in (COMPLETIONS, CHATS) else 5), statuses
        assert statuses[Damaged(path, True, 404)] and not statuses[Damaged(path, False, 200)]


def test_a_thousand_malformed_bodies_leave_the_server_as_it_was():
    with running() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        good = server.post(COMPLETIONS, LONG).json()["choices"]
        statuses = send_malformed(client, random.Random(5), 1000)
        assert_fields_were_checked(statuses)
        assert server.post(COMPLETIONS, LONG).json()["choices"] == good
        assert not server.named("error") and not server.server.answering
        wait_for(lambda: not server.engine._tasks)


def test_requests_that_are_no_http_are_refused(server):
    for data in (b"\x16\x03\x01\x02", b"GET\r\n\r\n", b"POST /v1/completions HTCPCP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), 10) as made:
            made.sendall(data + b"\r\n\r\n")
            made.settimeout(10)
            assert made.recv(100).startswith(b"HTTP/1.1 400 ")
    assert server.post(COMPLETIONS, LONG).status_code == 200


def test_many_clients_at_once_all_hear_their_own_answer():
    engine = ToyEngine(slots=4, max_waiting=64)
    with running(engine) as server, httpx.Client(base_url=server.url, timeout=30) as client:

        def ask(seed: int) -> tuple[str, int]:
            body = LONG | {"seed": seed, "max_tokens": 5 + seed % 40}
            return client.post(COMPLETIONS, json=body).json()["choices"][0]["text"], seed

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(64)))
        wanted = {each.sampling.seed: text_of(answer_of(each)) for each in engine.requests}
        assert all(wanted[seed] == text for text, seed in answers) and len(wanted) == 64
