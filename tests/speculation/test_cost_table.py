"""The cost table: interpolation, corrections by steps, and the file of one machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moa_jax.config import DraftShape
from moa_jax.speculation.cost_table import CostKey, CostTable, cost_file, load_costs, save_costs

KEY = CostKey("cpu", "float32", None, "ab" * 32, 2)
PLAIN, CHAIN, TREE = DraftShape(1), DraftShape(3), DraftShape(7, 8, 62)
STATIC = DraftShape.static([[0], [1], [0, 0]])


def saved(folder: Path) -> Path:
    """Saves the file of three calibrated shapes."""
    table = CostTable(KEY)
    table.put(1, CHAIN, 64, 1.5)
    table.put(8, TREE, 64, 4.0)
    table.put(16, STATIC, 64, 2.5)
    save_costs(folder, table)
    return cost_file(folder, KEY)


def test_costs_are_linear_between_calibrated_lengths_and_clamped_outside():
    table = CostTable()
    table.put(1, CHAIN, 1000, 3.0)
    table.put(1, CHAIN, 100, 1.2)
    assert [table.ms(1, CHAIN, n) for n in (1, 100, 550, 1000, 9999)] == [1.2, 1.2, 2.1, 3.0, 3.0]
    assert table.ms(8, CHAIN, 100) is None and table.ms(1, TREE, 100) is None
    assert table.has(1, CHAIN, 100) and not table.has(1, CHAIN, 550)
    table.put(8, TREE, 100, 9.0)
    assert (table.ms(1, CHAIN, 550), table.ms(8, TREE, 550)) == (2.1, 9.0)


def two_shapes() -> CostTable:
    table = CostTable()
    for batch in (1, 8):
        for length in (100, 1000):
            table.put(batch, PLAIN, length, 1.0)
            table.put(batch, CHAIN, length, 2.0)
    return table


def test_steps_correct_a_cost_at_all_lengths():
    table = two_shapes()
    for _ in range(200):
        table.update(1, CHAIN, 1000, 3.0)
        table.update(1, PLAIN, 1000, 1.0)
    assert [table.ms(1, CHAIN, n) for n in (100, 1000)] == pytest.approx([3.0, 3.0], rel=0.05)
    assert table.ms(1, PLAIN, 100) == pytest.approx(1.0, rel=0.05)
    assert table.ms(8, CHAIN, 100) == 2.0


def test_one_stalled_step_changes_little_and_a_time_not_above_0_nothing():
    table = two_shapes()
    for _ in range(20):
        table.update(1, CHAIN, 100, 2.0)
    table.update(1, CHAIN, 100, 20.0)
    assert 2.0 < table.ms(1, CHAIN, 100) < 2.1
    for ms in (0.0, -1.0, float("nan"), float("inf")):
        table.update(1, CHAIN, 100, ms)
        with pytest.raises(ValueError, match="cannot store a round of"):
            table.put(1, CHAIN, 100, ms)
    table.update(1, TREE, 100, 5.0)  # never calibrated
    assert 2.0 < table.ms(1, CHAIN, 100) < 2.1 and table.ms(1, TREE, 100) is None


def test_the_first_steps_replace_a_wrong_calibration():
    table = two_shapes()
    for _ in range(4):
        table.update(1, CHAIN, 100, 1.5)
    assert table.ms(1, CHAIN, 100) == pytest.approx(1.5 * (2.0 / 1.5) ** 0.2)


def test_a_shape_that_does_not_run_follows_the_machine():
    """A chain that was last measured on a busy machine is tried again."""
    table = two_shapes()
    for _ in range(100):
        table.update(1, CHAIN, 100, 6.0)
    assert table.ms(1, CHAIN, 100) > 5.5 and table.ms(1, PLAIN, 100) < 1.6
    for _ in range(2000):
        table.update(1, PLAIN, 100, 1.0)
    assert table.ms(1, CHAIN, 100) == pytest.approx(2.0, rel=0.01)


def test_sampled_candidates_cost_as_much_as_the_most_likely():
    table = CostTable()
    table.put(1, dataclasses.replace(CHAIN, sampled=True), 64, 1.5)
    assert table.ms(1, CHAIN, 64) == 1.5
    assert table.ms(1, dataclasses.replace(CHAIN, sampled=True), 64) == 1.5


def test_calibrated_costs_are_restored_from_the_disk(tmp_path):
    assert load_costs(tmp_path, KEY)[0].entries() == []
    path = saved(tmp_path / "made" / "now")
    table, notice = load_costs(path.parent, KEY)
    assert notice is None
    cells = (1, CHAIN, 64), (8, TREE, 64), (16, STATIC, 64)
    assert [table.ms(*cell) for cell in cells] == [1.5, 4.0, 2.5]
    content = json.loads(path.read_text())
    assert CostKey(**content["key"]) == KEY and content["key"]["jax"]
    assert content["costs"][0] == {
        "batch": 1, "depth": 3, "breadth": 1, "total_tokens": None, "paths": [], "length": 64,
        "ms": 1.5,
    }  # fmt: skip


def test_corrections_by_steps_are_not_stored(tmp_path):
    table = CostTable(KEY)
    table.put(1, CHAIN, 64, 1.5)
    table.update(1, CHAIN, 64, 9.0)
    save_costs(tmp_path, table)
    assert load_costs(tmp_path, KEY)[0].ms(1, CHAIN, 64) == 1.5 < table.ms(1, CHAIN, 64)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for folder, key in ((tmp_path / "file" / "below", KEY), (None, KEY), (tmp_path, None)):
        table = CostTable(key)
        table.put(1, CHAIN, 64, 2.0)
        save_costs(folder, table)
        assert table.ms(1, CHAIN, 64) == 2.0
    assert load_costs(None, KEY)[1] is None and len(list(tmp_path.iterdir())) == 1


WRONG = [("batch", 0), ("batch", True), ("depth", 1000), ("depth", "3"), ("breadth", None)]
WRONG += [("total_tokens", 0), ("paths", [[5]]), ("length", 0.5)]
WRONG += [("ms", ms) for ms in (0, float("nan"), 10**400)]


@pytest.mark.parametrize("name, value", WRONG)
def test_an_entry_that_is_not_a_cost_is_damage(tmp_path, name, value):
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    content["costs"][1][name] = value
    path.write_text(json.dumps(content))
    table, notice = load_costs(tmp_path, KEY)
    assert table.entries() == []
    assert notice == f"{path} is damaged: costs are measured anew"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 1', '{"costs": {}}', "\0"], ids=repr)
def test_a_damaged_file_is_noticed_and_written_anew(tmp_path, text):
    path = saved(tmp_path)
    path.write_text(text)
    table, notice = load_costs(tmp_path, KEY)
    assert table.entries() == [] and notice and "damaged" in notice
    table.put(1, CHAIN, 64, 3.0)
    save_costs(tmp_path, table)
    again, notice = load_costs(tmp_path, KEY)
    assert (again.ms(1, CHAIN, 64), again.ms(8, TREE, 64), notice) == (3.0, None, None)


@pytest.mark.parametrize("field", "cores moa_jax jax jaxlib driver weights dtype".split())
def test_costs_of_another_key_are_not_used(tmp_path, field):
    other = KEY._replace(**{field: "another"})
    assert cost_file(tmp_path, other) != cost_file(tmp_path, KEY)
    saved(tmp_path).rename(cost_file(tmp_path, other))
    table, notice = load_costs(tmp_path, other)
    assert table.entries() == [] and "another pair or device" in notice
    assert "\n" not in notice


def test_two_processes_keep_the_costs_of_both(tmp_path):
    saved(tmp_path)
    first, second = load_costs(tmp_path, KEY)[0], load_costs(tmp_path, KEY)[0]
    first.put(1, CHAIN, 64, 1.25)
    second.put(8, TREE, 64, 3.5)
    second.put(1, CHAIN, 512, 1.75)
    save_costs(tmp_path, first)
    save_costs(tmp_path, second)
    table, _ = load_costs(tmp_path, KEY)
    cells = (1, CHAIN, 64), (8, TREE, 64), (1, CHAIN, 512)
    assert [table.ms(*cell) for cell in cells] == [1.25, 3.5, 1.75]
    save_costs(tmp_path, first)
    assert load_costs(tmp_path, KEY)[0].ms(8, TREE, 64) == 3.5
