"""Chooses how much to draft before asking, from measured times and acceptance rates.

A round that drafts k tokens commits E(k) = 1 + a1 + a1 a2 + ... + a1...ak of them on average. Here
a_i is how often the i-th token is accepted after those before it were. The round takes the time of
the reply plus k times the time to draft a token:

    tokens per second (k) = E(k) / (reply + k x draft)

A draft that was made ahead, while the last reply was under way, costs no more time, but its tokens
were drafted without the target's last rows. So both kinds have acceptance rates of their own.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

PRIOR = 0.7  # acceptance rate before anything was measured
WEIGHT = 0.1  # of the newest observation in a running mean
RECENT = 15  # number of times in a median


class RunningMean:
    """A mean in which older observations count less."""

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, value: float) -> None:
        """Adds one observation."""
        self.value += WEIGHT * (value - self.value)


class RecentMedian:
    """The median of the last times, which a compilation or a lost packet hardly changes."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)

    def add(self, value: float) -> None:
        """Adds one observation."""
        self._values.append(value)

    @property
    def value(self) -> float | None:
        """The median; None before the first observation."""
        return statistics.median(self._values) if self._values else None


class NextDraft(NamedTuple):
    """The draft to send in the next round."""

    steps: int
    ahead: bool  # use the tokens that were drafted ahead


class DraftPace:
    """The measurements so far, and the choice that follows from them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` are the numbers of drafted levels to choose from."""
        self.lengths = sorted(lengths)
        most = self.lengths[-1]
        self._rates = {ahead: [RunningMean(PRIOR) for _ in range(most)] for ahead in (False, True)}
        self.reply_s = RecentMedian()
        self.token_s = RecentMedian()  # drafting one level

    def saw_draft(self, seconds: float, steps: int) -> None:
        """Notes that drafting `steps` levels took so long."""
        if steps:
            self.token_s.add(seconds / steps)

    def saw_reply(self, seconds: float, drafted: int, accepted: int, ahead: bool) -> None:
        """Notes a round: the time of its reply, and levels drafted and accepted."""
        self.reply_s.add(seconds)
        rates = self._rates[ahead]
        for level in range(min(drafted, accepted + 1, len(rates))):
            rates[level].add(float(level < accepted))

    def committed(self, steps: int, ahead: bool = False) -> float:
        """E(steps): the tokens that a round with so many levels commits on average."""
        total = chance = 1.0
        for rate in self._rates[ahead][:steps]:
            chance *= rate.value
            total += chance
        return total

    def has_time(self, tokens: int) -> bool:
        """Whether so many tokens are drafted before a reply comes; True until both are measured."""
        reply, token = self.reply_s.value, self.token_s.value
        return reply is None or token is None or tokens * token <= reply

    def choose(self, ahead: int = 0) -> NextDraft:
        """The fastest choice, when `ahead` tokens have been drafted ahead."""
        reply, token = self.reply_s.value or 0.0, self.token_s.value or 0.0
        speed = lambda steps: self.committed(steps) / max(reply + steps * token, 1e-9)
        best = max(self.lengths, key=speed)
        kept = min(ahead, self.lengths[-1])
        if kept and self.committed(kept, ahead=True) / max(reply, 1e-9) >= speed(best):
            return NextDraft(kept, True)
        return NextDraft(best, False)
