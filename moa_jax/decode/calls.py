"""What whoever sends calls of rounds has to know of them, on the host."""

from __future__ import annotations

from typing import TypeVar

from moa_jax.config import DraftShape

Rounds = TypeVar("Rounds")  # a list or an array, with an entry for each round of a row


class Backlog:
    """How many rounds of plain decoding the drafter has not read: `step.catch_up` takes so many."""

    def __init__(self, most: int) -> None:
        """`most` is the setup's `most_behind`; with 0 the drafter is never late."""
        self.most, self.rounds = most, 0

    def is_due(self, way: DraftShape) -> bool:
        """Whether the drafter must catch up before the next rounds of this way."""
        return self.rounds > 0 and (way.num_drafted > 0 or self.rounds == self.most)

    def add(self, way: DraftShape, rounds: int) -> int:
        """Notes a call of this way that follows; returns how many rounds it may have at most."""
        if self.most and not way.num_drafted:
            rounds = min(rounds, self.most - self.rounds)
            self.rounds += rounds
        return rounds

    def clear(self) -> None:
        """The drafter has caught up."""
        self.rounds = 0


def that_tell(rounds: Rounds, ended: bool) -> Rounds:
    """A row's rounds without the last one of a row that has ended.

    A stop or the limit may have cut it, so it does not tell what the target accepts.
    """
    return rounds[: len(rounds) - ended]
