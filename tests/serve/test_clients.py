"""OpenAI's own package as a client of a toy engine and of infer.serve."""

from __future__ import annotations

import signal
import ssl
from collections.abc import Callable

import httpx
import openai
import pytest

from moa_jax.config import Sampling
from moa_jax.engine import Request
from tests.certificates import certificate
from tests.serve.served_program import HELLO, HELLO_IDS, KEY, alone, program, start_program
from tests.serve.toy_server import EOS, Running, answer_of, text_of


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


@pytest.mark.slow
def test_a_server_speaks_tls_and_starts_again_on_its_port_after_a_kill(tmp_path):
    """Clients need its certificate. One that is answered during the kill sees an error."""
    cert, key = certificate(tmp_path)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
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
