"""OpenAI's own package as a client: of a toy engine, and of the bundled pair (slow)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest

from moa_jax import Session, load_target
from moa_jax.config import Sampling
from moa_jax.engine import Request
from tests.certificates import certificate
from tests.serve.toy_server import DEMO, EOS, TOKENIZER, ToyEngine, answer_of, running, wait_for

ROOT = Path(__file__).resolve().parents[2]
HELLO = [{"role": "user", "content": "I need a cheap hotel."}]
HELLO_IDS = TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
KEY = "sk-of-a-test"


class ServedModel(NamedTuple):
    """A server, and what it should say."""

    url: str
    tokens_of: Callable[[list[int], int, Sampling], list[int]]

    def text_of(self, ids: list[int], count: int, **sampling) -> str:
        tokens = self.tokens_of(list(ids), count, Sampling(**sampling))
        return TOKENIZER.decode(tokens, skip_special_tokens=True)

    def client(self, **options) -> openai.OpenAI:
        options = {"base_url": self.url, "api_key": KEY, "max_retries": 0} | options
        return openai.OpenAI(**options)


def start_program(folder: Path, *flags: str) -> tuple[subprocess.Popen, dict]:
    """infer.serve on the bundled pair, once it is ready."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    (folder / "keys").write_text(f"# of tests\n{KEY}\n")
    command = [sys.executable, "-m", "infer.serve", "--ready-file", str(ready)]
    command += ["--api-key-file", str(folder / "keys"), "--slots", "4", "--max-tokens", "192"]
    with (folder / "log").open("w") as log:
        program = subprocess.Popen(
            [*command, *flags], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log
        )
    wait_for(lambda: ready.exists() or program.poll() is not None, 300)
    assert program.poll() is None, (folder / "log").read_text()
    return program, json.loads(ready.read_text())


@pytest.fixture(scope="module", params=["toy", pytest.param("pair", marks=pytest.mark.slow)])
def served(request, tmp_path_factory) -> Iterator[ServedModel]:
    if request.param == "toy":
        say = lambda ids, count, sampling: answer_of(Request(tuple(ids), count, (EOS,), sampling))
        with running(ToyEngine(slots=8, max_waiting=64), keys=(KEY,)) as server:
            yield ServedModel(f"{server.url}/v1", say)
        return
    session = Session(load_target(DEMO / "target"), cache_rows=256)

    def plain(ids: list[int], count: int, sampling: Sampling) -> list[int]:
        return session.generate([ids], count, sampling=sampling)[0].token_ids

    folder = tmp_path_factory.mktemp("served")
    program, ready = start_program(folder, "--port", "0")
    try:
        yield ServedModel(ready["url"], plain)
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()


def test_completions_and_chats(served):
    with served.client() as client:
        (model,) = client.models.list().data
        said = client.completions.create(
            model=model.id, prompt="Good day.", max_tokens=24, temperature=0
        )
        ids = TOKENIZER("Good day.")["input_ids"]
        assert said.choices[0].text == served.text_of(ids, 24)
        said = client.chat.completions.create(
            model=model.id, messages=HELLO, max_completion_tokens=30, temperature=0.8, seed=3, n=2
        )
        wanted = [served.text_of(HELLO_IDS, 30, temperature=0.8, seed=3 + i) for i in range(2)]
        assert [choice.message.content for choice in said.choices] == wanted
        assert said.usage.prompt_tokens == len(HELLO_IDS)
        assert said._request_id == said.id


@pytest.mark.parametrize("stop", [None, "t"])
def test_streams(served, stop):
    with served.client() as client:
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=HELLO,
            max_tokens=30,
            temperature=0,
            stop=stop,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, usage = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    wanted = served.text_of(HELLO_IDS, 30)
    assert text == (wanted.partition(stop)[0] if stop else wanted)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert usage.choices == [] and usage.usage.prompt_tokens == len(HELLO_IDS)


def test_many_at_once(served):
    async def ask(client: openai.AsyncOpenAI, model: str, seed: int) -> str:
        fields = {"prompt": HELLO_IDS, "max_tokens": 12, "temperature": 0.9, "seed": seed}
        stream = await client.completions.create(model=model, stream=True, **fields)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served.url, api_key=KEY) as client:
            model = (await client.models.list()).data[0].id
            return await asyncio.gather(*(ask(client, model, seed) for seed in range(12)))

    texts = asyncio.run(main())
    assert texts == [served.text_of(HELLO_IDS, 12, temperature=0.9, seed=i) for i in range(12)]


