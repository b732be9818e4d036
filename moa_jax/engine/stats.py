"""Counters of an engine, and a snapshot of them for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from moa_jax.config import DraftShape


class EngineStats(NamedTuple):
    """A snapshot of an engine; counts begin with the engine."""

    running: int  # requests with a slot
    waiting: int
    slots: int  # requests that run at once at most
    cache_usage: float  # running requests' share of the cache rows of `slots` slots
    kept_bytes: int  # of free slots that hold tokens
    prompt_tokens: int
    generated_tokens: int
    drafts: int  # drafted rounds, counted per row
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    rounds_by_shape: dict[DraftShape, int]  # counted per batch
    prefix_lookups: int
    prefix_lookup_tokens: int  # prompt tokens of all lookups
    prefix_hits: int
    prefix_tokens: int  # prompt tokens that were reused
    finished: dict[str, int]  # requests by finish reason
    failures: int  # steps that failed, and requests with NaN
    programs: int  # compiled


COUNTED = (
    "prompt_tokens",
    "generated_tokens",
    "drafts",
    "drafted_tokens",
    "prefix_lookups",
    "prefix_lookup_tokens",
    "prefix_hits",
    "prefix_tokens",
    "failures",
)


class Counters:
    """Counts of the engine's thread; any thread may read them."""

    def __init__(self, most_drafts: int) -> None:
        """`most_drafts` is the largest number of drafts that a round of a row may accept."""
        self.counts = Counter[str]()
        self.finished = Counter[str]()
        self.rounds = Counter[DraftShape]()
        self._accepted = [0] * most_drafts

    def count(self, rounds: Iterable[tuple[int, int]]) -> None:
        """Counts rounds of a row; each has the numbers of committed and of drafted tokens."""
        for committed, drafted in rounds:
            if drafted:
                self.counts["drafts"] += 1
                self.counts["drafted_tokens"] += drafted
                for position in range(committed - 1):
                    self._accepted[position] += 1

    def snapshot(self, **now: Any) -> EngineStats:
        """All counts, and `now`, the present gauges."""
        return EngineStats(
            accepted_tokens=sum(self._accepted),
            accepted_by_position=tuple(self._accepted),
            rounds_by_shape=dict(self.rounds),
            finished=dict(self.finished),
            **{name: self.counts[name] for name in COUNTED},
            **now,
        )
