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

from moa_jax.config import DraftShape
from moa_jax.speculation.acceptance import AcceptanceRates

RECENT = 15  # number of measured times in a median


class NextDraft(NamedTuple):
    """The draft to send in the next round."""

    steps: int
    ahead: bool  # use the tokens drafted ahead


class DraftPace:
    """Records measurements and chooses draft lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths` are the candidate numbers of drafted levels."""
        self.lengths = sorted(lengths)
        self._rates = {ahead: AcceptanceRates(self.lengths[-1]) for ahead in (False, True)}
        # A median hardly changes with a compilation or a lost packet.
        self.reply_s: deque[float] = deque(maxlen=RECENT)
        self.token_s: deque[float] = deque(maxlen=RECENT)  # per drafted level

    def saw_draft(self, seconds: float, steps: int) -> None:
        """Records that drafting `steps` levels took `seconds`."""
        if steps:
            self.token_s.append(seconds / steps)

    def saw_reply(self, seconds: float, drafted: int, accepted: int, ahead: bool) -> None:
        """Records a round: the time of its reply, and its drafted and accepted levels."""
        self.reply_s.append(seconds)
        self._rates[ahead].update(_chain(min(drafted, self.lengths[-1])), [accepted], 1)

    def committed(self, steps: int, ahead: bool = False) -> float:
        """E(steps): mean number of tokens that a round with `steps` levels commits."""
        return self._rates[ahead].tokens(_chain(steps))

    def has_time(self, tokens: int) -> bool:
        """Whether drafting `tokens` ends before a reply; True until both times are measured."""
        if not self.reply_s or not self.token_s:
            return True
        return tokens * statistics.median(self.token_s) <= statistics.median(self.reply_s)

    def choose(self, ahead: int = 0) -> NextDraft:
        """The fastest draft, given `ahead` tokens drafted ahead."""
        reply, token = (statistics.median(times or [0.0]) for times in (self.reply_s, self.token_s))
        speed = lambda steps: self.committed(steps) / max(reply + steps * token, 1e-9)
        best = max(self.lengths, key=speed)
        kept = min(ahead, self.lengths[-1])
        if kept and self.committed(kept, ahead=True) / max(reply, 1e-9) >= speed(best):
            return NextDraft(kept, True)
        return NextDraft(best, False)


def _chain(steps: int) -> DraftShape:
    return DraftShape(1 + steps)
