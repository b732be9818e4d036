"""What senders of calls count: rounds that tell something."""

from __future__ import annotations

import numpy as np
import pytest

from moa_jax.decode.calls import that_tell


@pytest.mark.parametrize("of", [list, np.array])
def test_the_last_round_of_a_row_that_ended_tells_nothing(of):
    found = [list(that_tell(of([3, 1, 2][:n]), ended)) for n in (3, 0) for ended in (False, True)]
    assert found == [[3, 1, 2], [3, 1], [], []]
