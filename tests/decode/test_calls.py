"""What senders of calls count: rounds that the drafter has not read, rounds that tell something."""

from __future__ import annotations

import numpy as np
import pytest

from moa_jax.config import DraftShape
from moa_jax.decode.auto import PLAIN
from moa_jax.decode.calls import Backlog, that_tell

CHAIN = DraftShape(3)


def test_plain_rounds_add_up_to_a_limit_and_drafted_ones_wait_for_nothing():
    backlog, calls = Backlog(5), []
    for way, rounds in [(CHAIN, 8), (PLAIN, 3), (PLAIN, 8), (PLAIN, 4), (CHAIN, 2), (CHAIN, 2)]:
        if due := backlog.is_due(way):
            backlog.clear()
        calls.append((due, backlog.add(way, rounds)))
    assert calls == [(False, 8), (False, 3), (False, 2), (True, 4), (True, 2), (False, 2)]


def test_a_drafter_that_is_never_late_has_no_limit():
    backlog = Backlog(0)
    assert backlog.add(PLAIN, 100) == 100 and not backlog.is_due(CHAIN)


@pytest.mark.parametrize("of", [list, np.array])
def test_the_last_round_of_a_row_that_ended_tells_nothing(of):
    found = [list(that_tell(of([3, 1, 2][:n]), ended)) for n in (3, 0) for ended in (False, True)]
    assert found == [[3, 1, 2], [3, 1], [], []]
