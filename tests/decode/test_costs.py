"""The table of costs: what is put comes back from the disk, damage and other places do not."""

import dataclasses
import json
from pathlib import Path

import pytest

from moa_jax.config import BlockConfig, DraftShape, EagleConfig, LookupConfig, TargetConfig
from moa_jax.decode.costs import Costs, Place, costs_file, load_costs, pair_of, save_costs

PLACE = Place("cpu", "float32", None, "ab" * 32, 2)
TINY = TargetConfig("llama", 64, 2, BlockConfig(32, 4, 2, 8, 48, 1e-5, 1e4, None), True, 128)
CHAIN, TREE = DraftShape(3), DraftShape(7, 8, 62)


def saved(folder: Path) -> Path:
    """The file of two measured shapes."""
    costs = Costs(PLACE)
    costs.put(1, CHAIN, 1.5, rows=512)
    costs.put(8, TREE, 4.0)
    save_costs(folder, costs)
    return costs_file(folder, PLACE)


def test_what_is_put_comes_back_from_the_disk(tmp_path):
    assert load_costs(tmp_path, PLACE)[0].for_batch(1) == {}
    path = saved(tmp_path / "made" / "now")
    costs, notice = load_costs(path.parent, PLACE)
    assert notice is None
    assert (costs.for_batch(1), costs.for_batch(8)) == ({CHAIN: 1.5}, {TREE: 4.0})
    assert costs.ms(1, CHAIN) == 1.5 and costs.ms(8, CHAIN) is None
    content = json.loads(path.read_text())
    assert Place(**content["place"]) == PLACE and content["jax"]
    assert content["costs"][0] == {
        "batch": 1, "depth": 3, "breadth": 1, "total_tokens": None, "ms": 1.5, "rows": 512,
    }  # fmt: skip


def test_without_a_folder_costs_are_held_in_memory():
    costs, notice = load_costs(None, PLACE)
    costs.put(1, CHAIN, 2.0)
    save_costs(None, costs)
    assert (costs.for_batch(1), notice) == ({CHAIN: 2.0}, None)


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("no folder")
    costs = Costs(PLACE)
    costs.put(1, CHAIN, 2.0)
    save_costs(tmp_path / "file" / "below", costs)
    assert costs.ms(1, CHAIN) == 2.0


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 0},
        {"batch": True},
        {"depth": 1000},
        {"depth": "3"},
        {"breadth": None},
        {"total_tokens": 0},
        {"ms": 0},
        {"ms": float("nan")},
        {"ms": 10**400},
        {"rows": 0.5},
    ],
    ids=str,
)
def test_an_entry_that_is_no_cost_is_damage(tmp_path, change):
    path = saved(tmp_path)
    content = json.loads(path.read_text())
    content["costs"][1] |= change
    path.write_text(json.dumps(content))
    costs, notice = load_costs(tmp_path, PLACE)
    assert costs.for_batch(1) == {}
    assert notice == f"{path} is damaged: costs are measured anew"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"place": 1', '{"costs": {}}', "\0"], ids=repr)
def test_a_damaged_file_is_noticed_and_written_anew(tmp_path, text):
    path = saved(tmp_path)
    path.write_text(text)
    costs, notice = load_costs(tmp_path, PLACE)
    assert costs.for_batch(1) == {} and notice and "damaged" in notice
    costs.put(1, CHAIN, 3.0)
    save_costs(tmp_path, costs)
    again, notice = load_costs(tmp_path, PLACE)
    assert (again.for_batch(1), again.for_batch(8), notice) == ({CHAIN: 3.0}, {}, None)


def test_the_file_of_another_place_is_not_believed(tmp_path):
    other = PLACE._replace(cores=64)
    assert costs_file(tmp_path, other) != costs_file(tmp_path, PLACE)
    saved(tmp_path).rename(costs_file(tmp_path, other))
    costs, notice = load_costs(tmp_path, other)
    assert costs.for_batch(1) == {} and "another pair or device" in notice
    assert "\n" not in notice


def test_two_processes_keep_what_both_measured(tmp_path):
    saved(tmp_path)
    first, second = load_costs(tmp_path, PLACE)[0], load_costs(tmp_path, PLACE)[0]
    first.put(1, CHAIN, 1.25)
    second.put(8, TREE, 3.5)
    second.put(2, CHAIN, 1.75)
    save_costs(tmp_path, first)
    save_costs(tmp_path, second)
    costs, _ = load_costs(tmp_path, PLACE)
    assert (costs.ms(1, CHAIN), costs.ms(8, TREE), costs.ms(2, CHAIN)) == (1.25, 3.5, 1.75)
    assert second.ms(1, CHAIN) == 1.25  # what the other one measured since we read
    save_costs(tmp_path, first)
    assert load_costs(tmp_path, PLACE)[0].ms(8, TREE) == 3.5


def test_drawn_candidates_cost_what_the_likeliest_do(tmp_path):
    costs = Costs(PLACE)
    drawn = dataclasses.replace(CHAIN, sampled=True)
    static = DraftShape.static([[0], [1]])
    for shape in (drawn, static):
        costs.put(1, shape, 9.0)
        assert costs.for_batch(1) == {} and costs.ms(1, shape) is None
    costs.put(1, CHAIN, 1.5)
    assert costs.ms(1, drawn) == 1.5


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(ms):
    with pytest.raises(ValueError, match="a round of"):
        Costs(PLACE).put(1, CHAIN, ms)


def test_pairs_of_other_sizes_have_other_costs():
    wider = dataclasses.replace(TINY, vocab_size=TINY.vocab_size + 1)
    eagle = EagleConfig(2, 48)
    pairs = [
        pair_of(TINY),
        pair_of(wider),
        pair_of(TINY, "lookup", LookupConfig()),
        pair_of(TINY, "eagle", eagle),
        pair_of(TINY, "eagle2", eagle),
        pair_of(TINY, "eagle", dataclasses.replace(eagle, intermediate_size=64)),
        pair_of(TINY, "eagle", eagle, 32),
    ]
    assert len(set(pairs)) == len(pairs)
    assert pair_of(TINY, "eagle", EagleConfig(2, 48)) == pairs[3]
