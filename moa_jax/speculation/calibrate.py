"""Calibration of a cost table: each missing cell is timed several times, in turns.

turn 1     plain   chain of 3   chain of 5   tree     compiles and warms up, not counted
turn 2     chain of 3   chain of 5   tree   plain
...        drift of the machine affects all cells alike; the median of the turns is stored
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from moa_jax.config import DraftShape
from moa_jax.measure.turns import in_turns
from moa_jax.speculation.cost_table import CostTable

Cell = tuple[int, DraftShape, int]  # batch, shape, cache length

# Turns that count: the median then ignores two stalls of a shared machine.
TURNS = 5


def calibrate(
    table: CostTable,
    cells: Iterable[Cell],
    seconds_of_a_round: Callable[[int, DraftShape, int], float],
) -> None:
    """Times the cells that the table lacks; a cell whose time is 0 stays unknown.

    An exception of `seconds_of_a_round` ends the calibration and leaves the table unchanged.
    """
    missing = [cell for cell in cells if not table.has(*cell)]
    if not missing:
        return
    seconds: dict[Cell, list[float]] = {cell: [] for cell in missing}
    for turn in in_turns(len(missing), 1, TURNS):
        cell = missing[turn.way]
        found = seconds_of_a_round(*cell)
        if turn.is_counted:
            seconds[cell].append(found)
    for cell, times in seconds.items():
        if (median := statistics.median(times)) > 0:
            table.put(*cell, 1e3 * median)
