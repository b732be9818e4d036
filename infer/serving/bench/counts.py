"""What a server has counted, read from its /metrics, and what it does while requests come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

SAMPLE_SECONDS = 0.5
WAYS = "moa:rounds"
Counts = Mapping[str, float]  # by name, and name and label where one matters


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


@contextlib.asynccontextmanager
async def watched(client: httpx.AsyncClient) -> AsyncIterator[list[tuple[float, Counts]]]:
    """Looks at the server again and again; the list grows by times and counts."""
    seen: list[tuple[float, Counts]] = []

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


def what_server_did(before: Counts, after: Counts) -> dict[str, Any]:
    """tau, acceptance, shares of ways and of copied prompts between two looks.

    Each round of a row commits its accepted drafts and one token more, and the first token of an
    answer comes with its prompt: so rounds are tokens without first and accepted ones. `shares`
    counts rounds of whole batches.
    """
    grown = _grown(before, after)
    committed = grown("generation_tokens") - grown("time_to_first_token_seconds_count")
    accepted, drafted = (grown(f"spec_decode_num_{what}_tokens") for what in ("accepted", "draft"))
    rounds = {
        name.removeprefix(f"{WAYS} "): grown(name) for name in after if name.startswith(f"{WAYS} ")
    }
    whole = sum(rounds.values())
    return {
        "tau": _ratio(committed, committed - accepted),
        "acceptance_rate": _ratio(accepted, drafted),
        "rounds": int(whole),
        "shares": {way: count / whole for way, count in sorted(rounds.items()) if count},
        "prompt_tokens": int(grown("prompt_tokens")),
        "prefix_share": _ratio(grown("prefix_cache_hits"), grown("prefix_cache_queries")),
        "failed_passes": int(grown("moa:engine_failures")),
        "compiled": int(grown("moa:programs")),
    }


def mean_in_use(seen: Sequence[tuple[float, Counts]], until: float) -> dict[str, float | None]:
    """Means of what was seen until then: requests in slots, requests that waited."""
    kept = [counts for when, counts in seen if when <= until] or [c for _, c in seen[:1]]
    mean = lambda name: sum(c[name] for c in kept) / len(kept) if kept else None  # noqa: E731
    return {"slots_in_use": mean("num_requests_running"), "waiting": mean("num_requests_waiting")}


def _grown(before: Counts, after: Counts) -> Callable[[str], float]:
    return lambda name: after.get(name, 0.0) - before.get(name, 0.0)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None
