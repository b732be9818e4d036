"""Texts whose caches are kept, so that a prompt that begins like one of them is read from there on.

    kept      <system> You are helpful. | <user> What is the time? It is ...
    prompt    <system> You are helpful. | <user> Which day is it?
              \\ copied from the caches / \\ read /

The text that was used longest ago leaves first. Texts need not end together: the longest common
beginning is found by comparing with each of them, and they are few.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from moa_jax.decode.engine.rows import Live

LEAST_REUSED = 16  # tokens; fewer are read as soon


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A text in caches of its own."""

    tokens: np.ndarray  # those that the target's caches hold
    live: Live  # one row
    rows: int  # of its caches

    @functools.cached_property  # all are added up whenever a text is kept
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.live))


class Prefixes:
    """Kept texts, those used last at the end, within so many bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in list(self._kept))  # any thread may ask

    def longest(self, prompt: Sequence[int]) -> tuple[Kept | None, int]:
        """The text with the longest common beginning, and its length; that text counts as used.

        None where that is shorter than LEAST_REUSED: all texts may begin with the same few tokens.
        """
        tokens, found, most = np.asarray(prompt, np.int32), -1, LEAST_REUSED - 1
        for index, kept in enumerate(self._kept):
            common = common_beginning(kept.tokens, tokens)
            if common > most:
                found, most = index, common
        if found < 0:
            return None, 0
        self._kept.append(self._kept.pop(found))
        return self._kept[-1], most

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens are worth being kept: not few, and no kept text begins with them."""
        if not self.most_bytes or len(tokens) < LEAST_REUSED:
            return False
        tokens = np.asarray(tokens, np.int32)
        return not any(common_beginning(kept.tokens, tokens) == len(tokens) for kept in self._kept)

    def keep(self, kept: Kept) -> None:
        """Keeps a text in place of those that it begins with; one that is too large is let go."""
        if kept.num_bytes > self.most_bytes:
            return
        self._kept = [
            other
            for other in self._kept
            if common_beginning(other.tokens, kept.tokens) < len(other.tokens)
        ]
        self._kept.append(kept)
        while self.num_bytes > self.most_bytes:
            self._kept.pop(0)

    def clear(self) -> None:
        self._kept = []


def common_beginning(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens are the same from the first on."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
