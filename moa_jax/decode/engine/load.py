"""What an engine does at the moment and what it has done, in figures for people and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from moa_jax.config import DraftShape


class Load(NamedTuple):
    """What an engine does at the moment, and what it has done since it began."""

    running: int  # requests that are read or decoded
    waiting: int
    slots: int
    rows_used: float  # share of the rows that all slots may have, by those who are running
    kept_bytes: int  # of texts for prompts that begin alike; whoever needs it gets their room
    prompt_tokens: int
    generated_tokens: int
    drafts: int  # rounds of a row that drafted
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_position: tuple[int, ...]
    rounds_by_way: dict[DraftShape, int]  # of whole batches
    prefix_lookups: int
    prefix_lookup_tokens: int  # of prompts that were looked up
    prefix_hits: int
    prefix_tokens: int  # that were not read again
    finished: dict[str, int]  # requests by how they ended
    failures: int  # of passes
    compiled: int  # programs


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


class Totals:
    """What has been done; the engine's thread counts, and any thread may read it."""

    def __init__(self, most_drafts: int) -> None:
        """`most_drafts` is how many drafted tokens of a row a round may accept."""
        self.counts = Counter[str]()
        self.finished = Counter[str]()
        self.rounds = Counter[DraftShape]()
        self._accepted = [0] * most_drafts

    def count(self, rounds: Iterable[tuple[int, int]]) -> None:
        """Counts rounds of a row, by how many tokens were committed and drafted."""
        for committed, drafted in rounds:
            if drafted:
                self.counts["drafts"] += 1
                self.counts["drafted_tokens"] += drafted
                for position in range(committed - 1):
                    self._accepted[position] += 1

    def load(self, **now: Any) -> Load:
        """All of it, with what is so just now."""
        return Load(
            accepted_tokens=sum(self._accepted),
            accepted_by_position=tuple(self._accepted),
            rounds_by_way=dict(self.rounds),
            finished=dict(self.finished),
            **{name: self.counts[name] for name in COUNTED},
            **now,
        )
