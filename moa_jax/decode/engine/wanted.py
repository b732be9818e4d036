"""Which programs an engine has made next, one at a time and the most useful first.

Whoever asks again hears of other programs, for the load has changed: so there is no line of old
wishes in which a new one would wait.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence

from moa_jax.config import DraftShape
from moa_jax.decode.engine.rows import Kind, kind_of
from moa_jax.decode.engine.seats import Seats
from moa_jax.decode.engine.shelf import Shelf, Size
from moa_jax.decode.session import GREEDY

Making = functools.partial[None]  # of a program, or of a few


def name_of(making: Making) -> Hashable:
    """The same for the same programs."""
    return (making.func.__name__, *making.args)


def wanted_now(shelf: Shelf, seats: Seats, coming: int) -> Iterator[Making]:
    """What would serve those better who sit, and `coming` more who want a seat."""
    wanted, grown = seats.wishes(coming)
    kind, ways = seats.kind, shelf.ways_for(wanted.slots)
    yield from _size(shelf, wanted, kind)
    yield from _calls(shelf, wanted, ways[1:2], kind)
    yield from _size(shelf, grown, kind)
    yield from _calls(shelf, wanted, ways[2:], kind)
    yield from _reading(shelf, wanted.rows, kind)


def wanted_soon(shelf: Shelf) -> Iterator[Making]:
    """What those will want who come next: one, many, some; and then longer texts."""
    greedy, (rows, *longer) = kind_of(GREEDY), shelf.rows
    alone, *more = [Size(slots, rows) for slots in shelf.slots]
    sizes = [alone, *more[-1:], *more[:-1]]
    for size in sizes:
        yield from _size(shelf, size, greedy)
        yield from _calls(shelf, size, shelf.ways_for(size.slots)[1:2], greedy)
        if size == sizes[:2][-1]:
            yield from _calls(shelf, alone, shelf.ways_for(1)[:1], kind_of(GREEDY, likely=True))
            yield functools.partial(shelf.make_score, rows)
    yield from _reading(shelf, rows, greedy)
    yield from _calls(shelf, alone, shelf.ways_for(1), greedy)
    for size in (size._replace(rows=next) for next in longer[:1] for size in sizes):
        yield from _size(shelf, size, greedy)


def _size(shelf: Shelf, size: Size, kind: Kind) -> Iterator[Making]:
    """In parts, so that what is wanted more meanwhile need not wait for all."""
    yield functools.partial(shelf.make_rows, size.rows)
    yield functools.partial(shelf.make_state, size)
    yield functools.partial(shelf.make_size, size, kind)


def _calls(shelf: Shelf, size: Size, ways: Sequence[DraftShape], kind: Kind) -> Iterator[Making]:
    yield from (functools.partial(shelf.make_call, size, way, kind) for way in ways)


def _reading(shelf: Shelf, rows: int, kind: Kind) -> Iterator[Making]:
    yield from (functools.partial(shelf.make_read, rows, chunk) for chunk in shelf.chunks)
    yield functools.partial(shelf.make_first, rows, kind)
