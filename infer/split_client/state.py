"""Shared state of the client: options, the sequence of one answer, and counters.

prompt | verified ............ root | tail, `unverified`
`committed` ....................... | drafted without a link; may be rewritten
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from moa_jax.config import DraftShape

Policy = Literal["keep", "verify"]  # for tokens that were drafted without a link


@dataclasses.dataclass(frozen=True)
class ClientOptions:
    """Options for drafting and for the behavior without a link."""

    shape: DraftShape | None = None  # of a draft tree; None drafts chains
    lengths: tuple[int, ...] = (1, 2, 3, 5, 7, 11, 15)  # candidate levels; () drafts nothing
    draft_ahead: bool = True
    policy: Policy = "verify"
    patience: float = 60.0  # longest wait (s) for a reply of a live server; slots may be full
    reconnect_seconds: float = 30.0  # longest wait of a finished, unverified answer for a link
    slowdown: float = 1.0  # factor on the drafting time, to emulate a slower device
    stream: bool = False  # the target decodes alone, as in an API; needs empty `lengths`

    @property
    def levels(self) -> tuple[int, ...]:
        """Candidate draft depths; a tree has only two, because each depth is a program."""
        if self.shape is None:
            return self.lengths
        most = self.shape.depth - 1
        return tuple(sorted({max(1, most // 2), most}))

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """The candidate draft trees."""
        if self.shape is None:
            return ()
        return tuple(dataclasses.replace(self.shape, depth=1 + level) for level in self.levels)


@dataclasses.dataclass
class Counts:
    """Counters and times of one answer."""

    rounds: int = 0  # drafts that the server verified
    drafted: int = 0  # draft tokens
    ahead: int = 0  # rounds with a draft made ahead
    prompts: int = 0  # prefills of given tokens on the server: the prompt, and replays
    drops: int = 0  # lost links
    rewritten: int = 0  # unverified tokens that the target replaced
    drafting_s: float = 0.0
    waiting_s: float = 0.0  # for replies, with nothing left to draft
    alone_s: float = 0.0  # without a link
    bytes_up: int = 0  # of messages; set when the answer has ended
    bytes_down: int = 0
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    round_trips_s: list[float] = dataclasses.field(default_factory=list)


class AnswerEvent(NamedTuple):
    """A change of the answer's length, or of the link."""

    verified: int  # leading answer tokens that will not change, including kept ones
    notice: str = ""  # about the link


class AnswerText:
    """The tokens of a prompt and its answer, independent of links and drafters."""

    def __init__(self, prompt: Sequence[int], total: int, stop_ids: Sequence[int]) -> None:
        """`total` limits the tokens of prompt and answer together."""
        self.prompt, self.total, self.stops = list(prompt), total, frozenset(stop_ids)
        self.committed, self.unverified = list(prompt), []
        self.kept = [False] * len(prompt)  # per settled token: kept without verification

    @property
    def whole(self) -> list[int]:
        """Prompt, answer and tail."""
        return [*self.committed, *self.unverified]

    @property
    def answer(self) -> list[int]:
        """The answer so far, including the unverified tokens."""
        return self.whole[len(self.prompt) :]

    @property
    def num_unverified(self) -> int:
        """Number of answer tokens that the target has not chosen."""
        return sum(self.kept) + len(self.unverified)

    @property
    def room(self) -> int:
        """Number of further tokens that fit after the committed tokens."""
        return self.total - len(self.committed)

    @property
    def is_written(self) -> bool:
        """Whether the answer ends with the current tail."""
        return bool(self.end_of(self.whole))

    def end_of(self, tokens: Sequence[int]) -> str:
        """The finish reason after these tokens: "stop", "length", or "" if the answer goes on.

        `tokens` start with the prompt.
        """
        if len(tokens) > len(self.prompt) and tokens[-1] in self.stops:
            return "stop"
        return "length" if len(tokens) >= self.total else ""

    def settle(self, tokens: Sequence[int], *, kept: bool = False) -> None:
        """Appends tokens that will not change; `kept` marks unverified tokens."""
        self.committed += tokens
        self.kept += [kept] * len(tokens)

    def write(self, tokens: Sequence[int]) -> None:
        """Appends to the unverified tokens, up to the first stop token or the limit."""
        for token in tokens:
            if self.is_written:
                return
            self.unverified.append(token)

    def keep_tail(self) -> None:
        """Settles the unverified tokens without verification."""
        self.settle(self.unverified, kept=True)
        self.unverified = []

    def differs(self, tokens: Sequence[int]) -> bool:
        """Whether the target's tokens contradict the unverified tokens."""
        return self.unverified[: len(tokens)] != list(tokens[: len(self.unverified)])

    def replace_tail(self, tokens: Sequence[int]) -> int:
        """Removes the target's tokens from the front of the unverified tokens; drops the unverified
        tokens if they differ.

        Returns the number of tail tokens that are rewritten.
        """
        if not self.differs(tokens):
            self.unverified = self.unverified[len(tokens) :]
            return 0
        pairs = zip(self.unverified, tokens, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rewritten = len(self.unverified) - same
        self.unverified = []
        return rewritten

    def cut(self, count: int) -> None:
        """Keeps the first `count` tokens of the answer and settles them."""
        self.keep_tail()
        end = len(self.prompt) + count
        self.committed, self.kept = self.committed[:end], self.kept[:end]

    def event(self, notice: str = "") -> AnswerEvent:
        """The event for the current answer, with a notice."""
        return AnswerEvent(len(self.committed) - len(self.prompt), notice)
