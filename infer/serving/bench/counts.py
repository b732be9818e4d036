"""What a server has counted, read from its /metrics, and what it does while requests come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

SAMPLE_SECONDS = 0.5
WAYS, PROGRAMS = "moa:rounds", "moa:programs"
ServerCounts = Mapping[str, float]  # by name, and name and label where one matters


def counts_of(text: str) -> dict[str, float]:
    """The values in Prometheus' text by name; rounds by name and way."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total").removeprefix("vllm:")
            if way := sample.labels.get("way"):
                name = f"{name} {way}"
            if "position" not in sample.labels and "le" not in sample.labels:
                found[name] = found.get(name, 0.0) + sample.value
    return found


async def read_counts(client: httpx.AsyncClient) -> dict[str, float]:
    """What the server has counted until now."""
    response = await client.get("/metrics")
    response.raise_for_status()
    return counts_of(response.text)


async def num_programs(client: httpx.AsyncClient) -> float:
    """How many programs the server has compiled."""
    return (await read_counts(client))[PROGRAMS]


@contextlib.asynccontextmanager
async def watched(client: httpx.AsyncClient) -> AsyncIterator[list[tuple[float, ServerCounts]]]:
    """Looks at the server again and again; the list grows by times and counts."""
    seen: list[tuple[float, ServerCounts]] = []

    async def look() -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            with contextlib.suppress(httpx.HTTPError):  # a server that has ended is seen elsewhere
                seen.append((time.perf_counter(), await read_counts(client)))

    looking = asyncio.create_task(look())
    try:
        yield seen
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def growth(before: ServerCounts, after: ServerCounts) -> ServerCounts:
    """What was counted between two looks."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def what_server_did(grown: ServerCounts) -> dict[str, Any]:
    """tau, acceptance, shares of ways and of copied prompts, where counts have grown so.

    Each round of a row commits its accepted drafts and one token more, and the first token of an
    answer comes with its prompt: so rounds are tokens without first and accepted ones. `shares`
    counts rounds of whole batches.
    """
    count = lambda name: grown.get(name, 0.0)
    committed = count("moa:decoded_tokens") - count("time_to_first_token_seconds_count")
    accepted, drafted = (count(f"spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
    rounds = {
        name.removeprefix(f"{WAYS} "): value
        for name, value in grown.items()
        if name.startswith(f"{WAYS} ")
    }
    whole = sum(rounds.values())
    return {
        "tau": _ratio(committed, committed - accepted),
        "acceptance_rate": _ratio(accepted, drafted),
        "rounds": int(whole),
        "shares": {way: rounds[way] / whole for way in sorted(rounds) if rounds[way]},
        "prompt_tokens": int(count("prompt_tokens")),
        "prefix_share": _ratio(count("prefix_cache_hits"), count("prefix_cache_queries")),
        "failed_passes": int(count("moa:engine_failures")),
        "compiled": int(count(PROGRAMS)),
    }


def seen_until(seen: Sequence[tuple[float, ServerCounts]], until: float) -> list[ServerCounts]:
    """What was seen until then, at least the first."""
    return [counts for when, counts in seen if when <= until] or [c for _, c in seen[:1]]


def mean_in_use(seen: Sequence[ServerCounts]) -> dict[str, float | None]:
    """Means of what was seen: requests in slots, requests that waited."""
    mean = lambda name: sum(each[name] for each in seen) / len(seen) if seen else None
    return {"slots_in_use": mean("num_requests_running"), "waiting": mean("num_requests_waiting")}


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None
