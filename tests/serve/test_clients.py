"""OpenAI's own package as a client of a toy engine and of infer.serve."""

from __future__ import annotations

import dataclasses
import functools
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from moa_jax.config import Sampling
from moa_jax.engine import Request
from tests.certificates import certificate
from tests.serve import toy_server
from tests.serve.served_program import HELLO, HELLO_IDS, KEY, alone, program, start_program
from tests.serve.toy_server import EOS, TOKENIZER, Running, answer_of, text_of


def client_of(url: str, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, **options)


def test_answers_streams_and_errors():
    tokens = answer_of(Request(tuple(HELLO_IDS), 30, (EOS,), Sampling(0.8, seed=3)))
    settings = {"model": "toy", "temperature": 0.8, "seed": 3, "max_tokens": 30}
    with Running(keys=(KEY,)) as server, client_of(f"{server.url}/v1") as client:
        found = client.completions.create(prompt=HELLO_IDS, **settings)
        assert found.choices[0].text == text_of(tokens) and found._request_id == found.id
        settings |= {"messages": HELLO, "stream_options": {"include_usage": True}}
        *chunks, usage = client.chat.completions.create(**settings, stream=True)
        deltas = [chunk.choices[0] for chunk in chunks]
        assert "".join(each.delta.content or "" for each in deltas) == text_of(tokens)
        assert deltas[-1].finish_reason in ("stop", "length")
        assert usage.choices == [] and usage.usage.prompt_tokens == len(HELLO_IDS)
        with pytest.raises(openai.BadRequestError, match="n is 0") as refused:
            client.completions.create(model="toy", prompt=[7], n=0)
        assert refused.value.param == "n"


@pytest.mark.hub
def test_agents_of_other_packages(tmp_path):
    """The releases that pip chooses, in an environment of their own: tools and schemas.

    instructor brings an openai that it works with: beside the newest openai, whose jiter it bounds,
    pip would choose an instructor of years ago.
    """
    run = functools.partial(subprocess.run, capture_output=True, text=True)
    python, script = tmp_path / "venv/bin/python", Path(__file__).with_name("foreign_clients.py")
    run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    if (found := run([python, "-m", "pip", "install", "-q", "instructor"])).returncode:
        pytest.skip(f"no openai and instructor: {found.stderr.splitlines()[-1]}")
    with program(tmp_path, "--tool-call-parser", "hermes") as served:
        found = run([python, script, served.ready["url"], KEY])
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("tokenizer", toy_server.TOKENIZERS, ids=["text", "special"])
def test_reasoning_and_tool_calls_are_apart_from_the_content(tokenizer, monkeypatch):
    """A stream has the message of the whole answer, in pieces; other special tokens are hidden."""
    monkeypatch.setattr(toy_server, "TOKENIZER", tokenizer)
    monkeypatch.setattr(toy_server, "VOCAB", len(tokenizer))
    calls = [("look", '{"city": "Paris"}'), ("look", '{"city": "Bonn"}')]
    tags = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    text = "\n".join(["<think>\nHm.\n</think>\n\nSo:", *(tags.format(*call) for call in calls)])
    ids = tokenizer(text.replace("So", "<|user|>So"), add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(toy_server, "answer_of", lambda request: [*ids, EOS])
    look = {"type": "function", "function": {"name": "look"}}
    body = {"model": "toy", "messages": HELLO, "tools": [look]}
    with Running(keys=(KEY,)) as server, client_of(f"{server.url}/v1") as client:
        parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
        server.server.model = dataclasses.replace(server.server.model, **parsers)
        create = functools.partial(client.chat.completions.create, **body)
        whole, one = create().choices[0], create(parallel_tool_calls=False).choices[0]
        none, named = create(tool_choice="none").choices[0], create(tool_choice=look)
        held = [request.grammar is not None for request in server.engine.requests]
        with client.chat.completions.stream(**body) as stream:
            deltas = [each.chunk.choices[0].delta for each in stream if each.type == "chunk"]
            streamed = stream.get_final_completion().choices[0]
    rows = (whole, 2, "tool_calls"), (streamed, 2, "tool_calls"), (named.choices[0], 1, "stop")
    for choice, count, end in rows:
        message, found = choice.message, [each.function for each in choice.message.tool_calls]
        assert (message.content, choice.finish_reason) == ("So:", end)
        assert [(each.name, each.arguments) for each in found] == calls[:count]
        assert len({each.id for each in message.tool_calls}) == count
    assert whole.message.reasoning == "Hm." == "".join(getattr(d, "reasoning", "") for d in deltas)
    pieces = [each for delta in deltas for each in delta.tool_calls or []]
    assert len(pieces) > 4 and [each.index for each in pieces if each.id] == [0, 1]
    assert len(one.message.tool_calls) == 1 and held == [False, False, False, True]
    if tokenizer is TOKENIZER:
        assert (none.finish_reason, none.message.content) == ("stop", text[text.index("So:") :])


@pytest.mark.slow
def test_a_server_speaks_tls_and_starts_again_on_its_port_after_a_kill(tmp_path):
    """Clients need its certificate. One that is answered during the kill sees an error."""
    cert, key = certificate(tmp_path)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--mode", "plain", "--slots", "1")
    process, ready = start_program(tmp_path, "--port", "0", *flags)
    trusted = httpx.Client(verify=ssl.create_default_context(cafile=cert))
    client, other = client_of(ready["url"], http_client=trusted), client_of(ready["url"])

    def text(new: int, on_chunk: Callable[[], None] = lambda: None) -> str:
        found, settings = "", {"model": "moa-jax-demo", "temperature": 0, "stream": True}
        for chunk in client.completions.create(prompt=HELLO_IDS, max_tokens=new, **settings):
            on_chunk()
            found += chunk.choices[0].text
        return found

    wanted, _ = alone(tuple(HELLO_IDS), 12, Sampling(), False)
    try:
        assert ready["url"].startswith("https://127.0.0.1:")
        with pytest.raises(openai.APIConnectionError), other:
            other.models.list()
        with pytest.raises(httpx.TransportError):
            httpx.get(ready["url"].replace("https", "http"))
        assert text(12) == wanted
        with pytest.raises((httpx.TransportError, openai.APIError)):
            text(150, process.kill)
        assert process.wait(30) == -signal.SIGKILL
        with program(tmp_path, *flags, port=ready["port"]):
            assert text(12) == wanted
    finally:
        client.close()
        process.kill()
