"""Lays out examples in rows of tokens: packed side by side, or one per row.

Rows are laid out one block of examples at a time, so memory does not grow with the data, and rows
on disk equal those in memory.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from moa_jax.data.batch import Batch
from moa_jax.data.chat import Example

BLOCK = 8192  # examples


def blocks(
    examples: Iterable[Example],
    packed: bool,
    row_length: int,
    pad_id: int,
    longest_first: bool = False,
) -> Iterator[Batch]:
    """Yield rows (R, row_length) per `BLOCK` examples, from `pack` or `pad`."""
    examples = iter(examples)
    lay_out = partial(pack, longest_first=longest_first) if packed else pad
    while block := list(itertools.islice(examples, BLOCK)):
        yield lay_out(block, row_length, pad_id)


def pack(
    examples: Sequence[Example], row_length: int, pad_id: int = 0, longest_first: bool = False
) -> Batch:
    """Pack whole examples side by side into few rows (R, row_length), each its own segment.

    Best fit, in the given order or by decreasing length: each example goes to the fullest row with
    enough room. The result is deterministic. An example longer than a row is truncated.
    """
    if longest_first:
        examples = sorted(examples, key=lambda example: -len(example.tokens_T))
    row_of: list[int] = []
    rooms: list[tuple[int, int]] = []  # (free positions, row), sorted
    num_rows = 0
    for example in examples:
        length = min(len(example.tokens_T), row_length)
        place = bisect.bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:
            room, row, num_rows = row_length, num_rows, num_rows + 1
        row_of.append(row)
        if room > length:
            bisect.insort(rooms, (room - length, row))
    return _lay(examples, row_of, num_rows, row_length, pad_id)


def pad(examples: Sequence[Example], row_length: int, pad_id: int = 0) -> Batch:
    """Put each example into its own row (R, row_length); longer examples are truncated."""
    return _lay(examples, range(len(examples)), len(examples), row_length, pad_id)


def empty(num_rows: int, row_length: int, pad_id: int) -> Batch:
    """Rows (R, row_length) of padding only."""
    shape = (num_rows, row_length)
    return Batch(
        tokens_BT=np.full(shape, pad_id, np.int32),
        segment_BT=np.zeros(shape, np.int32),
        position_BT=np.zeros(shape, np.int32),
        response_BT=np.zeros(shape, bool),
    )


def _lay(
    examples: Sequence[Example],
    row_of: Sequence[int],
    num_rows: int,
    row_length: int,
    pad_id: int,
) -> Batch:
    """Append example `i` to row `row_of[i]`."""
    rows = empty(num_rows, row_length, pad_id)
    used, segments = np.zeros(num_rows, int), np.zeros(num_rows, int)
    for example, row in zip(examples, row_of, strict=True):
        length = min(len(example.tokens_T), row_length)
        here = slice(used[row], used[row] + length)
        used[row] += length
        segments[row] += 1
        rows.tokens_BT[row, here] = example.tokens_T[:length]
        rows.segment_BT[row, here] = segments[row]
        rows.position_BT[row, here] = np.arange(length)
        rows.response_BT[row, here] = example.response_T[:length]
    return rows
