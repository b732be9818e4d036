"""Checks a complete reply before the client uses any of its content.

Every check raises ConnectionLost for a reply that does not fit its request, as for a failed server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from infer.split_client.link import ConnectionLost, ServerAddress
from infer.split_client.state import AnswerText
from moa_jax.split import protocol
from moa_jax.split.rows import LeafSpec, unpack

SessionRequest = protocol.Open | protocol.Verify | protocol.Read | protocol.Stream


class TokenRows(NamedTuple):
    """Consecutive tokens and the target's rows, checked."""

    start: int  # position of the first token
    tokens: list[int]
    rows: list[Any]


def joined(parts: Iterable[TokenRows], most: int) -> list[TokenRows]:
    """Merges consecutive parts up to `most` tokens each, because every part costs a call."""
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
    """The checked content of a complete reply."""

    tokens: list[int]  # committed by the reply
    done: str  # finish reason after these tokens, or ""
    parts: Sequence[TokenRows] = ()  # for the drafter's caches


def unpacked(
    leaves: Sequence[LeafSpec], server: ServerAddress, part: protocol.Committed, text: Sequence[int]
) -> TokenRows:
    """Decodes a part's rows, with their tokens from the sequence `text`; raises ConnectionLost."""
    try:
        rows = unpack(part.rows, part.count, leaves, server.codec, server.compress)
    except protocol.BadMessage as error:
        raise ConnectionLost(f"the server sent {error}") from error
    return TokenRows(part.start, list(text[part.start : part.start + part.count]), rows)


def known_after(part: protocol.Committed, seq: int, known: int, total: int) -> int:
    """Number of leading rows that the client has after this part of reply `seq`.

    The client had `known` rows before the part; a session has at most `total` rows. Raises
    ConnectionLost for a part of another reply and for rows that leave a gap or do not fit.
    """
    if part.seq != seq:
        raise ConnectionLost(f"the server answered request {part.seq}, not {seq}")
    end = part.start + part.count
    early = part.more and (part.tokens or end <= known)
    if part.start > known or early or end > total:
        raise ConnectionLost("the server sent rows out of place")
    return max(known, end)


def given_text(request: SessionRequest, part: protocol.Committed, text: AnswerText) -> list[int]:
    """The sequence up to the last token that the request gave.

    Raises ConnectionLost for a part with rows of tokens that the request did not give.
    """
    before = [] if isinstance(request, protocol.Open) else text.committed
    given = [*before, *request.tokens]
    if part.start + part.count >= len(given):
        raise ConnectionLost("the server sent rows out of place")
    return given


def check(
    request: SessionRequest, parts: Sequence[protocol.Committed], text: AnswerText, received: int
) -> None:
    """Raises ConnectionLost unless `parts` are a complete reply to `request`.

    The client had `received` rows before the reply.
    """
    tokens = parts[-1].tokens
    whole = [*text.committed, *tokens]
    if isinstance(request, protocol.Read):
        fits = tokens == request.tokens
    elif isinstance(request, protocol.Open):
        fits = len(tokens) == (not request.root_given)
    else:
        fits = 1 <= len(tokens) <= len(request.tokens) + 1
    known = max(received, *(part.start + part.count for part in parts))
    fits = fits and known == len(whole) - 1 and text.end_of(whole) == parts[-1].done
    stopped = not text.stops.isdisjoint(tokens[:-1])
    if not fits or stopped or len(whole) > text.total:
        raise ConnectionLost("the server sent a reply that does not fit the request")


def stream_part(part: protocol.Committed, seq: int, last: int, text: AnswerText) -> CheckedReply:
    """The new tokens of one part of stream `seq`.

    The previous part started at row `last`. After a lost link a server of an earlier release sends
    a stream from its first part, so a part may repeat tokens that the client already has. Raises
    ConnectionLost for an invalid part.
    """
    have = len(text.committed) - part.start - 1
    in_place = part.seq == seq and part.start > last
    new = part.tokens[max(have, 0) :]
    done = text.end_of([*text.committed, *new])
    ends = done == part.done and bool(done) != part.more
    if not in_place or have < 0 or part.count or not part.tokens or (new and not ends):
        raise ConnectionLost("the server sent a part out of place")
    return CheckedReply(new, part.done if new else "")
