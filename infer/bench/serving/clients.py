"""Requests from question sets, sent to a server at the times of a Poisson process."""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


class RequestOutcome(NamedTuple):
    """The result of one request; times are seconds of `time.perf_counter`."""

    seed: int  # of the request, by which servers are compared
    due: float  # scheduled arrival; latency starts here, so a late client hides no delay
    first: float | None  # arrival of the first token
    end: float
    tokens: int
    text: str
    error: str  # "" for a complete answer


def questions_of(args: argparse.Namespace, max_tokens: int) -> list[str]:
    """The questions of --suite that fit into `max_tokens` with their answers, shuffled by --seed.

    Raises InputError for a suite that cannot be read or that has no fitting question.
    """
    tokenizer = tokenizer_of(find_folder(args.target or DEMO / "target", weights=False))
    longest = max_tokens - args.max_new_tokens
    texts = [each.turns[0] for each in load_suite(args.suite)]
    found = [text for text in texts if len(asking(text, tokenizer)) <= longest]
    if not found:
        raise InputError(
            f"--max-new-tokens {args.max_new_tokens}: no question of {args.suite} leaves room "
            f"for such an answer in {max_tokens} tokens; lower it"
        )
    random.Random(args.seed).shuffle(found)
    return found


def requests_of(
    args: argparse.Namespace, questions: Sequence[str], begin: int, count: int
) -> list[dict[str, Any]]:
    """The bodies of `count` requests from index `begin` on, identical for every server."""
    share = args.structured
    structured = {True: {"response_format": {"type": "json_object"}}, False: {}}
    return [
        {
            "messages": [{"role": "user", "content": questions[index % len(questions)]}],
            "max_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "seed": args.seed + index,
            "ignore_eos": args.ignore_stop,
            "stream": True,
            "stream_options": {"include_usage": True},
            **structured[int((index + 1) * share) > int(index * share)],
        }
        for index in range(begin, begin + count)
    ]


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times (s) of `count` clients: the first at 0, then `rate` per second on average.

    Gaps have an exponential distribution, so the arrivals are a Poisson process.
    """
    gaps = random.Random(seed)
    times = itertools.accumulate((gaps.expovariate(rate) for _ in range(count - 1)), initial=0.0)
    return list(times)


def client_of(url: str) -> httpx.AsyncClient:
    """A client without a connection limit; ignores proxy settings of the environment."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUTS, limits=NO_LIMITS, trust_env=False)


async def open_loop(
    client: httpx.AsyncClient, requests: Sequence[dict[str, Any]], times: Sequence[float]
) -> list[RequestOutcome]:
    """Sends every request at its time (seconds from now), independent of the server."""
    began = time.perf_counter()
    send_at = lambda body, after: send(client, body, began + after)
    return await asyncio.gather(*map(send_at, requests, times))


async def send(client: httpx.AsyncClient, body: dict[str, Any], due: float) -> RequestOutcome:
    """Sends one request when due and reads its stream; failures are recorded in `error`."""
    first, tokens, texts, error, finish = None, 0, [], "", None
    await asyncio.sleep(due - time.perf_counter())
    try:
        async for event in _events(client, body):
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                finish = choice["finish_reason"] or finish
                texts.append(text := choice["delta"].get("content") or "")
                if first is None and (text or finish):
                    first = time.perf_counter()
        if finish is None or not tokens:
            error = "the stream ended before the answer"
    except (httpx.HTTPError, httpx.StreamError, ValueError, LookupError, TypeError) as fault:
        error = str(fault) if isinstance(fault, InputError) else type(fault).__name__
    end = time.perf_counter()
    return RequestOutcome(body["seed"], due, first, end, tokens, "".join(texts), error)


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
