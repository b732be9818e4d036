"""The server over a real socket: shapes, streams and settings of answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from infer.info import ROOT
from moa_jax.decode.sampling import Sampling
from tests.meeting import wait_for
from tests.serve import toy_server
from tests.serve.toy_server import CHATS, COMPLETIONS, HELLO, LONG, Running, answer_of, text_of


def choices_of(server: Running, body: dict[str, Any], stream: bool = False) -> list[dict]:
    """Returns the choices of a whole answer, or the parts of one choice's stream."""
    if stream:
        return [event["choices"][0] for event in server.stream(COMPLETIONS, body)[:-1]]
    return server.post(COMPLETIONS, body).json()["choices"]


# ---- answers --------------------------------------------------------------------------------


def test_a_completion_is_the_output_of_the_engine(server):
    body = {"prompt": "Good day.", "max_tokens": 30, "seed": 7, "temperature": 0.5, "user": "me"}
    said = server.post(COMPLETIONS, body).json()
    request = server.engine.requests[-1]
    assert request.prompt_ids == tuple(toy_server.TOKENIZER("Good day.")["input_ids"])
    assert (request.max_new_tokens, request.stop_ids) == (30, (toy_server.EOS,))
    assert request.sampling == Sampling(temperature=0.5, seed=7)
    answer = answer_of(request)
    (choice,) = said["choices"]
    assert choice["text"] == text_of(answer)
    assert (choice["index"], choice["logprobs"], choice["stop_reason"]) == (0, None, None)
    assert choice["finish_reason"] == ("stop" if answer[-1] == toy_server.EOS else "length")
    assert (said["object"], said["model"], said["seed"]) == ("text_completion", "toy", 7)
    prompt, new = len(request.prompt_ids), len(answer)
    tokens = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    assert said["usage"] == tokens | {"prompt_tokens_details": {"cached_tokens": 1}}


