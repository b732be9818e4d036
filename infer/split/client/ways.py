"""How a client answers, and what one answer cost: plain figures for whoever asks or reports."""

from __future__ import annotations

import dataclasses
from typing import Literal

from moa_jax.config import DraftShape

Policy = Literal["keep", "verify"]  # with what was written alone


@dataclasses.dataclass(frozen=True)
class Ways:
    """How a client drafts and behaves."""

    shape: DraftShape | None = None  # a tree; None drafts chains
    lengths: tuple[int, ...] = (1, 2, 3, 5, 7, 11, 15)  # levels to choose from; () is plain
    draft_ahead: bool = True
    policy: Policy = "verify"
    patience: float = 60.0  # for a reply of a server that lives: a slot may have to come free
    reconnect_seconds: float = 30.0  # to wait for a link once the answer is written alone
    slowdown: float = 1.0  # drafting takes this many times as long, to play a slower device
    stream: bool = False  # with no `lengths`: the target writes alone, as behind an API

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels of a draft to choose from; of a tree all or half, for each is a program."""
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
    drafted: int = 0
    ahead: int = 0  # rounds whose draft was made ahead
    prompts: int = 0  # times that the server read tokens: the prompt, and replays
    drops: int = 0  # links that were lost
    rewritten: int = 0  # unverified tokens that the target took back
    drafting_s: float = 0.0
    waiting_s: float = 0.0  # for replies, with nothing to draft
    alone_s: float = 0.0
    bytes_up: int = 0  # of messages; known when the answer has ended
    bytes_down: int = 0
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    round_trips_s: list[float] = dataclasses.field(default_factory=list)
