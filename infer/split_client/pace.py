"""Chooses the draft length of a round from measured times and acceptance rates.

A round that drafts k tokens commits E(k) = 1 + a1 + a1 a2 + ... + a1...ak tokens on average; a_i is
the acceptance rate of the i-th token given that all earlier tokens were accepted. A round takes the
time of the reply plus k times the time to draft a token:

    tokens per second (k) = E(k) / (reply + k x draft)

The `DraftController` of engines and sessions chooses k; plain decoding is no candidate, since the
network's time is paid either way. A draft made ahead, while the last reply was pending, takes no
extra time, but its tokens were drafted without the target's last rows. Both kinds therefore have
separate acceptance rates.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from moa_jax.config import DraftShape
from moa_jax.speculation.acceptance import AcceptanceRates
from moa_jax.speculation.controller import DraftController

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
        self._controller = DraftController(self.lengths[-1])
        self._rates_ahead = AcceptanceRates(self.lengths[-1])
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
        shape = DraftShape(1 + min(drafted, self.lengths[-1]))
        if ahead:
            self._rates_ahead.update(shape, [accepted], 1)
        else:
            self._controller.observe({}, shape, [accepted], 1)

    def committed(self, steps: int, ahead: bool = False) -> float:
        """E(steps): mean number of tokens that a round with `steps` levels commits."""
        rates = self._rates_ahead if ahead else self._controller.acceptance
        return rates.tokens(DraftShape(1 + steps))

    def has_time(self, tokens: int) -> bool:
        """Whether drafting `tokens` ends before a reply; True until both times are measured."""
        if not self.reply_s or not self.token_s:
            return True
        return tokens * statistics.median(self.token_s) <= statistics.median(self.reply_s)

    def choose(self, ahead: int = 0) -> NextDraft:
        """The fastest draft, given `ahead` tokens drafted ahead."""
        reply, token = (statistics.median(times or [0.0]) for times in (self.reply_s, self.token_s))
        seconds = {steps: max(reply + steps * token, 1e-9) for steps in self.lengths}
        best = self._controller.next(
            {DraftShape(1 + k): seconds[k] for k in seconds}
        ).shape.num_drafted
        kept = min(ahead, self.lengths[-1])
        speed = self.committed(best) / seconds[best]
        if kept and self.committed(kept, ahead=True) / max(reply, 1e-9) >= speed:
            return NextDraft(kept, True)
        return NextDraft(best, False)