def test_a_chat_is_rendered_by_the_template(server):
    response = server.post(CHATS, {"messages": HELLO, "max_tokens": 20, "model": "toy"})
    said, request = response.json(), server.engine.requests[-1]
    assert request.prompt_ids == toy_server.HELLO_IDS
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
    found = [(choice["index"], choice["text"]) for choice in said["choices"]]
    assert found == [*enumerate(text_of(answer_of(each)) for each in requests)]
    assert said["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_stream_has_the_same_choices(server, path):
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
    assert all("usage" not in event for event in server.stream(path, body)[:-1])


def answer_and_stop(server: Running, start: int = 0) -> tuple[str, str]:
    """Returns the answer to LONG, and a text in the answer that several tokens make."""
    (choice,) = choices_of(server, LONG | {"max_tokens": 60})
    tokens = answer_of(server.engine.requests[-1])
    before = text_of(tokens[:20])
    stop = text_of(tokens[:23])[len(before.rstrip("\ufffd")) :][1:-1]
    assert stop and "\ufffd" not in stop
    return choice["text"], stop


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_that_never_shows_it(server, stream):
    text, stop = answer_and_stop(server)
    body = LONG | {"stop": ["never there", stop], "return_token_ids": True}
    cancelled = len(server.engine.cancelled)
    parts = choices_of(server, body, stream)
    said = "".join(part["text"] for part in parts)
    assert said == text[: text.index(stop)]
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == ("stop", stop)
    tokens = sum((part["token_ids"] for part in parts), [])
    assert stop in text_of(tokens) and stop not in text_of(tokens[:-1])
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [[7, 8]]
    assert len(server.engine.cancelled) == cancelled + 1
    wait_for(lambda: not server.engine._tasks)
    kept = choices_of(server, body | {"include_stop_str_in_output": True}, stream)
    assert "".join(part["text"] for part in kept) == said + stop


def test_the_beginning_of_a_stop_text_that_does_not_come_is_shown(server):
    body = LONG | {"max_tokens": 12}
    (whole,) = choices_of(server, body)
    (choice,) = choices_of(server, body | {"stop": whole["text"][-2:] + "never there"})
    assert (choice["text"], choice["finish_reason"]) == (whole["text"], "length")


def test_a_stop_id_ends_an_answer_without_its_text(server):
    server.post(COMPLETIONS, LONG | {"max_tokens": 12})
    tokens = answer_of(server.engine.requests[-1])
    body = LONG | {"stop_token_ids": [tokens[9]], "return_token_ids": True}
    (choice,) = choices_of(server, body)
    end = tokens.index(tokens[9])
    assert (choice["text"], choice["token_ids"]) == (text_of(tokens[:end]), tokens[: end + 1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[9])
    (choice,) = choices_of(server, body | {"include_stop_str_in_output": True})
    assert choice["text"] == text_of(tokens[: end + 1])


# ---- log-probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize("new, echo", [(20, False), (0, True), (1, True), (20, True)])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_completion(server, new, echo, stream):
    """With `echo`, the prompt's come first, and the first token has no log-probability."""
    prompt = "Good day, is there a cheap hotel?"
    body = LONG | {"prompt": prompt, "max_tokens": new, "logprobs": 2, "echo": echo}
    parts = choices_of(server, body, stream)
    answer, found = answer_of(server.engine.requests[-1]), {}
    for part in parts:
        for name, values in part["logprobs"].items():
            found.setdefault(name, []).extend(values)
    tokens = [*(toy_server.TOKENIZER(prompt)["input_ids"] if echo else ()), *answer]
    likely = [toy_server.likely_of(token, 2).logprob for token in tokens]
    assert found["token_logprobs"] == [None, *likely[1:]] if echo else likely
    text = "".join(part["text"] for part in parts)
    assert text == prompt * echo + text_of(answer)
    for token, name, offset in zip(tokens, found["tokens"], found["text_offset"], strict=True):
        if not name.startswith("bytes:"):
            assert name == toy_server.TOKENIZER.decode([token])
            shown = text_of([token])  # nothing of a special token
            assert text[offset : offset + len(shown)] == shown
    first, *rest = zip(found["tokens"], found["top_logprobs"], strict=True)
    assert all(name in top for name, top in rest) and (first[1] is None) == echo
    assert parts[-1]["finish_reason"] == "length"


def test_logprobs_of_a_chat(server):
    body = {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 3, "seed": 1}
    (choice,) = server.post(CHATS, body).json()["choices"]
    content, answer = choice["logprobs"]["content"], answer_of(server.engine.requests[-1])
    for token, entry in zip(answer, content, strict=True):
        likely = toy_server.likely_of(token, 3)
        assert entry["logprob"] == likely.logprob
        assert [top["logprob"] for top in entry["top_logprobs"]] == [p for _, p in likely.top]
    data = bytes(sum((entry["bytes"] for entry in content if entry["token"] != "<|end|>"), []))
    assert data.decode(errors="replace") == choice["message"]["content"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_logprobs_of_a_prompt(server, path):
    """Under the names of vLLM: by choice in completions, beside the choices in chats."""
    body = {"prompt": "Good."} if path == COMPLETIONS else {"messages": HELLO, "logprobs": True}
    said = server.post(path, body | {"max_tokens": 4, "prompt_logprobs": 2}).json()
    first, *found = (said["choices"][0] if path == COMPLETIONS else said)["prompt_logprobs"]
    request = server.engine.requests[-1]
    assert first is None and request.top_logprobs == (None if path == COMPLETIONS else 2)
    for token, entry in zip(request.prompt_ids[1:], found, strict=True):
        likely = toy_server.likely_of(token, 2)
        shown = {token: likely.logprob} | dict(likely.top)
        assert {int(id): each["logprob"] for id, each in entry.items()} == shown
        assert [each["rank"] for each in entry.values()] == [1, 2]


# ---- other paths ----------------------------------------------------------------------------


def test_the_other_paths(server):
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("toy", 512)
    assert server.get("/v1/models/toy").json() == card
    assert toy_server.error_of(server.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert server.get("/version").json()["version"]
    tokens = toy_server.TOKENIZER("Good day.")["input_ids"]
    found = server.post("/tokenize", {"prompt": "Good day."}).json()
    assert found == {"count": len(tokens), "max_model_len": 512, "tokens": tokens}
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "Good day."}
    chat = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert tuple(chat) == toy_server.HELLO_IDS


def test_metrics_have_the_figures_of_the_engine(server):
    """The names are those of vLLM."""
    figures = {"prompt_tokens": 90, "prefix_cache_hits": 30}
    figures |= {"spec_decode_num_draft_tokens": 15, "spec_decode_num_accepted_tokens": 4}
    for name, figure in figures.items():
        assert server.metric(f"vllm:{name}_total") == figure, name
    text = server.get("/metrics").text.replace('"}', '",}')
    assert 'position="1",} 1.0' in text and 'way="chain 4",} 2.0' in text


def test_panels_show_metrics_that_the_server_has(server):
    server.post(COMPLETIONS, LONG), server.get("/nothing")
    served = server.get("/metrics").text
    board = json.loads((ROOT / "configs/grafana.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in shown:
        metrics = re.findall(r"(?:by \((\w+)\)\(rate\()?((?:vllm|moa):\w+){(.*?)}", expression)
        for by, name, labels in metrics:
            (line,) = re.findall(rf"^{name}({{.*)", served, re.MULTILINE)[:1]
            given = {*re.findall(r"(\w+)=", labels), *filter(None, [by])}
            assert metrics and {*re.findall(r'(\w+)="', line)} >= given, expression
    assert len(shown) > 20


def test_speculation_is_reported_per_request():
    """Under the names of vLLM; each output of the toy is a round that drafts five tokens."""
    with Running(detail="detailed") as server:
        body = LONG | {"max_tokens": 8, "stream_options": {"include_usage": True}}
        *_, last, _ = server.stream(COMPLETIONS, body)
        steps = {"per_step_accepted": [2, 2, 1], "per_step_drafted": [5] * 3, "num_spec_steps": 3}
        totals = {"num_accepted_draft_tokens": 5, "num_draft_tokens": 15, "num_spec_tokens": 2}
        means = {"mean_acceptance_length": 1 + 5 / 3, "draft_acceptance_rate": 5 / 15}
        found = steps | totals | means | {"acceptance_histogram": [0, 1, 2]}
        assert last["metrics"] == {"speculative_decoding": found}
        assert server.post(COMPLETIONS, LONG | {"n": 2}).json()["metrics"] is None


def test_tokens_and_times_are_counted_up_to_a_stop_text():
    """The engine does not match stop texts, so it may have decoded more tokens."""
    with Running() as server:
        _, stop = answer_and_stop(server)
        server.stream(COMPLETIONS, LONG | {"max_tokens": 12})
        usage = server.post(COMPLETIONS, LONG | {"stop": stop, "n": 1}).json()["usage"]
        last = usage["completion_tokens"]
        assert 20 < last <= 24 and last % server.engine.step
        wait_for(lambda: server.metric("vllm:request_generation_tokens_count") == 3)
        assert server.metric("vllm:generation_tokens_total") == 72 + last
        assert server.metric("vllm:request_generation_tokens_sum") == 72 + last
        assert server.metric("vllm:time_to_first_token_seconds_count") == 3
        assert server.metric("vllm:request_success_total") == 3
