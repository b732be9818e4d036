"""What the parts of a client share: its options, the text of one answer, and what that cost.

prompt | verified ............ root | tail
`settled` ........................  | written without a link; may be rewritten
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

from moa_jax.config import DraftShape

Policy = Literal["keep", "verify"]  # what happens to text that was written without a link


@dataclasses.dataclass(frozen=True)
class ClientOptions:
    """How a client drafts, and how it behaves when its link fails."""

    shape: DraftShape | None = None  # of a tree; None drafts chains
    lengths: tuple[int, ...] = (1, 2, 3, 5, 7, 11, 15)  # levels to choose from; () drafts nothing
    draft_ahead: bool = True
    policy: Policy = "verify"
    patience: float = 60.0  # seconds that a live server may take for a reply: slots may be full
    reconnect_seconds: float = 30.0  # how long a finished but unverified answer waits for a link
    slowdown: float = 1.0  # drafting takes this many times as long, to play a slower device
    stream: bool = False  # the target writes alone, as behind an API; needs empty `lengths`

    @property
    def levels(self) -> tuple[int, ...]:
        """Depths of a draft to choose from. A tree has two, because each is a program."""
        if self.shape is None:
            return self.lengths
        most = self.shape.depth - 1
        return tuple(sorted({max(1, most // 2), most}))

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """The trees that may be drafted."""
        if self.shape is None:
            return ()
        return tuple(dataclasses.replace(self.shape, depth=1 + level) for level in self.levels)


@dataclasses.dataclass
class Counts:
    """What one answer cost."""

    rounds: int = 0  # drafts that the server verified
    drafted: int = 0  # tokens
    ahead: int = 0  # rounds whose draft was made ahead
    prompts: int = 0  # times that the server read given tokens: the prompt, and replays
    drops: int = 0  # links that were lost
    rewritten: int = 0  # unverified tokens that the target replaced
    drafting_s: float = 0.0
    waiting_s: float = 0.0  # for replies, with nothing left to draft
    alone_s: float = 0.0  # without a link
    bytes_up: int = 0  # of messages; set when the answer has ended
    bytes_down: int = 0
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    round_trips_s: list[float] = dataclasses.field(default_factory=list)


class AnswerEvent(NamedTuple):
    """Tells a reader that the answer grew or shrank, or that something happened to the link."""

    verified: int  # leading tokens of the answer that will not change, kept ones included
    notice: str = ""  # about the link


class AnswerText:
    """Tokens of a prompt and its answer; knows nothing of links or drafters."""

    def __init__(self, prompt: Sequence[int], total: int, stop_ids: Sequence[int]) -> None:
        """Prompt and answer have at most `total` tokens together."""
        self.prompt, self.total, self.stops = list(prompt), total, frozenset(stop_ids)
        self.settled, self.tail = list(prompt), []
        self.kept = [False] * len(prompt)  # for each settled token: kept without verification

    @property
    def whole(self) -> list[int]:
        """Prompt, answer and tail."""
        return [*self.settled, *self.tail]

    @property
    def answer(self) -> list[int]:
        """The answer so far, its tail included."""
        return self.whole[len(self.prompt) :]

    @property
    def unverified(self) -> int:
        """Number of answer tokens that the target has not chosen."""
        return sum(self.kept) + len(self.tail)

    @property
    def room(self) -> int:
        """Number of tokens that still fit after the settled ones."""
        return self.total - len(self.settled)

    @property
    def is_written(self) -> bool:
        """Whether the answer would end with this tail."""
        return bool(self.tail) and self.tail[-1] in self.stops or len(self.whole) >= self.total

    def end_of(self, tokens: Sequence[int]) -> str:
        """Why an answer ends after these tokens ("stop", "length"), or "" if it goes on.

        `tokens` begin with the prompt.
        """
        if len(tokens) > len(self.prompt) and tokens[-1] in self.stops:
            return "stop"
        return "length" if len(tokens) >= self.total else ""

    def settle(self, tokens: Sequence[int], *, kept: bool = False) -> None:
        """Appends tokens that will not change; `kept` ones were not verified."""
        self.settled += tokens
        self.kept += [kept] * len(tokens)

    def write(self, tokens: Sequence[int]) -> None:
        """Appends to the tail, up to the first stop token or the limit."""
        for token in tokens:
            if self.is_written:
                return
            self.tail.append(token)

    def keep_tail(self) -> None:
        """Settles the tail without verification."""
        self.settle(self.tail, kept=True)
        self.tail = []

    def differs(self, tokens: Sequence[int]) -> bool:
        """Whether the target's tokens contradict the tail."""
        return self.tail[: len(tokens)] != list(tokens[: len(self.tail)])

    def replace_tail(self, tokens: Sequence[int]) -> int:
        """Removes the target's tokens from the front of the tail; drops the tail if they differ.

        Returns the number of tail tokens that are rewritten.
        """
        if not self.differs(tokens):
            self.tail = self.tail[len(tokens) :]
            return 0
        pairs = zip(self.tail, tokens, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        rewritten = len(self.tail) - same
        self.tail = []
        return rewritten

    def cut(self, count: int) -> None:
        """Keeps the first `count` tokens of the answer and settles them."""
        self.keep_tail()
        end = len(self.prompt) + count
        self.settled, self.kept = self.settled[:end], self.kept[:end]

    def event(self, notice: str = "") -> AnswerEvent:
        """The present state of the answer, with a notice."""
        return AnswerEvent(len(self.settled) - len(self.prompt), notice)
