"""What a target that many ask does next: passes for answers, and chunks of prompts between them.

The engine and the split server both do what `Turns` says:

    prompts   A1 B      A2 C         A3 D         A4 ...          A is long, B, C and D are short
    answers       pass      pass         pass         pass

A turn is at least one chunk of a prompt, then one pass for those whose answers are under way. So a
long prompt delays an answer by a chunk a pass, and another prompt by every other chunk. There are
a few chunks only where more prompts wait for room that is free than answers are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MOST_CHUNKS = 4  # of prompts, from one pass to the next
SHORTEST = 4  # so many chunks cost what the largest does, however short they are
MOST_PADDING = 4  # a pass pads a row to at most so many times its own width


class Chunk(NamedTuple, Generic[T]):
    """Somebody's prompt is read on by a chunk."""

    of: T


class Advance(NamedTuple, Generic[T]):
    """Answers go on by a pass."""

    rows: list[T]


class Turns(Generic[T]):
    """Decides what a target does next, and who is lost where it fails; drivers do it.

    It asks its driver, by functions, who is there at the moment; the oldest come first:

    prompts   whose prompts can be read on now
    left      how many tokens of somebody's prompt were not read
    crowd     how many prompts could be read side by side, and how many answers are under way
    answers   whose answers can go on now
    begun     whose rows are in the state that a pass works on
    width     how many tokens of somebody a pass works on; all rows are padded to the widest
    """

    def __init__(
        self,
        *,
        prompts: Callable[[], Sequence[T]],
        left: Callable[[T], int],
        crowd: Callable[[], tuple[int, int]],
        answers: Callable[[], Sequence[T]],
        begun: Callable[[], Iterable[T]],
        chunk: int,
        most_rows: int,
        width: Callable[[T], int] = lambda row: 1,
    ) -> None:
        """A chunk has at most `chunk` tokens, a pass at most `most_rows` rows."""
        self._prompts, self._left, self._crowd = prompts, left, crowd
        self._answers, self._begun, self._width = answers, begun, width
        self._chunk, self._most_rows = chunk, most_rows
        self._order = Order()
        self._tokens = 0  # that may be read until the next pass
        self._at_work: Sequence[T] = ()

    def turn(self) -> Iterator[Chunk[T] | Advance[T]]:
        """The next chunks and the pass behind them, each to be done before the next is asked for.

        There is nothing where nobody is there.
        """
        self._tokens = chunks_between(*self._crowd()) * self._chunk
        while self._tokens > 0 and (prompts := self._prompts()):
            self._at_work = [self._order.next(prompts, self._left)]
            yield Chunk(self._at_work[0])
        self._at_work = self._answers()
        if self._at_work:
            self._at_work = rows = self._of_about_one_width(self._at_work)
            yield Advance(rows)
        self._at_work = ()

    def was_read(self, tokens: int) -> None:
        """Hears how large the last chunk was: several short ones take the place of a long one."""
        self._tokens -= max(tokens, self._chunk // SHORTEST, 1)

    def lost(self, with_state: bool) -> list[T]:
        """Who is lost with what has just failed: those at work, and all if the state is gone."""
        lost = [*self._at_work, *(self._begun() if with_state else ())]
        self._at_work = ()
        return list({id(one): one for one in lost}.values())

    def _of_about_one_width(self, answers: Sequence[T]) -> list[T]:
        """The oldest and those who fit to it: a wide row of one has a pass of its own."""
        rows: list[T] = []
        least = most = 0
        for one in answers:
            width = self._width(one)
            low, high = min(least or width, width), max(most, width)
            if high <= MOST_PADDING * low and len(rows) < self._most_rows:
                least, most = low, high
                rows.append(one)
        return rows


def chunks_between(prompts: int, answers: int) -> int:
    """How many chunks lie between passes for `answers`: more than one where more prompts wait."""
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
