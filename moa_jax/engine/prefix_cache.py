"""The slots of an engine's state, which are also its prefix cache.

    slot 0   <system> You are helpful. | <user> What is the time? ...     in use
    slot 1   <system> You are helpful. | <user> Which day is it? ...      free, tokens kept
    slot 2                                                                free, empty

A request continues a free slot if its prompt begins with all tokens of the slot, as the next turn
of a chat does. Otherwise the request gets an empty slot, or else the least recently used free one,
and the longest prefix that its prompt shares with any slot, in use or free, is copied there. A slot
with more tokens than a sliding window may have lost rows of a prefix, which is computed again then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from moa_jax.decode.slots import Usable, common_prefix

# Tokens of the smallest chunk, and of the shortest prefix that is reused. Fewer take as long: a
# pass reads all weights (5 ms for an 8B model on an H100), and matrix units multiply 16 rows.
LEAST_CHUNK = 16


class Assignment(NamedTuple):
    """The slot of a request; it gets the first `num_cached` tokens of the prompt from `source`."""

    slot: int
    source: int
    num_cached: int


class SlotTable:
    """The slots, and the tokens that each of them holds."""

    def __init__(self, num_slots: int, reuses: bool, usable: Usable = common_prefix) -> None:
        """Without `reuses` free slots hold no tokens; `usable` is `Session.usable_prefix`."""
        # `written` has the tokens that the host knows of slots in use.
        self.reuses, self._usable, self._in_use, self.written = reuses, usable, set[int](), {}
        # The least recently used slot comes first.
        self._tokens = {slot: np.zeros(0, np.int32) for slot in range(num_slots)}

    @property
    def num_kept(self) -> int:
        """Free slots that hold tokens."""
        held = [slot for slot, tokens in list(self._tokens.items()) if len(tokens)]
        return len({*held} - self._in_use)

    def free(self) -> list[int]:
        """Free slots in order of use: empty slots first, then the least recently used."""
        free = [slot for slot in self._tokens if slot not in self._in_use]
        return sorted(free, key=lambda slot: len(self._tokens[slot]) > 0)

    def shortest(self) -> list[int]:
        """All slots, those with the fewest tokens first."""
        return sorted(self._tokens, key=lambda slot: len(self._tokens[slot]))

    def assign(self, prompt: Sequence[int], may_reuse: bool = True) -> Assignment:
        """Takes a free slot for a prompt.

        The prompt's last token is always computed, since its logits give the first new token.
        Without `may_reuse` the whole prompt is computed.
        """
        wanted = np.asarray(prompt[:-1] if may_reuse else (), np.int32)
        usable = lambda slot, held: self._usable(held, wanted, self.written.get(slot, len(held)))
        common = {slot: usable(slot, held) for slot, held in self._tokens.items()}
        order = lambda slot: (common[slot], slot not in self._in_use, -len(self._tokens[slot]))
        source = max(common, key=order)
        target, num_cached = self.free()[0], common[source]
        if num_cached < LEAST_CHUNK:
            source, num_cached = target, 0
        self._touch(source)
        if source not in self._in_use and num_cached == len(self._tokens[source]):
            target = source
        self._in_use.add(target)
        self._tokens[target] = wanted[:num_cached]
        self._touch(target)
        return Assignment(target, source, num_cached)

    def hold(self, slot: int, tokens: Sequence[int]) -> None:
        """Records the tokens that a slot in use holds."""
        if self.reuses:
            self._tokens[slot] = np.asarray(tokens, np.int32)

    def release(self, slot: int) -> None:
        """Frees a slot, which keeps its tokens."""
        self._in_use.remove(slot)
        self._touch(slot)

    def forget(self, slots: Iterable[int]) -> None:
        """Drops the tokens of slots."""
        for slot in slots:
            self._tokens[slot] = np.zeros(0, np.int32)

    def clear(self) -> None:
        """Drops the tokens of all slots."""
        self.forget(self._tokens)

    def _touch(self, slot: int) -> None:
        self._tokens[slot] = self._tokens.pop(slot)
