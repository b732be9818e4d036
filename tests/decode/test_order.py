"""Whose prompt is read next."""

from __future__ import annotations

import pytest

from moa_jax.decode.order import MOST_CHUNKS, Order, chunks_between


@pytest.mark.parametrize(
    ("prompts", "answers", "chunks"),
    [(0, 0, 1), (1, 0, 1), (3, 0, 3), (9, 0, MOST_CHUNKS), (1, 8, 1), (9, 8, 1), (16, 8, 2)],
)
def test_more_chunks_where_more_prompts_wait_than_answers_go_on(prompts, answers, chunks):
    assert chunks_between(prompts, answers) == chunks


def read_all(chunks_of: dict[str, int], coming: dict[int, tuple[str, int]]) -> str:
    """The chunks in their order; `coming` has prompts by the turn in which they come."""
    order, left, read = Order(), dict(chunks_of), ""
    while left:
        left |= dict([coming.pop(len(read))]) if len(read) in coming else {}
        name = order.next(list(left), left.__getitem__)
        read += name
        left[name] -= 1
        if not left[name]:
            del left[name]
    return read


def test_short_prompts_pass_by_a_long_one_that_still_gets_every_other_chunk():
    assert read_all({"A": 4, "B": 1, "C": 1}, {}) == "ABACAA"
    assert read_all({"A": 5}, {1: ("B", 1), 3: ("C", 1)}) == "AABACAA"


def test_prompts_of_one_length_are_read_one_after_the_other():
    """Side by side all of them would end late."""
    assert read_all({"A": 2, "B": 2, "C": 2}, {}) == "AABBCC"


def test_a_stream_of_short_prompts_starves_nobody():
    coming = {turn: (chr(ord("a") + turn), 1) for turn in range(20)}
    assert read_all({"A": 6}, coming)[:10] == "AaAbAcAdAA"


@pytest.mark.parametrize("before", [0, 1])
def test_the_oldest_has_its_turn_though_others_are_read_to_their_end_between(before):
    """Where only one has a seat, all but the first of its chunks are nobody's choice."""
    order, left = Order(), {"A": 9} | {name: 2 for name in "BCDEF"}
    for _ in range(before):
        order.next("BA", left.__getitem__)
    begun = ""
    while left:
        begun += (name := order.next(list(left), left.__getitem__))
        for _ in range(left.pop(name) - 1):
            assert order.next([name], lambda _: 1) == name
    assert "A" in begun[:2]
