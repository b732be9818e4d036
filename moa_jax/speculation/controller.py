"""Chooses draft shapes so that drafting owes plain decoding at most a small debt.

    debt: time of drafted rounds beyond what plain decoding takes for the same tokens

      LIMIT |- - - - - - - .- - - - - - - - - - - - -   at the limit drafts pause
            |            .' '.
            |   probe  .'     '.                        a loss raises the debt
          0 |--.'.---.'---------'.--------------------  every round repays BUDGET of its time
            |     '.'             '.
            |                       '.                  a gain lowers the debt at once
      -KEPT |- - - - - - - - - - - - -'..............   gains are kept for KEPT rounds

best     the shape with the most expected tokens per millisecond
probe    if plain decoding is best: the shape with the most at the upper confidence bounds of its
         acceptance rates; kept gains pay for one round at most, so that BUDGET pays for probes

Both run only for as many rounds as keep the debt below LIMIT if all drafts are rejected. Plain
decoding then runs until one round of a probe is repaid. An engine chooses while the call before is
not read yet, so its debt may reach twice LIMIT. The drafter's time for prompts enters the debt over
WINDOW rounds, in which accepted drafts can repay it.

Plain rounds measure no acceptance. They age the rates, which widens the confidence intervals until
a probe can win again. A shape that cannot win even if all drafts are accepted is never tried.

A batch has one debt and one vector of rates. In simulation a batch of 8 loses no more than one
request, so drafting needs no larger gain for several requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moa_jax.config import DraftShape
from moa_jax.speculation.acceptance import WINDOW, AcceptanceRates

NO_DRAFT = DraftShape(1)
# Share of the time that drafting may owe. The promise is 2 %; half of it is left for what no cost
# has: choices between calls, and memory that another program has filled.
BUDGET = 0.01
# Plain rounds of debt at which drafts pause: 3 % of an answer of 64 tokens. It holds two rounds of
# an H100's tree (1.7 plain rounds each), or four of a chain that takes half a plain round more.
LIMIT = 2.0
# Plain rounds of gains that may be lost again: fewer than a sentence's tokens, so that a change of
# text is noticed within the sentence.
KEPT = 16.0
# Drafted rounds between choices: a call's launch and transfer then take less than 2 % of the call
# on an H100 (0.5 ms of 8 x 5 ms), and a request that arrives waits less than 0.1 s.
ROUNDS = 8
# A call that takes longer than this multiple of its cost was stalled by the machine, not by drafts:
# no shape of a table that is right takes twice its cost.
STALLED = 2.0
# Standard errors of the upper confidence bounds: 98 % of the rates are below.
DEVIATIONS = 2.0


class ShapeChoice(NamedTuple):
    """The shape of the next rounds."""

    shape: DraftShape
    rounds: int  # until `DraftController.next` is called again


class DraftController:
    """Chooses among the shapes that can run, for all requests of an engine or a session.

    The class is pure: no clock, no randomness. Times are those of the cost table.
    """

    def __init__(self, levels: int) -> None:
        """`levels` is the largest number of levels below the root of any shape."""
        self.acceptance = AcceptanceRates(levels)
        self.debt_ms = 0.0
        self._num_rounds = 0
        self._drafted_ms = 0.0  # time of drafted rounds since the last plain one
        self._prompt_ms = 0.0  # time of the drafter for prompts that is not in the debt yet

    def next(
        self,
        costs: Mapping[DraftShape, float],
        lag_ms: float = 0.0,
        prompts_ms: float = 0.0,
        tokens: float = 1.0,
    ) -> ShapeChoice:
        """Returns the shape of the next rounds.

        `costs` has the milliseconds of a round for each shape that can run now, for this batch.
        Without plain decoding among them the fastest shape runs. `lag_ms` is the time that the
        drafter needs to catch up before a drafted round; a choice that drafts adds it to the debt.
        `prompts_ms` is the time that the drafter needs for prompts, and `tokens` are left of an
        answer on average: a shape must gain more. Raises ValueError without costs.
        """
        if not costs:
            raise ValueError("no draft shape has a cost; calibrate one first")

        def token_ms(shape: DraftShape, deviations: float = 0.0) -> float:
            ms = costs[shape] / self.acceptance.tokens(shape, deviations)
            return ms if shape == NO_DRAFT else ms + prompts_ms / tokens

        shape = min(costs, key=token_ms)
        learned = max(self._num_rounds, 1)  # few rounds at first, to learn early
        most = min(learned, ROUNDS)
        if NO_DRAFT not in costs:
            return ShapeChoice(shape, most)
        plain_ms = costs[NO_DRAFT]
        limit_ms, is_probe = LIMIT * plain_ms, shape == NO_DRAFT
        if is_probe:
            shape = min(costs, key=lambda shape: token_ms(shape, DEVIATIONS))
        loss_ms = max(costs[shape] - plain_ms, 0.0)  # of a round whose drafts are all rejected
        lag_in_limit_ms = min(lag_ms, limit_ms / 2)  # otherwise a long lag would never be made up
        if is_probe:  # plain rounds save for one round at most
            self.debt_ms = max(self.debt_ms, min(0.0, limit_ms - loss_ms - lag_in_limit_ms))
        left_ms = limit_ms - self.debt_ms - lag_in_limit_ms
        if left_ms < loss_ms:
            most = 0
        elif loss_ms > 0:
            most = min(most, int(left_ms / loss_ms))
        # Plain decoding is measured now and then: a stored cost that is too high would hide a loss.
        # If the gain is small, that costs little, and is done often.
        loses_ms = ROUNDS * (plain_ms - token_ms(shape))
        if not is_probe and BUDGET * self._drafted_ms > loses_ms:
            return ShapeChoice(NO_DRAFT, ROUNDS)
        if shape == NO_DRAFT or most < 1:  # plain rounds measure no acceptance
            repaid = int((loss_ms - left_ms) / (BUDGET * plain_ms)) + 1
            repaid = WINDOW if shape == NO_DRAFT else min(repaid, WINDOW)
            return ShapeChoice(NO_DRAFT, min(learned, repaid))
        self.debt_ms += lag_ms
        self._prompt_ms += prompts_ms
        return ShapeChoice(shape, most)

    def observe(
        self,
        costs: Mapping[DraftShape, float],
        shape: DraftShape,
        accepted: npt.ArrayLike,
        rounds: int,
        batch: int = 1,
        round_ms: float | None = None,
    ) -> None:
        """Records rounds of a shape; `costs` are those of the choice.

        `accepted` has the accepted drafts of each row and round, all rows in one list. Rounds that
        a stop or a limit truncates are left out, and count neither as time nor as tokens.
        `round_ms` is the measured time of a round, with what a call costs the host; None or a stall
        counts the cost.
        """
        self._num_rounds += rounds
        if shape == NO_DRAFT:
            self.acceptance.age(rounds)
            self._drafted_ms = 0.0
        else:
            self._drafted_ms += rounds * costs.get(shape, 0.0)
            self.acceptance.update(shape, accepted, rounds)
        before_ms, self._prompt_ms = self._prompt_ms, self._prompt_ms * (1 - 1 / WINDOW) ** rounds
        self.debt_ms += before_ms - self._prompt_ms
        if NO_DRAFT not in costs or shape not in costs:
            return
        plain_ms = costs[NO_DRAFT]
        self.debt_ms -= BUDGET * rounds * costs[shape]
        if shape != NO_DRAFT:
            num_rounds = np.size(accepted)
            num_tokens = num_rounds + float(np.sum(accepted))
            is_stalled = round_ms is None or round_ms > STALLED * costs[shape]
            ms = costs[shape] if is_stalled else round_ms
            self.debt_ms += (num_rounds * ms - num_tokens * plain_ms) / batch
        self.debt_ms = max(self.debt_ms, -KEPT * plain_ms)
