"""The server over a real socket: errors, limits, disconnects, and the drain."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import httpx
import pytest

from tests.meeting import PATIENCE, wait_for
from tests.serve import toy_server
from tests.serve.toy_server import COMPLETIONS, LONG, Running, ToyEngine, error_of

# ---- errors ---------------------------------------------------------------------------------


def test_errors_have_openais_shape_and_the_right_status(server):
    error_of(server.get("/nowhere"), 404)
    error_of(server.post(f"{COMPLETIONS}/", LONG), 404)  # and no redirect
    response = server.get(COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"
    untyped = server.client.post(COMPLETIONS, content=json.dumps(LONG).encode())
    assert "content-type is missing" in error_of(untyped, 415)["message"]
    error = error_of(server.post(COMPLETIONS, LONG | {"n": 7}), 400)  # more than ever fit
    assert error["param"] == "n" and "ask for 6 at most" in error["message"]
    assert not server.engine.requests


def failure(server: Running, stream: bool, status: int) -> tuple[dict, httpx.Headers]:
    """Returns the error that LONG ends with, in a stream or with a status, and the headers."""
    response = server.post(COMPLETIONS, LONG | {"stream": stream})
    if stream:
        return json.loads(response.text.removeprefix("data: "))["error"], response.headers
    return error_of(response, status), response.headers


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Returns all received data up to `end`, which must arrive before the connection closes."""
    data = b""
    while end not in data:
        assert (more := connection.recv(1 << 16)), data
        data += more
    return data


def test_clients_must_have_one_of_the_keys():
    with Running(keys=("first-key", "second-key")) as server:
        for shown in ("", "Bearer wrong", "Basic first-key", "Bearer first-key second-key"):
            response = server.get("/metrics", authorization=shown)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            error_of(server.post(COMPLETIONS, LONG, authorization=shown), 401)
        assert server.get("/v1/models", authorization="Bearer second-key").status_code == 200
        assert server.get("/health").status_code == server.get("/ping").status_code == 200
        assert not server.engine.requests


