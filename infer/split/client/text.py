"""The text of one answer: what is settled, and a tail that the drafter wrote without a link.

prompt | verified ............ root | tail
`settled` ........................  | unverified, may be rewritten
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """What a reader learns when there is more of the answer, or less, or news of the link."""

    verified: int  # tokens of the answer so far that stay as they are, those kept unverified too
    notice: str = ""  # of the link


class Text:
    """Tokens of a prompt and its answer; nothing here knows of links or drafters."""

    def __init__(self, prompt: Sequence[int], total: int, stop_ids: Sequence[int]) -> None:
        """At most `total` tokens, the prompt's included."""
        self.prompt, self.total, self.stops = list(prompt), total, frozenset(stop_ids)
        self.settled, self.tail = list(prompt), []
        self.kept = [False] * len(prompt)  # for each settled token: unverified but kept

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
        """Tokens of the answer that the target has not chosen."""
        return sum(self.kept) + len(self.tail)

    @property
    def room(self) -> int:
        """Tokens that still fit behind what is settled."""
        return self.total - len(self.settled)

    @property
    def is_written(self) -> bool:
        """Whether the tail ends the answer."""
        return bool(self.tail) and self.tail[-1] in self.stops or len(self.whole) >= self.total

    def end_of(self, tokens: Sequence[int]) -> str:
        """Whether and why an answer ends with these tokens, the prompt before them included."""
        if len(tokens) > len(self.prompt) and tokens[-1] in self.stops:
            return "stop"
        return "length" if len(tokens) >= self.total else ""

    def settle(self, tokens: Sequence[int], *, kept: bool = False) -> None:
        """More tokens that stay."""
        self.settled += tokens
        self.kept += [kept] * len(tokens)

    def write(self, tokens: Sequence[int]) -> None:
        """More of the tail, up to the first stop and the answer's limit."""
        for token in tokens:
            if self.is_written:
                return
            self.tail.append(token)

    def keep_tail(self) -> None:
        """The tail stays as it was written."""
        self.settle(self.tail, kept=True)
        self.tail = []

    def differs(self, tokens: Sequence[int]) -> bool:
        """Whether the target wrote something else than the tail."""
        return self.tail[: len(tokens)] != list(tokens[: len(self.tail)])

    def replace_tail(self, tokens: Sequence[int]) -> int:
        """Takes what the target wrote off the tail, all of it where they differ.

        Returns how many tokens of the tail are rewritten."""
        if not self.differs(tokens):
            self.tail = self.tail[len(tokens) :]
            return 0
        rewritten = len(self.tail) - _num_same(self.tail, tokens)
        self.tail = []
        return rewritten

    def cut(self, count: int) -> None:
        """Keeps so many tokens of the answer, as they are."""
        self.keep_tail()
        end = len(self.prompt) + count
        self.settled, self.kept = self.settled[:end], self.kept[:end]

    def event(self, notice: str = "") -> Event:
        """Where the answer stands, and a notice."""
        return Event(len(self.settled) - len(self.prompt), notice)


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with alike."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)
