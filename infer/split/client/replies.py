"""What a reply must be to be taken in: all of it is checked before anything of it counts.

Each function raises Lost for what does not fit, for such a server is as good as no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from infer.split.client.text import Text
from infer.split.link import Lost, Server
from moa_jax.split import wire
from moa_jax.split.rows import LeafSpec, unpack

Request = wire.Open | wire.Draft | wire.Read | wire.Stream


class Part(NamedTuple):
    """Tokens and the target's rows of them, checked."""

    start: int
    tokens: list[int]
    rows: list[Any]


class Reply(NamedTuple):
    """What a whole reply brings, checked."""

    tokens: list[int]  # that it commits
    done: str  # whether and why the answer ends with them
    kept: bool = False  # they are those that the request gave
    parts: Sequence[Part] = ()  # for the caches


class Unpacker(NamedTuple):
    """How rows of one server travel."""

    leaves: Sequence[LeafSpec]
    server: Server | None  # None: there will be no rows

    def part(self, part: wire.Verdict, text: Sequence[int]) -> Part:
        """A part's tokens, which stand in this text, and their rows."""
        codec, compress = self.server.codec, self.server.compress
        try:
            rows = unpack(part.rows, part.count, self.leaves, codec, compress)
        except wire.BadMessage as error:
            raise Lost(f"the server sent {error}") from error
        return Part(part.start, list(text[part.start : part.start + part.count]), rows)


def row_after(part: wire.Verdict, seq: int, known: int, total: int) -> int:
    """The row up to which all are here with this part of reply `seq`, before it `known` were."""
    if part.seq != seq:
        raise Lost(f"the server answered request {part.seq}, not {seq}")
    end = part.start + part.count
    early = part.more and (part.tokens or end <= known)
    if part.start > known or early or end > total:
        raise Lost("the server sent rows out of place")
    return max(known, end)


def given_text(request: Request, part: wire.Verdict, text: Text) -> list[int]:
    """The text whose last tokens the request gave; the part has rows of these alone."""
    before = [] if isinstance(request, wire.Open) else text.settled
    given = [*before, *request.tokens]
    if part.start + part.count >= len(given):
        raise Lost("the server sent rows out of place")
    return given


def check(request: Request, verdicts: Sequence[wire.Verdict], text: Text, received: int) -> None:
    """Raise Lost where all parts of a reply, before which `received` rows were here, are none to
    this request."""
    tokens = verdicts[-1].tokens
    whole = [*text.settled, *tokens]
    if isinstance(request, wire.Read):
        fits = tokens == request.tokens
    elif isinstance(request, wire.Open):
        fits = len(tokens) == (not request.root_given)
    else:
        fits = 1 <= len(tokens) <= len(request.tokens) + 1
    known = max(received, *(part.start + part.count for part in verdicts))
    fits = fits and known == len(whole) - 1 and text.end_of(whole) == verdicts[-1].done
    stopped = not text.stops.isdisjoint(tokens[:-1])
    if not fits or stopped or len(whole) > text.total:
        raise Lost("the server sent a reply that does not fit the request")


def streamed(part: wire.Verdict, seq: int, last: int, text: Text) -> Reply:
    """The new tokens of a part of stream `seq`, whose part before began at row `last`; none if
    all of them are here: after a lost link all parts come again."""
    have = len(text.settled) - part.start - 1
    in_place = part.seq == seq and part.start > last
    new = part.tokens[max(have, 0) :]
    done = text.end_of([*text.settled, *new])
    ends = done == part.done and bool(done) != part.more
    if not in_place or have < 0 or part.count or not part.tokens or (new and not ends):
        raise Lost("the server sent a part out of place")
    return Reply(new, part.done if new else "")
