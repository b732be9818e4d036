"""What a target that many ask does next: passes for answers, and chunks of prompts between them.

The engine and the split server both work in such turns:

    answers   pass      pass         pass         pass
    prompts        A1 B      A2 C         A3 D         A4 ...      A is long, B, C and D are short

A turn is one pass for those whose answers are under way, then at least one chunk of a prompt. So a
long prompt delays an answer by a chunk or a few, and another prompt by every other chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_CHUNKS = 4  # of prompts, from one pass to the next


def chunks_between(prompts: int, answers: int) -> int:
    """How many chunks follow a pass for `answers`: more than one where more prompts wait."""
    return min(max(1, prompts // max(1, answers)), MOST_CHUNKS)


class Order:
    """Whose chunk is read next: the oldest prompt's and the shortest's, by turns.

    The first alone would let short prompts wait for long ones, and the second long ones for ever.
    It is nobody's turn where these two are the same prompt: otherwise whoever reads its second of
    two chunks alone, for want of seats, would give every choice that follows to the shortest.
    """

    def __init__(self) -> None:
        self._oldest_is_next = True

    def next(self, prompts: Sequence[T], left: Callable[[T], int]) -> T:
        """One of these prompts, the oldest first, of which so many tokens are left to read."""
        oldest, shortest = prompts[0], min(prompts, key=left)
        if oldest is shortest:
            return oldest
        self._oldest_is_next = not self._oldest_is_next
        return shortest if self._oldest_is_next else oldest
