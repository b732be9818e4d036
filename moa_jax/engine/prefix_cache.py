"""The slots of an engine's state, which are also its prefix cache.

    slot 0   <system> You are helpful. | <user> What is the time? ...     in use
    slot 1   <system> You are helpful. | <user> Which day is it? ...      free, tokens kept
    slot 2                                                                free, empty

A request continues a free slot if its prompt begins with all tokens of the slot, as the next turn
of a chat does. Otherwise the request gets the least recently used free slot, and the longest prefix
that its prompt shares with any slot, in use or free, is copied there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_REUSED = 16  # tokens; prefill of fewer tokens takes no longer than a copy


@dataclasses.dataclass
class Slot:
    """One row of the state."""

    tokens: np.ndarray  # that its caches hold
    in_use: bool = False
    used_at: int = 0  # order of use


class Assignment(NamedTuple):
    """The slot of a request; it gets the first `num_cached` tokens of the prompt from `source`."""

    slot: int
    source: int
    num_cached: int


class SlotTable:
    """The slots, and the tokens that each of them holds."""

    def __init__(self, num_slots: int, reuses: bool) -> None:
        """Without `reuses` free slots hold no tokens."""
        self.reuses, self._clock = reuses, 0
        self._slots = [Slot(np.zeros(0, np.int32)) for _ in range(num_slots)]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Slots that are not in use."""
        return sum(not slot.in_use for slot in self._slots)

    @property
    def num_kept(self) -> int:
        """Free slots that hold tokens."""
        return sum(not slot.in_use and len(slot.tokens) > 0 for slot in list(self._slots))

    def free(self) -> list[int]:
        """Free slots in order of use: empty slots first, then the least recently used."""
        free = [index for index, slot in enumerate(self._slots) if not slot.in_use]
        of = self._slots
        return sorted(free, key=lambda index: (len(of[index].tokens) > 0, of[index].used_at))

    def assign(self, prompt: Sequence[int], may_reuse: bool = True) -> Assignment:
        """Takes a free slot for a prompt.

        The prompt's last token is always computed, since its logits give the first new token.
        Without `may_reuse` the whole prompt is computed.
        """
        wanted = np.asarray(prompt[:-1] if may_reuse else (), np.int32)
        common = [common_prefix(slot.tokens, wanted) for slot in self._slots]
        source = max(range(len(common)), key=lambda i: (common[i], not self._slots[i].in_use))
        target, num_cached = self.free()[0], common[source]
        if num_cached < LEAST_REUSED:
            source, num_cached = target, 0
        kept = self._slots[source]
        self._touch(kept)
        if not kept.in_use and num_cached == len(kept.tokens):
            target = source
        slot = self._slots[target]
        slot.in_use, slot.tokens = True, wanted[:num_cached]
        self._touch(slot)
        return Assignment(target, source, num_cached)

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        """Records the tokens that a slot in use holds."""
        if self.reuses:
            self._slots[slot].tokens = np.asarray(tokens, np.int32)

    def release(self, slot: int) -> None:
        """Frees a slot, which keeps its tokens."""
        self._slots[slot].in_use = False
        self._touch(self._slots[slot])

    def forget(self, slots: Sequence[int]) -> None:
        """Drops the tokens of slots."""
        for slot in slots:
            self._slots[slot].tokens = np.zeros(0, np.int32)

    def clear(self) -> None:
        """Drops the tokens of all slots."""
        self.forget(range(len(self._slots)))

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.used_at = self._clock


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """The length of the longest common prefix."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
