"""Checks of replies: nothing in a reply counts before all of it was checked.

Each function raises Lost for a reply that does not fit: a server that sends one is of no use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from infer.split.client.state import AnswerText
from infer.split.link import Lost, ServerAddress
from moa_jax.split import wire
from moa_jax.split.rows import LeafSpec, unpack

SessionRequest = wire.Open | wire.Verify | wire.Read | wire.Stream


class TokenRows(NamedTuple):
    """Consecutive tokens with the target's rows, checked."""

    start: int  # position of the first token
    tokens: list[int]
    rows: list[Any]


def joined(parts: Iterable[TokenRows], most: int) -> list[TokenRows]:
    """Parts that follow each other as one of at most `most` tokens, for each costs a call."""
    groups: list[list[TokenRows]] = []
    end = count = 0
    for part in parts:
        size = len(part.tokens)
        if groups and part.start == end and count + size <= most:
            groups[-1].append(part)
            count += size
        else:
            groups.append([part])
            count = size
        end = part.start + size
    return [_one_of(group) for group in groups]


def _one_of(parts: Sequence[TokenRows]) -> TokenRows:
    tokens = [token for part in parts for token in part.tokens]
    leaves = zip(*(part.rows for part in parts), strict=True)
    return TokenRows(parts[0].start, tokens, [np.concatenate(leaf) for leaf in leaves])


class CheckedReply(NamedTuple):
    """The contents of a whole reply, checked."""

    tokens: list[int]  # committed by the reply
    done: str  # why the answer ends with them, or ""
    kept: bool = False  # the request gave these tokens; the target did not choose them
    parts: Sequence[TokenRows] = ()  # for the drafter's caches


def unpacked(
    leaves: Sequence[LeafSpec], server: ServerAddress, part: wire.Committed, text: Sequence[int]
) -> TokenRows:
    """The rows that a server sent in a part, and their tokens taken from `text`; raises Lost."""
    try:
        rows = unpack(part.rows, part.count, leaves, server.codec, server.compress)
    except wire.BadMessage as error:
        raise Lost(f"the server sent {error}") from error
    return TokenRows(part.start, list(text[part.start : part.start + part.count]), rows)


def known_after(part: wire.Committed, seq: int, known: int, total: int) -> int:
    """Number of leading rows that the client knows once it has this part of reply `seq`.

    It knew `known` rows before; a session holds `total` at most. Raises Lost for a gap.
    """
    if part.seq != seq:
        raise Lost(f"the server answered request {part.seq}, not {seq}")
    end = part.start + part.count
    early = part.more and (part.tokens or end <= known)
    if part.start > known or early or end > total:
        raise Lost("the server sent rows out of place")
    return max(known, end)


def given_text(request: SessionRequest, part: wire.Committed, text: AnswerText) -> list[int]:
    """The text up to the last token that the request gave.

    Raises Lost for a part with rows of tokens that the request did not give.
    """
    before = [] if isinstance(request, wire.Open) else text.settled
    given = [*before, *request.tokens]
    if part.start + part.count >= len(given):
        raise Lost("the server sent rows out of place")
    return given


def check(
    request: SessionRequest, parts: Sequence[wire.Committed], text: AnswerText, received: int
) -> None:
    """Raises Lost unless these parts are a whole reply to `request`.

    The client had `received` rows before them.
    """
    tokens = parts[-1].tokens
    whole = [*text.settled, *tokens]
    if isinstance(request, wire.Read):
        fits = tokens == request.tokens
    elif isinstance(request, wire.Open):
        fits = len(tokens) == (not request.root_given)
    else:
        fits = 1 <= len(tokens) <= len(request.tokens) + 1
    known = max(received, *(part.start + part.count for part in parts))
    fits = fits and known == len(whole) - 1 and text.end_of(whole) == parts[-1].done
    stopped = not text.stops.isdisjoint(tokens[:-1])
    if not fits or stopped or len(whole) > text.total:
        raise Lost("the server sent a reply that does not fit the request")


def stream_part(part: wire.Committed, seq: int, last: int, text: AnswerText) -> CheckedReply:
    """The new tokens of one part of stream `seq`.

    The part before began at row `last`. After a lost link a stream starts again from its first
    part, so a part may bring tokens that are here already. Raises Lost.
    """
    have = len(text.settled) - part.start - 1
    in_place = part.seq == seq and part.start > last
    new = part.tokens[max(have, 0) :]
    done = text.end_of([*text.settled, *new])
    ends = done == part.done and bool(done) != part.more
    if not in_place or have < 0 or part.count or not part.tokens or (new and not ends):
        raise Lost("the server sent a part out of place")
    return CheckedReply(new, part.done if new else "")
