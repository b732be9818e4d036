"""OpenAI's own package as a client, of a toy engine and of the program."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from moa_jax.config import Sampling
from moa_jax.engine import Request
from tests.serve.served_program import HELLO, HELLO_IDS, KEY, alone, program, start_program
from tests.serve.toy_server import (
    EOS,
    TOKENIZER,
    Running,
    answer_of,
    text_of,
)


@pytest.fixture
def server() -> Iterator[Running]:
    with Running(keys=(KEY,)) as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def tokens_of(count: int, **sampling: float) -> list[int]:
    """The toy model's answer to HELLO."""
    return answer_of(Request(tuple(HELLO_IDS), count, (EOS,), Sampling(**sampling)))


def test_answers_and_streams(client):
    (model,) = client.models.list().data
    settings = {"model": model.id, "temperature": 0.8, "seed": 3, "max_tokens": 30}
    found = client.completions.create(prompt=HELLO_IDS, n=2, logprobs=2, **settings)
    answers = [tokens_of(30, temperature=0.8, seed=3 + index) for index in range(2)]
    assert [choice.text for choice in found.choices] == list(map(text_of, answers))
    assert found.usage.prompt_tokens == len(HELLO_IDS) and found._request_id == found.id
    settings |= {"logprobs": True, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = client.chat.completions.create(messages=HELLO, **settings)
    deltas = [chunk.choices[0] for chunk in chunks]
    assert "".join(each.delta.content or "" for each in deltas) == text_of(answers[0])
    entries = [entry.token for each in deltas if each.logprobs for entry in each.logprobs.content]
    assert entries == [TOKENIZER.decode([token]) for token in answers[0]]
    assert deltas[-1].finish_reason in ("stop", "length")
    assert usage.choices == [] and usage.usage.prompt_tokens == len(HELLO_IDS)


def test_errors_are_those_that_the_package_knows(server, client):
    ask = lambda **fields: client.completions.create(**{"model": "toy", "prompt": [7, 8]} | fields)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        ask(model="gpt-5")
    with pytest.raises(openai.BadRequestError, match="n is 0") as found:
        ask(n=0)
    assert (found.value.param, found.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    server.engine.error = "a pass failed"
    with pytest.raises(openai.APIError, match="a pass failed"):
        list(ask(stream=True))


@pytest.mark.slow
def test_a_server_that_was_killed_starts_again_on_its_port(tmp_path):
    """A client that is being answered when the server is killed sees an error."""
    process, ready = start_program(tmp_path, "--port", "0")
    client = openai.OpenAI(base_url=ready["url"], api_key=KEY)

    def text(new: int, on_chunk: Callable[[], None] = lambda: None) -> str:
        found, settings = "", {"model": "moa-jax-demo", "temperature": 0, "stream": True}
        for chunk in client.completions.create(prompt=HELLO_IDS, max_tokens=new, **settings):
            on_chunk()
            found += chunk.choices[0].text
        return found

    wanted, _ = alone(tuple(HELLO_IDS), 12, Sampling(), False)
    with client:
        assert text(12) == wanted
        with pytest.raises((httpx.TransportError, openai.APIError)):
            text(150, process.kill)
        assert process.wait(30) == -signal.SIGKILL
        with program(tmp_path, port=ready["port"]):
            assert text(12) == wanted
