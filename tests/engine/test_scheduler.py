"""The scheduler and the slots, without a device: order of prefill and decode, and slots."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moa_jax.engine.prefix_cache import SlotTable
from moa_jax.engine.program_cache import GREEDY
from moa_jax.engine.requests import Request, RequestState
from moa_jax.engine.scheduler import MOST_CHUNKS, Scheduler

CHUNK = 32


def state(id: int, prompt: int | Sequence[int], new: int = 9, **rest) -> RequestState:
    tokens = (id,) * prompt if isinstance(prompt, int) else tuple(prompt)
    return RequestState(id, Request(tokens, new, (), **rest), print, None, GREEDY)


def scheduler(num_slots: int, kept: int = 0, reuses: bool = True) -> Scheduler:
    return Scheduler(SlotTable(num_slots + kept, reuses), num_slots, CHUNK)


def chunks(made: Scheduler) -> list[tuple[int, int, int]]:
    return [(each.state.id, each.start, each.end) for each in made.next_prefill()]


def test_prompts_are_read_in_the_order_in_which_they_came():
    made = scheduler(3)
    for id, prompt in enumerate((100, 40, 8, 8)):
        made.add(state(id, prompt))
    assert chunks(made) == [(0, 0, 32), (0, 32, 64), (0, 64, 96)]  # none decodes: three slots
    assert chunks(made) == [(0, 96, 100), (1, 0, 32), (1, 32, 40), (2, 0, 8)]
    assert [each.id for each in made.decoding()] == [0, 1, 2]
    assert not made.has_prefill() and chunks(made) == []  # the fourth waits for a slot
    made.finish(made.running[1])
    assert made.has_prefill() and chunks(made) == [(3, 0, 8)]
    assert [each.id for each in made.decoding()] == [0, 2, 3]


def test_answers_wait_for_one_chunk_of_a_long_prompt_at_a_time():
    made = scheduler(4)
    for id in range(3):
        made.add(state(id, 8))
    chunks(made)
    made.add(state(3, 70))
    assert [chunks(made) for _ in range(3)] == [[(3, 0, 32)], [(3, 32, 64)], [(3, 64, 70)]]


@pytest.mark.parametrize(("decode", "wait", "read"), [(1, 3, 3), (1, 9, MOST_CHUNKS), (3, 1, 1)])
def test_prefill_has_a_larger_budget_if_more_requests_wait_than_decode(decode, wait, read):
    made = scheduler(16)
    for id in range(decode):
        made.add(state(id, 1))
        chunks(made)
    for id in range(wait):
        made.add(state(10 + id, 2 * CHUNK))
    assert sum(end - start for _, start, end in chunks(made)) == read * CHUNK


# ---- slots --------------------------------------------------------------------------------

TEXT = tuple(range(100, 140))


def taken(table: SlotTable, prompt: Sequence[int], *answer: int) -> tuple[int, int, int]:
    """Assigns a slot to a request and releases it at its end."""
    found = table.assign(prompt)
    table.hold(found.slot, [*prompt, *answer])
    table.release(found.slot)
    return found


def test_the_next_turn_of_a_chat_takes_over_its_slot():
    table = SlotTable(2, reuses=True)
    assert taken(table, TEXT, 1, 2) == (0, 0, 0)
    assert taken(table, (*TEXT, 1, 2, 3, 4)) == (0, 0, len(TEXT) + 2)


def test_a_slot_whose_tokens_all_begin_the_prompt_is_continued():
    """Another free slot with as many of them keeps its longer text, and nothing is copied."""
    table = SlotTable(3, reuses=True)
    taken(table, (*TEXT, 1, 2))
    taken(table, TEXT)
    taken(table, tuple(range(40)))
    assert table.assign((*TEXT, 3)) == (1, 1, len(TEXT))


def test_a_common_prefix_is_copied_and_stays():
    """From a free slot or one in use, into the least recently used slot."""
    table = SlotTable(3, reuses=True)
    taken(table, (*TEXT, 1))
    taken(table, tuple(range(40)))
    assert table.shortest() == [2, 1, 0]
    first = table.assign((*TEXT, 2, 3))
    assert first == (2, 0, len(TEXT))  # an empty slot comes first
    table.hold(first.slot, (*TEXT, 2, 3))
    # The prompt begins with all tokens of the slot, which is in use.
    assert table.assign((*TEXT, 2, 3, 5)) == (1, 2, len(TEXT) + 2)
    assert len(table.free()) == 1 and table.assign((*TEXT, 7)).num_cached == len(TEXT)


def test_the_last_token_of_a_prompt_is_always_computed():
    table = SlotTable(2, reuses=True)
    taken(table, TEXT)
    assert table.assign(TEXT).num_cached == len(TEXT) - 1
