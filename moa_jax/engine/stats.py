"""Counters and gauges of an engine, for metrics."""

from __future__ import annotations

from typing import NamedTuple

from moa_jax.config import DraftShape


class EngineStats(NamedTuple):
    """A snapshot of an engine; counts begin with the engine."""

    running: int  # requests with a slot
    waiting: int
    slots: int  # requests that run at once at most
    cache_usage: float  # running requests' share of the cache rows of `slots` slots
    kept_bytes: int  # of free slots that hold tokens
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0  # drafted rounds, counted per row
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    rounds_by_shape: dict[DraftShape, int] = {}  # counted per batch
    prefix_lookup_tokens: int = 0  # prompt tokens that might have been reused
    prefix_tokens: int = 0  # prompt tokens that were reused
    finished: dict[str, int] = {}  # requests by finish reason
    failures: int = 0  # steps that failed, and requests with NaN
    programs: int = 0  # compiled