def test_a_body_may_be_too_large_and_too_slow():
    with Running(max_body_bytes=1000) as server, Running(body_seconds=0.2) as hasty:
        large = LONG | {"user": "x" * 100_000}
        assert error_of(server.post(COMPLETIONS, large), 413)["code"] == "request_too_large"
        chunks, headers = (b"[" * 500 for _ in range(10)), {"content-type": "application/json"}
        error_of(server.client.post(COMPLETIONS, content=chunks, headers=headers), 413)
        with socket.create_connection(("127.0.0.1", hasty.port), 10) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n")
            slow.sendall(b"Content-Type: application/json\r\n\r\n{")
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_full_queue_sends_retry_after():
    engine = ToyEngine(slots=1, max_waiting=0)
    with Running(engine) as server:
        engine.go.clear()
        with server.socket(COMPLETIONS, LONG) as running:
            wait_for(lambda: engine.requests)
            response = server.post(COMPLETIONS, LONG)
            assert error_of(response, 429)["type"] == "rate_limit_error"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            error_of(server.post(COMPLETIONS, LONG | {"stream": True}), 429)
            engine.go.set()
            assert running.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert server.post(COMPLETIONS, LONG).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_is_an_error_of_one_request(stream):
    with Running() as server:
        server.engine.error = "a pass failed"
        error, _ = failure(server, stream, 500)
        assert (error["type"], error["message"]) == ("server_error", "a pass failed")
        server.engine.error = ""
        assert server.post(COMPLETIONS, LONG).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_a_time_limit(stream):
    with Running(request_seconds=0.2) as server:
        server.engine.go.clear()
        error, headers = failure(server, stream, 504)
        assert stream or headers["x-should-retry"] == "false"
        assert (error["type"], error["code"]) == ("server_error", "timeout")
        server.engine.go.set()
        wait_for(lambda: server.engine.ended == {0: "cancelled"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_while_tokens_become_an_answer_ends_it(stream, monkeypatch):
    """The client gets the error at once, also in the middle of a stream, and the slot is freed."""

    def fail(*_):
        raise RuntimeError("no such piece")

    monkeypatch.setattr("infer.openai.streams.GrowingText.add", fail)
    with Running() as server:
        error, _ = failure(server, stream, 500)
        assert error["message"] == "the server failed at this request"
        wait_for(lambda: not server.engine._tasks)
        (event,) = server.named("error")
        assert "RuntimeError at test_protocol_errors.py" in event["what"]


# ---- clients -------------------------------------------------------------------------------

ENDLESS = LONG | {"max_tokens": 6000, "stream": True, "return_token_ids": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(stream):
    with Running() as server:
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


def test_a_slow_reader_gets_everything_and_delays_no_other():
    engine = ToyEngine(max_tokens=7000)
    with Running(engine, send_seconds=600) as server:
        with server.socket(COMPLETIONS, ENDLESS, receive_bytes=4096) as slow:
            wait_for(lambda: engine.ended == {0: "length"}, 300)  # the client has read nothing
            assert server.post(COMPLETIONS, LONG).status_code == 200
            data = read_until(slow, b"[DONE]")
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
        found = sum((json.loads(event)["choices"][0]["token_ids"] for event in events), [])
        assert found == toy_server.answer_of(engine.requests[0])
        assert len(events) < 1900  # waiting outputs were merged


def test_a_reader_that_stops_reading_is_disconnected():
    engine = ToyEngine(max_tokens=7000)
    with Running(engine, send_seconds=0.2) as server:
        with server.socket(COMPLETIONS, ENDLESS, receive_bytes=4096):
            wait_for(lambda: server.named("slow"), 60)
            wait_for(lambda: not server.server.answering)
        wait_for(lambda: engine.ended)
        assert server.post(COMPLETIONS, LONG).status_code == 200


@pytest.mark.parametrize("begun", [b"GET /hea", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n"])
def test_connections_without_progress_are_closed(monkeypatch, begun):
    monkeypatch.setattr("infer.http.timeouts.REQUEST_SECONDS", 0.3)
    connect = lambda: socket.create_connection(("127.0.0.1", server.port), 10)
    with Running() as server, connect() as idle, connect() as slow:
        slow.sendall(whole := b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(slow, b'"ok"')
        assert idle.recv(10) == b""
        time.sleep(0.4)
        slow.sendall(whole)  # an idle connection after a request is kept
        read_until(slow, b'"ok"')
        slow.sendall(begun)
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1000) == b""


def test_health_reports_whether_the_engine_works():
    with Running() as server:
        server.engine.healthy = False
        for path in ("/health", "/ping"):
            response = server.get(path)
            assert (response.status_code, response.json()) == (503, {"status": "failing"})
        server.engine.healthy = True
        assert server.get("/health").status_code == 200


# ---- the end --------------------------------------------------------------------------------


def test_a_drain_lets_answers_end_and_takes_no_new_ones():
    with Running() as server, contextlib.ExitStack() as stack:
        server.engine.go.clear()
        runs = stack.enter_context(server.socket(COMPLETIONS, LONG | {"stream": True}))
        wait_for(lambda: server.engine.requests)
        draining = server.drain(20)
        wait_for(lambda: server.server.draining)
        response = server.post(COMPLETIONS, LONG)
        error_of(response, 503)
        assert response.headers["retry-after"] == "1"
        assert server.get("/health").status_code == 503 and not draining.done()
        server.engine.go.set()
        read_until(runs, b"[DONE]")
        draining.result(10)
        assert server.engine.ended == {0: "length"}


def test_a_body_that_arrives_while_the_server_drains_is_refused():
    request = toy_server.raw_post(COMPLETIONS, LONG)
    with Running() as server, socket.create_connection(("127.0.0.1", server.port), 10) as slow:
        slow.sendall(request[:-9])
        wait_for(lambda: server.server.num_open)
        server.drain(1).result(10)
        slow.sendall(request[-9:])
        assert read_until(slow, b"the server is stopping").startswith(b"HTTP/1.1 503 ")
        assert not server.engine.requests


@pytest.mark.parametrize("seconds, status", [(PATIENCE, b"200"), (0.1, b"503")])
def test_a_drain_counts_requests_whose_grammar_is_compiled(seconds, status, monkeypatch):
    begun, go = threading.Event(), threading.Event()
    body = LONG | {"structured_outputs": {"regex": "a"}}
    with Running() as server:
        compile = lambda text: begun.set() or go.wait(PATIENCE) and None
        monkeypatch.setattr(server.server._grammars, "compile", compile)
        with server.socket(COMPLETIONS, body) as runs:
            assert begun.wait(PATIENCE)
            draining = server.drain(seconds)
            wait_for(lambda: server.server.draining)
            if status == b"200":
                go.set()
            assert read_until(runs, b"}").startswith(b"HTTP/1.1 " + status)
            draining.result(PATIENCE)
        go.set()
        assert len(server.engine.requests) == (status == b"200")


def test_no_grammar_is_compiled_after_the_drain(monkeypatch):
    body, go, compiled = LONG | {"structured_outputs": {"regex": "a"}}, threading.Event(), []
    with Running() as server:
        monkeypatch.setattr(server.server._grammars, "compile", compiled.append)
        server.server._reader.submit(go.wait, PATIENCE)
        with server.socket(COMPLETIONS, body) as runs:
            wait_for(lambda: server.server.num_running)
            server.drain(0.1).result(PATIENCE)
            go.set()
            assert read_until(runs, b"}").startswith(b"HTTP/1.1 503") and not compiled


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_outlives_the_drain_gets_an_error(stream):
    with Running() as server:
        server.engine.go.clear()
        with server.socket(COMPLETIONS, LONG | {"stream": stream}) as runs:
            wait_for(lambda: server.engine.requests)
            server.drain(0.1).result(10)
            data = read_until(runs, b"the server is stopping")
            assert data.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 503 ")
            assert stream or b"retry-after: 1\r\n" in data.lower()
        server.engine.go.set()
        wait_for(lambda: server.engine.ended == {0: "cancelled"})
