"""Requests from question sets, sent to a server at given times."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import httpx

from infer.bench.suites import load_suite
from infer.cli.flags.pair import DEMO
from infer.cli.flags.prompts import asking, tokenizer_of
from moa_jax.errors import InputError
from moa_jax.files.model_folder import find_folder

TIMEOUTS = httpx.Timeout(30.0, read=600.0, pool=None)  # seconds; requests may wait for a slot
NO_LIMITS = httpx.StopConditions(max_connections=None, max_keepalive_connections=None)


class SampleRequest(NamedTuple):
    """One request, identical for every server."""

    index: int  # over all requests; determines the seed
    body: dict[str, Any]


class RequestOutcome(NamedTuple):
    """The result of one request; times are seconds of `time.perf_counter`."""

    index: int  # of the request
    due: float  # scheduled arrival; latency starts here, so a late client hides no delay
    first: float | None  # arrival of the first token
    end: float
    tokens: int
    text: str
    error: str  # "" for a complete answer


class Requests:
    """Requests with the questions of a suite, whose order --seed determines."""

    def __init__(self, args: argparse.Namespace, max_tokens: int) -> None:
        """Skips questions whose prompt and longest answer exceed `max_tokens` together.

        Raises InputError for a suite that cannot be read or that has no fitting question.
        """
        self._args = args
        tokenizer = tokenizer_of(find_folder(args.target or DEMO / "target", weights=False))
        found = [each.turns[0] for each in load_suite(args.suite)]
        longest = max_tokens - args.max_new_tokens
        self._questions = [each for each in found if len(asking(each, tokenizer)) <= longest]
        self.count = len(self._questions)
        self.left_out = len(found) - self.count
        if not self.count:
            raise InputError(
                f"--max-new-tokens {args.max_new_tokens}: no question of {args.suite} leaves room "
                f"for such an answer in {max_tokens} tokens; lower it"
            )
        random.Random(args.seed).shuffle(self._questions)

    def batch(self, begin: int, count: int) -> list[SampleRequest]:
        """`count` requests from index `begin` on; questions repeat."""
        return [self._request(index) for index in range(begin, begin + count)]

    def _request(self, index: int) -> SampleRequest:
        body = {
            "messages": [{"role": "user", "content": self._questions[index % self.count]}],
            "max_tokens": self._args.max_new_tokens,
            "temperature": self._args.temperature,
            "seed": self._args.seed + index,
            "ignore_eos": self._args.ignore_stop,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return SampleRequest(index, body)


def client_of(url: str) -> httpx.AsyncClient:
    """A client without a connection limit; ignores proxy settings of the environment."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUTS, limits=NO_LIMITS, trust_env=False)


async def open_loop(
    client: httpx.AsyncClient, requests: Sequence[SampleRequest], times: Sequence[float]
) -> list[RequestOutcome]:
    """Sends every request at its time (seconds from now), independent of the server."""
    began = time.perf_counter()

    async def one(request: SampleRequest, after: float) -> RequestOutcome:
        await asyncio.sleep(began + after - time.perf_counter())
        return await send(client, request, began + after)

    return await asyncio.gather(*map(one, requests, times))


async def send(client: httpx.AsyncClient, request: SampleRequest, due: float) -> RequestOutcome:
    """Sends one request and reads its stream; failures are recorded in `error`."""
    first, tokens, texts, error, finish = None, 0, [], "", None
    try:
        async for event in _events(client, request.body):
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                texts.append(text := choice["delta"].get("content") or "")
                if first is None and (text or finish):
                    first = time.perf_counter()
        if finish is None or not tokens:
            error = "the stream ended before the answer"
    except InputError as refused:
        error = str(refused)
    except (httpx.HTTPError, httpx.StreamError, ValueError, LookupError, TypeError) as fault:
        error = type(fault).__name__
    end = time.perf_counter()
    return RequestOutcome(request.index, due, first, end, tokens, "".join(texts), error)


async def _events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream; raises InputError with the server's error message."""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise InputError(f"{response.status_code} {text[:200]}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise InputError(event["error"]["message"])
                yield event
