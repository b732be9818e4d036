"""Calibration measures missing cells in turn, and stores the medians of their times."""

from __future__ import annotations

import pytest

from moa_jax.config import DraftShape
from moa_jax.speculation.calibrate import TURNS, calibrate
from moa_jax.speculation.cost_table import CostTable

CELLS = [(1, DraftShape(1), 64), (1, DraftShape(3), 64), (8, DraftShape(3), 64)]


def test_missing_cells_take_turns_and_the_median_is_stored():
    table, calls = CostTable(), []
    table.put(*CELLS[0], 9.0)

    def seconds(*cell) -> float:
        """Simulates a first time with a compile, and a second one with a stall."""
        calls.append(cell)
        return (9.0, 5.0, 0.002, 0.003, 0.002, 0.002)[calls.count(cell) - 1]

    calibrate(table, CELLS, seconds)
    assert [table.ms(*cell) for cell in CELLS] == [9.0, 2.0, 2.0]
    one, two = CELLS[1:]
    assert len(calls) == 2 * (1 + TURNS) and calls[:6].count(one) == calls[:6].count(two) == 3
    assert any(calls[turn] == two for turn in range(0, len(calls), 2))  # each comes first at times
    calibrate(table, CELLS, seconds)
    assert len(calls) == 2 * (1 + TURNS)


def test_an_error_leaves_the_table_as_it_was():
    table, calls = CostTable(), []

    def seconds(*cell) -> float:
        calls.append(cell)
        if len(calls) > 8:
            raise KeyError("stop")
        return 1.0

    with pytest.raises(KeyError, match="stop"):
        calibrate(table, CELLS, seconds)
    assert table.entries() == []


def test_nothing_is_stored_of_a_cell_without_a_time():
    table = CostTable()
    calibrate(table, CELLS, lambda batch, shape, length: 0.0 if batch == 8 else 1.0)
    assert [table.ms(*cell) for cell in CELLS] == [1000.0, 1000.0, None]
