"""The report of a grid: intervals, means of seeds, what it says of itself."""

import dataclasses

import numpy as np

from tests.train.toy_grids import TARGET, decoded_by, finish, toy_grid
from train import grid as grids
from train.grid import sizes_of
from train.run.grid_report import DRAWS, _taus, render


def counted(tokens: list[int], rounds: list[int]) -> dict[str, list[int]]:
    return {"tokens": list(tokens), "rounds": list(rounds)}


def interval(*seeds: dict, bases: tuple = ()) -> str:
    """As the report shows it: `1.00 to 2.00`."""
    cells = _taus("tau", "eagle", seeds, bases)
    return cells["tau / eagle" if bases else "tau"].partition(" (")[2].rstrip(")")


def test_intervals_are_those_of_drawn_prompts():
    tokens_P, rounds_P = np.array([10, 20, 30, 40]), np.array([10, 5, 15, 10])
    tau = counted(tokens_P, rounds_P)
    chance, found = np.random.default_rng(5), []
    for _ in range(4000):
        drawn = chance.choice(4, 4)
        found.append(tokens_P[drawn].sum() / rounds_P[drawn].sum())
    expected = np.quantile(found, [0.05, 0.95])
    bounds = [float(bound) for bound in interval(tau).split(" to ")]
    np.testing.assert_allclose(bounds, expected, rtol=0.06)
    assert interval(tau) == interval(tau) and DRAWS == 1000
    assert _taus("tau", "eagle", [tau], [])["tau"].startswith("2.50 (")
    assert interval(counted([9, 9, 9], [3, 3, 3])) == "3.00 to 3.00"


def test_intervals_of_ratios_draw_the_same_prompts():
    tokens_P, rounds_P = np.array([10, 20, 30, 40]), np.array([10, 5, 15, 10])
    slow, fast = counted(tokens_P, 2 * rounds_P), counted(tokens_P, rounds_P)
    assert interval(fast, bases=(slow,)) == "2.00 to 2.00"
    low, high = map(float, interval(fast).split(" to "))
    assert high - low > 1


def test_means_of_seeds_draw_the_seeds_as_well():
    slow, fast = counted([20, 20], [20, 20]), counted([20, 20], [10, 10])
    assert interval(slow, fast) == "1.00 to 2.00"
    assert interval(slow, fast, bases=(fast, slow)) == "0.50 to 2.00"
    assert interval(fast, fast, bases=(slow, slow)) == "2.00 to 2.00"


def test_the_report_names_settings_that_cells_do_not_share(tmp_path):
    grid = toy_grid(tmp_path)
    assert "Other settings" not in render(grid, [], TARGET, {})
    (name, config), other = grid.cells
    longer = dataclasses.replace(config, optim=dataclasses.replace(config.optim, total_steps=13))
    grid = dataclasses.replace(grid, cells=((name, longer), other), reference=other[0])
    text = render(grid, [], TARGET, {})
    assert f"Other settings than {other[0]}:\n\n- {name}: optim.total_steps: 12 -> 13" in text


def test_the_report_has_the_means_of_seeds(tmp_path):
    """A chain and a tree; a cell that is not decoded yet has no line in their tables."""
    grid = toy_grid(tmp_path, learning_rates=(), seeds=(0, 1))
    cells = (*grid.cells, ("later", grid.cells[0][1]))
    grid = dataclasses.replace(grid, cells=cells)
    finished = zip(grids.runs_of(grid), ([2, 2], [4, 4], None, [4, 4], [4, 4], None), strict=True)
    for run, rounds in finished:
        finish(run, 1.5, **decoded_by(grid, rounds) if rounds else {})
    text = render(grid, grids.rows_of(grid), TARGET, sizes_of(grid, TARGET))
    mean = "3.00 (2.00 to 4.00) | 1.50 (1.00 to 2.00)"
    assert text.count(f"\n| moa | 2 | {mean} | {mean} |\n") == 2
    mean = "2.00 (2.00 to 2.00) | 1.00"
    assert text.count(f"\n| eagle | 2 | {mean} | {mean} |\n") == 2
    assert (
        text.count("\n| later |") == 2 and "\n## Chain 3\n" in text and "\n## Tree 3/2/4\n" in text
    )
    assert "all rounds of up to 2 distinct held-out" in text
