"""Several ways to do the same work, measured side by side: whose turn it is.

    question    0          1          2
    ways        a b c      b c a      c a b

Machines grow warm and get other work. In turns, such drift hits all ways alike, and no way always
comes first. Compilation and warm-up come first and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class Turn(NamedTuple):
    """One way does the work of one question."""

    question: int
    way: int
    is_counted: bool  # False while warming up


def in_turns(
    num_ways: int, num_questions: int, repeats: int = 1, *, warm_up: bool = True
) -> Iterator[Turn]:
    """Yield the turns of all ways at all questions, `repeats` times.

    Every question goes through all ways before the next one comes, another way first each time.
    `warm_up` adds a first time that is not counted.
    """
    for time in range(-1 if warm_up else 0, repeats):
        for question in range(num_questions):
            for way in rotated(range(num_ways), time + question):
                yield Turn(question, way, is_counted=time >= 0)


def rotated(ways: Sequence[Item], index: int) -> list[Item]:
    """The ways in the order of the index-th time: each begins once in `len(ways)` times."""
    first = index % len(ways)
    return [*ways[first:], *ways[:first]]
