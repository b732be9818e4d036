"""Clients of a server: those who come by a Poisson law, and those who ask all the time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, NamedTuple

import httpx

from infer.serving.bench.questions import Asked

PATH = "/v1/chat/completions"
TIMES = httpx.Timeout(30.0, read=600.0, pool=None)  # seconds; an answer may wait for its turn
NO_BOUND = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class RequestOutcome(NamedTuple):
    """What became of one request; times are seconds on one clock."""

    asked: Asked
    due: float  # when it should have been sent
    sent: float
    first: float | None  # when the first token came
    end: float
    tokens: int
    text: str
    error: str  # why there is no whole answer, "" where there is

    @property
    def seconds(self) -> float:
        """From when it should have been sent, so that a late client flatters nobody."""
        return self.end - self.due


def client_of(url: str) -> httpx.AsyncClient:
    """A client with as many connections as it needs; proxies of the environment do not count."""
    return httpx.AsyncClient(base_url=url, timeout=TIMES, limits=NO_BOUND, trust_env=False)


async def come(
    client: httpx.AsyncClient, asks: Sequence[Asked], times: Sequence[float]
) -> list[RequestOutcome]:
    """The answers to requests that are sent at these times, counted in seconds from now."""
    began = time.perf_counter()

    async def one(asked: Asked, after: float) -> RequestOutcome:
        await asyncio.sleep(began + after - time.perf_counter())
        return await ask(client, asked, began + after)

    return await asyncio.gather(*map(one, asks, times))


async def keep_asking(
    client: httpx.AsyncClient, asks: Iterable[Asked], count: int
) -> list[RequestOutcome]:
    """The answers to requests of `count` clients, each of whom asks again once it has an answer."""
    left, found = iter(asks), []

    async def one() -> None:
        for asked in left:  # which all share
            found.append(await ask(client, asked, time.perf_counter()))

    await asyncio.gather(*(one() for _ in range(count)))
    return found


def until(end: float, asks: Iterable[Asked]) -> Iterable[Asked]:
    """Requests until a time of `time.perf_counter`."""
    for asked in asks:
        if time.perf_counter() > end:
            return
        yield asked


async def ask(client: httpx.AsyncClient, asked: Asked, due: float) -> RequestOutcome:
    """Sends one request and reads its stream to the end; it never raises for a server's fault."""
    sent, first, tokens, texts, error = time.perf_counter(), None, 0, [], ""
    finish = None
    try:
        async for event in _events(client, asked.body):
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                if text := choice["delta"].get("content"):
                    texts.append(text)
                if first is None and (text or finish):
                    first = time.perf_counter()
        if finish is None or not tokens:
            error = "the stream ended before the answer"
    except (httpx.HTTPError, httpx.StreamError) as fault:
        error = type(fault).__name__
    except _Refused as refused:
        error = str(refused)
    except (ValueError, KeyError, TypeError, AttributeError):
        error = "an event is not as OpenAI has it"
    return RequestOutcome(
        asked, due, sent, first, time.perf_counter(), tokens, "".join(texts), error
    )


class _Refused(Exception):
    """What the server says instead of an answer."""


async def _events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream; raises _Refused for a status other than 200 or an error in it."""
    async with client.stream("POST", PATH, json=body) as response:
        if response.status_code != 200:
            raise _Refused(f"{response.status_code} {_message(await response.aread())}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise _Refused(event["error"]["message"])
            yield event


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:100].decode(errors="replace")
