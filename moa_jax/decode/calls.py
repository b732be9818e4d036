"""What whoever sends calls of rounds has to know of them, on the host."""

from __future__ import annotations

from typing import TypeVar

Rounds = TypeVar("Rounds")  # a list or an array, with an entry for each round of a row


def that_tell(rounds: Rounds, ended: bool) -> Rounds:
    """A row's rounds without the last one of a row that has ended.

    A stop or the limit may have cut it, so it does not tell what the target accepts.
    """
    return rounds[: len(rounds) - ended]
