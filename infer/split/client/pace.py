"""How much to draft before asking: what was measured of network, drafter and acceptance decides.

A round that drafts k tokens commits E(k) = 1 + a1 + a1 a2 + ... of them, where a_i is how often
the i-th is right when those before it were, and takes the reply's time plus k times a token's:

    tokens per second (k) = E(k) / (reply + k x draft)

A draft that was made ahead, while the last reply was under way, costs no time any more, but its
tokens knew less of the target: the two kinds have acceptance rates of their own.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

PRIOR = 0.7  # acceptance before anything was seen
WEIGHT = 0.1  # of the newest observation in a running mean
RECENT = 15  # times that count


class Running:
    """A running mean that forgets."""

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, value: float) -> None:
        """Takes in one observation."""
        self.value += WEIGHT * (value - self.value)


class Recent:
    """The median of the last times: a program that compiles or a lost packet moves it little."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)

    def add(self, value: float) -> None:
        """Takes in one observation."""
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """None before the first."""
        return statistics.median(self._values) if self._values else None


class Choice(NamedTuple):
    """What the next round should do."""

    steps: int
    ahead: bool  # take what was drafted ahead


class Pace:
    """What was measured so far, and the choice that follows from it."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` are the numbers of drafted levels to choose from, rising."""
        self.lengths = sorted(lengths)
        most = self.lengths[-1]
        self._rates = {ahead: [Running(PRIOR) for _ in range(most)] for ahead in (False, True)}
        self.reply_s = Recent()
        self.token_s = Recent()  # drafting one level

    def saw_draft(self, seconds: float, steps: int) -> None:
        """Drafting that many levels took that long."""
        if steps:
            self.token_s.add(seconds / steps)

    def saw_reply(self, seconds: float, drafted: int, accepted: int, ahead: bool) -> None:
        """A round's reply came that long after it was asked for."""
        self.reply_s.add(seconds)
        rates = self._rates[ahead]
        for level in range(min(drafted, accepted + 1, len(rates))):
            rates[level].add(float(level < accepted))

    def committed(self, steps: int, ahead: bool = False) -> float:
        """Tokens that a round of so many levels commits on average."""
        total = chance = 1.0
        for rate in self._rates[ahead][:steps]:
            chance *= rate.value
            total += chance
        return total

    def has_time(self, tokens: int) -> bool:
        """Whether so many can be drafted before a reply is there; true before one was seen."""
        reply, token = self.reply_s.value, self.token_s.value
        return reply is None or token is None or tokens * token <= reply

    def choose(self, ahead: int = 0) -> Choice:
        """The best length, given `ahead` tokens that were drafted ahead."""
        reply, token = self.reply_s.value or 0.0, self.token_s.value or 0.0
        speed = lambda steps: self.committed(steps) / max(reply + steps * token, 1e-9)  # noqa: E731
        best = max(self.lengths, key=speed)
        kept = min(ahead, self.lengths[-1])
        if kept and self.committed(kept, ahead=True) / max(reply, 1e-9) >= speed(best):
            return Choice(kept, True)
        return Choice(best, False)
