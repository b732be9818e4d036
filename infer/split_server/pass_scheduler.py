"""Schedules a shared target: passes that verify drafts, and chunks of prompts between the passes.

    prompts   A1 B      A2 C         A3 D         A4 ...          A is long, B, C and D are short
    answers       pass      pass         pass         pass

A step is at least one chunk of a prompt, then one pass for the sequences with a pending draft. So a
long prompt delays an answer by one chunk per pass, and another prompt by every other chunk. A step
has several chunks only if more prompts can be prefilled than answers are in progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MOST_CHUNKS = 4  # of prompts, from one pass to the next
SHORTEST = (
    4  # a chunk counts as at least this fraction of the largest chunk, since it costs as much
)
MOST_PADDING = 4  # a pass pads a row to at most this multiple of the row's width


class PrefillChunk(NamedTuple, Generic[T]):
    """The next chunk of a prompt."""

    of: T  # the sequence


class DecodePass(NamedTuple, Generic[T]):
    """A pass of the target for several sequences."""

    rows: list[T]


class PassScheduler(Generic[T]):
    """Decides what a target computes next, and which sequences a failure affects.

    The caller runs the chunks and passes, and supplies the queues as functions, oldest first:

    prompts       sequences with prompt tokens that can be prefilled now
    left          number of prompt tokens of a sequence that are not prefilled
    queue_sizes   number of prompts that can be prefilled, and of answers in progress
    answers       sequences that can be decoded now
    has_state     sequences with rows in the state that a pass updates
    width         tokens of a sequence in a pass, which pads all rows to the widest row
    """

    def __init__(
        self,
        *,
        prompts: Callable[[], Sequence[T]],
        left: Callable[[T], int],
        queue_sizes: Callable[[], tuple[int, int]],
        answers: Callable[[], Sequence[T]],
        has_state: Callable[[], Iterable[T]],
        chunk: int,
        most_rows: int,
        width: Callable[[T], int] = lambda row: 1,
    ) -> None:
        """A chunk has at most `chunk` tokens, a pass at most `most_rows` rows."""
        self._prompts, self._left, self._queue_sizes = prompts, left, queue_sizes
        self._answers, self._has_state, self._width = answers, has_state, width
        self._chunk, self._most_rows = chunk, most_rows
        self._picker = PromptPicker()
        self._budget = 0  # prompt tokens until the next pass
        self._at_work: Sequence[T] = ()

    def schedule(self) -> Iterator[PrefillChunk[T] | DecodePass[T]]:
        """Yields the chunks of a step, then its pass; nothing if no sequence can be processed.

        The caller runs each of them before it takes the next.
        """
        self._budget = chunks_between(*self._queue_sizes()) * self._chunk
        while self._budget > 0 and (prompts := self._prompts()):
            self._at_work = [self._picker.next(prompts, self._left)]
            yield PrefillChunk(self._at_work[0])
        self._at_work = self._answers()
        if self._at_work:
            self._at_work = rows = self._of_similar_width(self._at_work)
            yield DecodePass(rows)
        self._at_work = ()

    def on_chunk_done(self, tokens: int) -> None:
        """Takes the size of the last chunk from the budget: short chunks replace a long one."""
        self._budget -= max(tokens, self._chunk // SHORTEST, 1)

    def affected(self, state_is_lost: bool) -> list[T]:
        """The sequences to fail after an exception.

        These are the sequences of the failed chunk or pass, and all if the batch state is lost.
        """
        lost = [*self._at_work, *(self._has_state() if state_is_lost else ())]
        self._at_work = ()
        return list({id(one): one for one in lost}.values())

    def _of_similar_width(self, answers: Sequence[T]) -> list[T]:
        """The oldest sequence and those of similar width; a much wider row gets its own pass."""
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
    """Number of chunks between two passes: more than one if more prompts wait than answers run."""
    return min(max(1, prompts // max(1, answers)), MOST_CHUNKS)


class PromptPicker:
    """Picks the prompt of the next chunk: the oldest and the shortest alternate.

    With the oldest alone, short prompts would wait for long ones; with the shortest alone, a long
    prompt might wait forever. A pick does not count if the oldest prompt is also the shortest:
    otherwise a lone prompt of two chunks would give every later pick to the shortest.
    """

    def __init__(self) -> None:
        self._oldest_is_next = True

    def next(self, prompts: Sequence[T], left: Callable[[T], int]) -> T:
        """The prompt of the next chunk; `left` is the number of unread tokens of a prompt."""
        oldest, shortest = prompts[0], min(prompts, key=left)
        if oldest is shortest:
            return oldest
        self._oldest_is_next = not self._oldest_is_next
        return shortest if self._oldest_is_next else oldest
