"""Chooses the draft length of a round from measured times and acceptance rates.

A round that drafts k tokens commits E(k) = 1 + a1 + a1 a2 + ... + a1...ak tokens on average; a_i is
the acceptance rate of the i-th token given that all earlier tokens were accepted. A round takes the
time of the reply plus k times the time to draft a token:

    tokens per second (k) = E(k) / (reply + k x draft)

A draft made ahead, while the last reply was pending, takes no extra time, but its tokens were
drafted without the target's last rows. Both kinds therefore have separate acceptance rates.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

PRIOR = 0.7  # acceptance rate before the first measurement
WEIGHT = 0.1  # of the newest observation in a running mean
RECENT = 15  # number of measured times in a median


class RunningMean:
    """An exponential moving average."""

    def __init__(self, value: float) -> None:
        self.value = value

    def add(self, value: float) -> None:
        """Adds one observation."""
        self.value += WEIGHT * (value - self.value)


class RecentMedian:
    """The median of recent times; a compilation or a lost packet hardly changes the median."""

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
    ahead: bool  # use the tokens drafted ahead


class DraftPace:
    """Records measurements and chooses draft lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` are the candidate numbers of drafted levels."""
        self.lengths = sorted(lengths)
        most = self.lengths[-1]
        self._rates = {ahead: [RunningMean(PRIOR) for _ in range(most)] for ahead in (False, True)}
        self.reply_s = RecentMedian()
        self.token_s = RecentMedian()  # per drafted level

    def saw_draft(self, seconds: float, steps: int) -> None:
        """Records that drafting `steps` levels took `seconds`."""
        if steps:
            self.token_s.add(seconds / steps)

    def saw_reply(self, seconds: float, drafted: int, accepted: int, ahead: bool) -> None:
        """Records a round: the time of its reply, and its drafted and accepted levels."""
        self.reply_s.add(seconds)
        rates = self._rates[ahead]
        for level in range(min(drafted, accepted + 1, len(rates))):
            rates[level].add(float(level < accepted))

    def committed(self, steps: int, ahead: bool = False) -> float:
        """E(steps): mean number of tokens that a round with `steps` levels commits."""
        total = chance = 1.0
        for rate in self._rates[ahead][:steps]:
            chance *= rate.value
            total += chance
        return total

    def has_time(self, tokens: int) -> bool:
        """Whether drafting `tokens` ends before a reply; True until both times are measured."""
        reply, token = self.reply_s.value, self.token_s.value
        return reply is None or token is None or tokens * token <= reply

    def choose(self, ahead: int = 0) -> NextDraft:
        """The fastest draft, given `ahead` tokens drafted ahead."""
        reply, token = self.reply_s.value or 0.0, self.token_s.value or 0.0
        speed = lambda steps: self.committed(steps) / max(reply + steps * token, 1e-9)
        best = max(self.lengths, key=speed)
        kept = min(ahead, self.lengths[-1])
        if kept and self.committed(kept, ahead=True) / max(reply, 1e-9) >= speed(best):
            return NextDraft(kept, True)
        return NextDraft(best, False)
