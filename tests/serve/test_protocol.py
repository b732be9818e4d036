"""The server over a real socket: shapes, streams, errors, limits, clients that leave."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from infer import serve
from moa_jax.decode.sample import Sampling
from tests.serve.toy_server import (
    EOS,
    TOKENIZER,
    Running,
    ToyEngine,
    answer_of,
    likely_of,
    running,
    wait_for,
)

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello."}]
LONG = {"prompt": [7, 8], "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def server():
    with running() as made:
        yield made


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


# ---- answers --------------------------------------------------------------------------------


def test_a_completion_is_what_the_engine_says(server):
    body = {"prompt": "Good day.", "max_tokens": 30, "seed": 7, "temperature": 0.5, "user": "me"}
    said = server.post(COMPLETIONS, body).json()
    request = server.engine.requests[-1]
    assert request.prompt_ids == tuple(TOKENIZER("Good day.")["input_ids"])
    assert (request.max_new_tokens, request.stop_ids) == (30, (EOS,))
    assert request.sampling == Sampling(temperature=0.5, seed=7)
    answer = answer_of(request)
    (choice,) = said["choices"]
    assert choice["text"] == text_of(answer)
    assert (choice["index"], choice["logprobs"], choice["stop_reason"]) == (0, None, None)
    assert choice["finish_reason"] == ("stop" if answer[-1] == EOS else "length")
    assert (said["object"], said["model"], said["seed"]) == ("text_completion", "toy", 7)
    prompt = len(request.prompt_ids)
    assert said["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(answer),
        "total_tokens": prompt + len(answer),
    }


def test_a_chat_goes_through_the_template(server):
    response = server.post(CHATS, {"messages": HELLO, "max_tokens": 20, "model": "toy"})
    said, request = response.json(), server.engine.requests[-1]
    wanted = TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert request.prompt_ids == tuple(wanted)
    message = said["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", text_of(answer_of(request)))
    assert said["object"] == "chat.completion" and said["seed"] == request.sampling.seed
    assert response.headers["x-request-id"] == said["id"]


def test_choices_have_seeds_one_apart(server):
    before = len(server.engine.requests)
    body = {"prompt": [[7, 8], [9]], "n": 2, "seed": 5, "max_tokens": 6}
    said = server.post(COMPLETIONS, body).json()
    requests = server.engine.requests[before:]
    assert [each.sampling.seed for each in requests] == [5, 6, 7, 8]
    assert [each.prompt_ids for each in requests] == [(7, 8), (7, 8), (9,), (9,)]
    texts = [choice["text"] for choice in said["choices"]]
    assert texts == [text_of(answer_of(each)) for each in requests]
    assert [choice["index"] for choice in said["choices"]] == [0, 1, 2, 3]
    assert said["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_stream_says_the_same(server, path):
    body = {"n": 2, "seed": 5, "max_tokens": 25, "ignore_eos": True}
    body |= {"prompt": "Good day."} if path == COMPLETIONS else {"messages": HELLO}
    whole = server.post(path, body).json()
    *events, usage, done = server.stream(path, body | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert all(event["usage"] is None and len(event["choices"]) == 1 for event in events)
    for wanted in whole["choices"]:
        parts = [e["choices"][0] for e in events if e["choices"][0]["index"] == wanted["index"]]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == "length"
        if path == COMPLETIONS:
            assert "".join(part["text"] for part in parts) == wanted["text"]
        else:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            texts = [part["delta"].get("content", "") for part in parts]
            assert "".join(texts) == wanted["message"]["content"]
    kinds = {event["object"] for event in [*events, usage]}
    assert kinds == {"text_completion" if path == COMPLETIONS else "chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1


def test_a_stream_without_usage_has_none(server):
    *events, done = server.stream(COMPLETIONS, {"prompt": [7], "max_tokens": 5})
    assert done == "[DONE]" and all("usage" not in event for event in events)


def answer_and_stop(server: Running, start: int = 0) -> tuple[str, str]:
    """The answer to LONG, and a text in it that several tokens make."""
    request_text = server.post(COMPLETIONS, LONG | {"max_tokens": 60}).json()["choices"][0]["text"]
    tokens = answer_of(server.engine.requests[-1])
    before = text_of(tokens[:20])
    stop = text_of(tokens[:23])[len(before.rstrip("\ufffd")) :][1:-1]
    assert stop and "\ufffd" not in stop
    return request_text, stop


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_that_never_shows_it(server, stream):
    text, stop = answer_and_stop(server)
    body = LONG | {"stop": ["never there", stop], "return_token_ids": True}
    cancelled = len(server.engine.cancelled)
    if stream:
        parts = [event["choices"][0] for event in server.stream(COMPLETIONS, body)[:-1]]
    else:
        parts = server.post(COMPLETIONS, body).json()["choices"]
    said = "".join(part["text"] for part in parts)
    assert said == text[: text.index(stop)]
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", stop)
    tokens = sum((part["token_ids"] for part in parts), [])
    assert stop in text_of(tokens) and stop not in text_of(tokens[:-1])
    assert len(server.engine.cancelled) == cancelled + 1
    wait_for(lambda: not server.engine._tasks)


def test_a_stop_text_may_be_kept(server):
    text, stop = answer_and_stop(server)
    body = LONG | {"stop": stop, "include_stop_str_in_output": True}
    said = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
    assert said == text[: text.index(stop) + len(stop)]


def test_a_stop_id_ends_an_answer_without_its_text(server):
    server.post(COMPLETIONS, LONG | {"max_tokens": 12})
    tokens = answer_of(server.engine.requests[-1])
    body = LONG | {"stop_token_ids": [tokens[9]], "return_token_ids": True}
    (choice,) = server.post(COMPLETIONS, body).json()["choices"]
    end = tokens.index(tokens[9])
    assert choice["text"] == text_of(tokens[:end])
    assert choice["token_ids"] == tokens[: end + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[9])
    kept = body | {"include_stop_str_in_output": True}
    (choice,) = server.post(COMPLETIONS, kept).json()["choices"]
    assert choice["text"] == text_of(tokens[: end + 1])


def test_an_echo_precedes_the_answer(server):
    body = {"prompt": "Good day.", "echo": True, "max_tokens": 4, "seed": 2}
    said = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
    answer = answer_of(server.engine.requests[-1])
    assert said == "Good day." + text_of(answer)
    parts = [event["choices"][0]["text"] for event in server.stream(COMPLETIONS, body)[:-1]]
    assert "".join(parts) == said


def test_token_ids_are_returned_to_those_who_ask(server):
    body = LONG | {"max_tokens": 10, "return_token_ids": True}
    (choice,) = server.post(COMPLETIONS, body).json()["choices"]
    answer = answer_of(server.engine.requests[-1])
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8], answer)
    events = [event["choices"][0] for event in server.stream(COMPLETIONS, body)[:-1]]
    assert sum((event["token_ids"] for event in events), []) == answer
    assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [[7, 8]]
    chat = {"messages": HELLO, "max_tokens": 4, "return_token_ids": True}
    said = server.post(CHATS, chat).json()
    assert said["prompt_token_ids"] == list(server.engine.requests[-1].prompt_ids)
    assert said["choices"][0]["token_ids"] == answer_of(server.engine.requests[-1])


# ---- log-probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(server, stream):
    body = LONG | {"max_tokens": 20, "logprobs": 2, "return_token_ids": True}
    if stream:
        parts = [event["choices"][0] for event in server.stream(COMPLETIONS, body)[:-1]]
    else:
        parts = server.post(COMPLETIONS, body).json()["choices"]
    answer, found = answer_of(server.engine.requests[-1]), {}
    assert server.engine.requests[-1].top_logprobs == 2
    for part in parts:
        assert len(part["logprobs"]["tokens"]) == len(part["token_ids"])
        for name, values in part["logprobs"].items():
            found.setdefault(name, []).extend(values)
    likely = [likely_of(token, 2) for token in answer]
    assert found["token_logprobs"] == [each.logprob for each in likely]
    assert len(found["tokens"]) == len(found["top_logprobs"]) == 20
    text = "".join(part["text"] for part in parts)
    for token, name, offset in zip(answer, found["tokens"], found["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert name == TOKENIZER.decode([token])
            shown = text_of([token])  # nothing of a special token
            assert text[offset : offset + len(shown)] == shown
    pairs = zip(found["tokens"], found["top_logprobs"], strict=True)
    assert all(name in top for name, top in pairs)


@pytest.mark.parametrize("new", [0, 1, 20])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_an_echo(server, new, stream):
    """The prompt's come first, and nothing precedes its first token."""
    prompt = "Good day, is there a cheap hotel?"
    body = LONG | {"prompt": prompt, "max_tokens": new, "logprobs": 2, "echo": True}
    if stream:
        parts = [event["choices"][0] for event in server.stream(COMPLETIONS, body)[:-1]]
    else:
        parts = server.post(COMPLETIONS, body).json()["choices"]
    request, found = server.engine.requests[-1], {}
    for part in parts:
        for name, values in part["logprobs"].items():
            found.setdefault(name, []).extend(values)
    prompt_ids = TOKENIZER(prompt)["input_ids"]
    tokens = prompt_ids + answer_of(request)
    assert len(tokens) == len(prompt_ids) + new
    likely = [likely_of(token, 2).logprob for token in tokens[1:]]
    assert found["token_logprobs"] == [None, *likely]
    assert found["top_logprobs"][0] is None and None not in found["top_logprobs"][1:]
    text = "".join(part["text"] for part in parts)
    assert text == prompt + text_of(tokens[len(prompt_ids) :])
    for token, name, offset in zip(tokens, found["tokens"], found["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert name == TOKENIZER.decode([token])
            shown = text_of([token])  # nothing of a special token
            assert text[offset : offset + len(shown)] == shown
    assert parts[-1]["finish_reason"] == "length"


def test_an_echo_of_ids_has_its_logprobs_alone(server):
    """As tools that compare likelihoods ask for them."""
    body = {"prompt": [[7, 8, 9], [11]], "echo": True, "logprobs": 1, "max_tokens": 0}
    said = server.post(COMPLETIONS, body).json()
    assert [choice["text"] for choice in said["choices"]] == [
        TOKENIZER.decode(ids) for ids in body["prompt"]
    ]
    sizes = [len(choice["logprobs"]["token_logprobs"]) for choice in said["choices"]]
    assert sizes == [3, 1] and said["usage"]["completion_tokens"] == 0


def test_logprobs_of_a_chat(server):
    body = {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 3, "seed": 1}
    (choice,) = server.post(CHATS, body).json()["choices"]
    answer = answer_of(server.engine.requests[-1])
    content = choice["logprobs"]["content"]
    for token, entry in zip(answer, content, strict=True):
        likely = likely_of(token, 3)
        assert entry["logprob"] == likely.logprob
        assert [top["logprob"] for top in entry["top_logprobs"]] == [p for _, p in likely.top]
    data = bytes(sum((entry["bytes"] for entry in content if entry["token"] != "<|end|>"), []))
    assert data.decode(errors="replace") == choice["message"]["content"]
    only = server.post(CHATS, body | {"top_logprobs": None}).json()["choices"][0]["logprobs"]
    assert [entry["top_logprobs"] for entry in only["content"]] == [[]] * len(content)
    streamed = server.stream(CHATS, body)[:-1]
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    assert sum((part["content"] for part in parts if part), []) == content


# ---- other paths ----------------------------------------------------------------------------


def test_the_other_paths(server):
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("toy", 512)
    assert server.get("/v1/models/toy").json() == card
    assert error_of(server.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert server.get("/version").json()["version"]
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ping").status_code == server.post("/ping", {}).status_code == 200


def test_texts_become_tokens_and_tokens_texts(server):
    said = server.post("/tokenize", {"prompt": "Good day."}).json()
    tokens = TOKENIZER("Good day.")["input_ids"]
    assert said == {"count": len(tokens), "max_model_len": 512, "tokens": tokens}
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "Good day."}
    chat = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert chat == TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    for path, body, param in [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": [{}]}, "messages[0].role"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
    ]:
        assert error_of(server.post(path, body), 400)["param"] == param


def test_metrics_have_the_names_of_vllm(server):
    server.post(COMPLETIONS, LONG | {"max_tokens": 12})
    text = server.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:request_success_total",
    ):
        assert f'\n{name}{{engine="0"' in text, name
    assert 'position="1",} 1.0' in text.replace('position="1"}', 'position="1",}')
    assert 'moa:rounds_total{engine="0",model_name="toy",way="chain 4"} 2.0' in text


def test_tokens_past_a_stop_text_are_not_counted():
    """The engine, which knows no texts, may have decoded more of them."""
    with running() as server:
        _, stop = answer_and_stop(server)
        before = server.metric("vllm:generation_tokens_total")
        said = server.post(COMPLETIONS, LONG | {"stop": stop}).json()
        given = said["usage"]["completion_tokens"]
        assert 20 < given <= 24 and given % server.engine.step
        wait_for(lambda: server.metric("vllm:request_generation_tokens_count") == 2)
        assert before == 60 and server.metric("vllm:generation_tokens_total") == 60 + given
        assert server.metric("vllm:request_generation_tokens_sum") == 60 + given


def test_times_are_counted_once_for_each_token():
    with running() as server:
        server.post(COMPLETIONS, LONG | {"max_tokens": 12, "n": 2})
        server.stream(COMPLETIONS, LONG | {"max_tokens": 12})
        assert server.metric("vllm:time_to_first_token_seconds_count") == 3
        assert server.metric("vllm:inter_token_latency_seconds_count") == 3 * 9
        wait_for(lambda: server.metric("vllm:e2e_request_latency_seconds_count") == 2)
        assert server.metric("vllm:request_generation_tokens_sum") == 3 * 12
        assert server.metric("vllm:request_success_total") == 3
        assert server.metric("moa:http_replies_total") == 2


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
    with running(max_body_bytes=1000, body_seconds=0.2) as server:
        large = LONG | {"user": "x" * 100_000}
        assert error_of(server.post(COMPLETIONS, large), 413)["code"] == "request_too_large"
        chunks = (b"[" * 500 for _ in range(10))
        headers = {"content-type": "application/json"}
        response = httpx.post(f"{server.url}{COMPLETIONS}", content=chunks, headers=headers)
        error_of(response, 413)
        with socket.create_connection(("127.0.0.1", server.port), 10) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n")
            slow.sendall(b"Content-Type: application/json\r\n\r\n{")
            assert slow.recv(1000).startswith(b"HTTP/1.1 408 ")
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
            assert sorted(engine.cancelled) == [1, 2]
            error = error_of(server.post(COMPLETIONS, LONG | {"n": 4}), 400)  # at no time
            assert error["param"] == "n" and "ask for 3 at most" in error["message"]
            many = LONG | {"prompt": ["Hello."] * 4}
            assert error_of(server.post(COMPLETIONS, many), 400)["param"] == "prompt"
            assert len(engine.requests) == 3
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
        server.engine.go.set()
        wait_for(lambda: server.engine.ended == {0: "cancelled"})


def test_a_fault_of_ours_is_an_error_without_details(monkeypatch):
    with running() as server:
        server.engine.load = None
        error = error_of(server.get("/metrics"), 500)
        assert error["message"] == "the server failed at this request"
        (event,) = server.named("error")
        assert "TypeError at metrics.py" in event["what"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["answering.GrowingText.add", "replies.Replies.PART"])
def test_a_fault_while_tokens_become_an_answer_ends_it(stream, place, monkeypatch):
    """Who asked is told at once, also in the middle of a stream, and the slot is free."""

    def fail(*_):
        raise RuntimeError("no such piece")

    name = place.replace("PART", "events" if stream else "whole")
    monkeypatch.setattr(f"infer.serving.{name}", fail)
    with running() as server:
        if stream:
            (event,) = server.stream(COMPLETIONS, LONG)
            error = event["error"]
        else:
            error = error_of(server.post(COMPLETIONS, LONG), 500)
        assert error["message"] == "the server failed at this request"
        wait_for(lambda: not server.engine._tasks)
        (event,) = server.named("error")
        assert "RuntimeError at test_protocol.py" in event["what"]


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
    with running(engine) as server:
        body = LONG | {"max_tokens": 6000, "stream": True, "return_token_ids": True}
        with server.socket(COMPLETIONS, body, receive_bytes=4096) as slow:
            wait_for(lambda: engine.ended == {0: "length"}, 60)  # nothing was read
            assert server.post(COMPLETIONS, LONG).status_code == 200
            data = b""
            while b"[DONE]" not in data[-100:]:
                data += slow.recv(1 << 20)
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
    monkeypatch.setattr("infer.listening.patience.REQUEST_SECONDS", 0.1)
    with running() as server, socket.create_connection(("127.0.0.1", server.port), 10) as idle:
        assert idle.recv(10) == b""


@pytest.mark.parametrize("begun", [b"", b"GET /hea", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n"])
def test_connections_that_do_not_get_on_are_closed(monkeypatch, begun):
    monkeypatch.setattr("infer.listening.patience.REQUEST_SECONDS", 0.2)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running() as server, socket.create_connection(("127.0.0.1", server.port), 10) as slow:
        slow.sendall(whole)
        data = b""
        while b'"ok"' not in data:
            data += slow.recv(1000)
        slow.sendall(begun)
        if not begun:  # a connection that owes nothing is kept
            time.sleep(0.5)
            slow.sendall(whole)
            assert b" 200 " in slow.recv(1000)
            return
        with contextlib.suppress(ConnectionResetError):
            assert slow.recv(1000) == b""


def test_a_body_that_is_not_wanted_need_not_come(monkeypatch):
    monkeypatch.setattr("infer.listening.patience.REQUEST_SECONDS", 0.2)
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    with running() as server, socket.create_connection(("127.0.0.1", server.port), 10) as slow:
        slow.sendall(head)
        assert b" 404 " in slow.recv(1000)
        slow.sendall(b"x")
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(1000):
                pass


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
        data = b""
        while b"[DONE]" not in data:
            data += runs.recv(1 << 16)
        draining.result(10)
        assert server.engine.ended == {0: "length"}


def test_a_server_that_is_lost_is_unready_until_all_have_heard():
    """As where another of its processes has died."""
    with running() as server, ThreadPoolExecutor(2) as pool:
        server.engine.go.clear()
        asked = pool.submit(server.post, COMPLETIONS, LONG)
        wait_for(lambda: server.server.answering)
        ending = pool.submit(serve._abandon, server.engine, server.server, "process 1 has died")
        wait_for(lambda: server.engine.error)
        assert server.get("/health").status_code == 503
        assert not ending.done()
        server.engine.go.set()
        ending.result(10)
        assert error_of(asked.result(10), 500)["message"] == "process 1 has died"


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
            data = b""
            while b"the server is stopping" not in data:
                data += runs.recv(1 << 16)
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


def malformed(draw: random.Random, path: str) -> bytes:
    """A body that was damaged in one way or another, and that may still be right."""
    asked = {"messages": HELLO} if path == CHATS else {"prompt": [7, 8]}
    body = asked | {"max_tokens": 3}
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


def send_malformed(client: httpx.Client, draw: random.Random, count: int) -> Counter[int]:
    """Sends so many such bodies; how often each status came."""
    statuses: Counter[int] = Counter()
    headers = {"content-type": "application/json"}
    for index in range(count):
        path = draw.choice((COMPLETIONS, CHATS, "/tokenize", "/detokenize"))
        response = client.post(path, content=malformed(draw, path), headers=headers)
        assert response.status_code in (200, 400, 404), (index, response.text)
        statuses[response.status_code] += 1
        if response.status_code != 200:
            error_of(response, response.status_code)
    return statuses


def test_a_thousand_malformed_bodies_leave_the_server_as_it_was():
    with running() as server, httpx.Client(base_url=server.url, timeout=30) as client:
        good = server.post(COMPLETIONS, LONG).json()["choices"]
        statuses = send_malformed(client, random.Random(5), 1000)
        assert statuses[400] > 500 and statuses[200] > 50 and statuses[404] > 10
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
        from concurrent.futures import ThreadPoolExecutor

        def ask(seed: int) -> tuple[str, int]:
            body = LONG | {"seed": seed, "max_tokens": 5 + seed % 40}
            return client.post(COMPLETIONS, json=body).json()["choices"][0]["text"], seed

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, range(64)))
        wanted = {each.sampling.seed: text_of(answer_of(each)) for each in engine.requests}
        assert all(wanted[seed] == text for text, seed in answers) and len(wanted) == 64
