"""The order of measurements: warm-up does not count, and the first mode changes per question."""

from moa_jax.measure.turns import in_turns


def test_each_question_runs_all_modes_another_one_first():
    turns = [(turn.question, turn.way) for turn in in_turns(3, 2, warm_up=False)]
    assert turns == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0)]


def test_the_first_time_warms_up_and_is_not_counted():
    turns = list(in_turns(2, 3, repeats=2))
    assert [turn.is_counted for turn in turns] == [False] * 6 + [True] * 12
    counted = [(turn.question, turn.way) for turn in turns if turn.is_counted]
    assert sorted(counted) == sorted(
        2 * [(question, way) for question in (0, 1, 2) for way in (0, 1)]
    )