def test_logprobs(served):
    with served.client() as client:
        said = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=HELLO,
            max_tokens=10,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
    content = said.choices[0].logprobs.content
    tokens = served.tokens_of(HELLO_IDS, 10, Sampling())
    assert [entry.token for entry in content] == [TOKENIZER.decode([token]) for token in tokens]
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in content)


def test_errors_are_those_that_the_package_knows(served):
    fields = {"messages": HELLO, "max_tokens": 4}
    with served.client() as client:
        model = client.models.list().data[0].id
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            client.chat.completions.create(model="gpt-5", **fields)
        with pytest.raises(openai.BadRequestError, match="n is 0") as found:
            client.chat.completions.create(model=model, n=0, **fields)
        assert (found.value.param, found.value.type) == ("n", "invalid_request_error")
        with pytest.raises(openai.BadRequestError, match="tools is not supported"):
            tool = {"type": "function", "function": {"name": "f"}}
            client.chat.completions.create(model=model, tools=[tool], **fields)
    with served.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_full_queue_and_a_failing_engine():
    engine = ToyEngine(slots=1, max_waiting=0)
    fields = {"model": "toy", "prompt": [7, 8], "extra_body": {"ignore_eos": True}}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(engine))
        options = {"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}
        client = stack.enter_context(openai.OpenAI(**options))
        engine.go.clear()
        with server.socket("/v1/completions", {"prompt": [7]}):
            wait_for(lambda: engine.requests)
            with pytest.raises(openai.RateLimitError, match="try again later"):
                client.completions.create(**fields)
        engine.error = "a pass failed"
        engine.go.set()
        wait_for(lambda: not engine._tasks)
        with pytest.raises(openai.APIError, match="a pass failed"):
            list(client.completions.create(**fields, stream=True))


@pytest.mark.slow
def test_a_target_alone_is_served(tmp_path):
    """Prompt lookup drafts for it, of which the server says one line; its texts are plain ones."""
    program, ready = start_program(tmp_path, "--port", "0", "--target", str(DEMO / "target"))
    session = Session(load_target(DEMO / "target"), cache_rows=256)
    try:
        with openai.OpenAI(base_url=ready["url"], api_key=KEY, max_retries=0) as client:
            (model,) = client.models.list().data
            fields = {"model": model.id, "prompt": HELLO_IDS, "max_tokens": 30, "temperature": 0}
            said = client.completions.create(**fields)
        (plain,) = session.generate([HELLO_IDS], 30)
        assert said.choices[0].text == TOKENIZER.decode(plain.token_ids, skip_special_tokens=True)
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()
    assert (tmp_path / "log").read_text().count("no --draft: prompt lookup drafts for ") == 1


@pytest.mark.slow
def test_a_server_speaks_tls_and_starts_again_on_its_port_when_it_was_killed(tmp_path):
    """To those who trust its certificate; others are turned away, and it goes on.

    It drafts, and who is being answered when it is killed hears of it.
    """
    cert, key = certificate(tmp_path)
    flags = ["--tls-cert", str(cert), "--tls-key", str(key)]
    program, ready = start_program(tmp_path, "--port", "0", *flags)

    def text(kill: bool = False) -> str:
        trusted = httpx.Client(verify=ssl.create_default_context(cafile=cert))
        with openai.OpenAI(base_url=ready["url"], api_key=KEY, http_client=trusted) as client:
            found, settings = "", {"model": "moa-jax-demo", "temperature": 0, "stream": True}
            new = 150 if kill else 12
            for chunk in client.chat.completions.create(
                **settings, messages=HELLO, max_tokens=new, extra_body={"ignore_eos": kill}
            ):
                if kill:
                    os.kill(program.pid, signal.SIGKILL)
                found += chunk.choices[0].delta.content or ""
            return found

    session = Session(load_target(DEMO / "target"))
    (wanted,) = session.generate([HELLO_IDS], 12)
    wanted = TOKENIZER.decode(wanted.token_ids, skip_special_tokens=True)
    try:
        assert ready["url"].startswith("https://127.0.0.1:")
        plain_url = ready["url"].replace("https", "http")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{plain_url}/models")
        with openai.OpenAI(base_url=ready["url"], api_key=KEY, max_retries=0) as client:
            with pytest.raises(openai.APIConnectionError):
                client.models.list()
        assert text() == wanted
        with pytest.raises((httpx.TransportError, openai.APIError)):
            text(kill=True)
        assert program.wait(30) == -signal.SIGKILL
        program, again = start_program(tmp_path, "--port", str(ready["port"]), *flags)
        assert again["url"] == ready["url"]
        assert text() == wanted
        program.send_signal(signal.SIGTERM)
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()
