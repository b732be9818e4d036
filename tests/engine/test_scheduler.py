"""The scheduler and the slots, which know no device: who is read, who decodes, where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moa_jax.engine.prefix_cache import LEAST_REUSED, SlotTable
from moa_jax.engine.requests import Phase, Request, RequestState
from moa_jax.engine.scheduler import MOST_CHUNKS, Scheduler

CHUNK = 32


def state(id: int, prompt: int | Sequence[int], new: int = 9, **rest) -> RequestState:
    tokens = (id,) * prompt if isinstance(prompt, int) else tuple(prompt)
    return RequestState(id, Request(tokens, new, (), **rest), print, None, False)


def scheduler(num_slots: int, kept: int = 0, reuses: bool = True) -> Scheduler:
    return Scheduler(SlotTable(num_slots + kept, reuses), num_slots, CHUNK)


def chunks(made: Scheduler) -> list[tuple[int, int, int]]:
    return [(each.state.id, each.start, each.end) for each in made.next_prefill()]


def test_prompts_are_read_in_the_order_in_which_they_came():
    made = scheduler(3)
    for id, prompt in enumerate((100, 40, 8, 8)):
        made.add(state(id, prompt))
    assert chunks(made) == [(0, 0, 32), (0, 32, 64), (0, 64, 96)]  # nobody decodes: three slots
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
def test_more_is_read_where_more_wait_than_decode(decode, wait, read):
    made = scheduler(16)
    for id in range(decode):
        made.add(state(id, 1))
        chunks(made)
    for id in range(wait):
        made.add(state(10 + id, 2 * CHUNK))
    assert sum(end - start for _, start, end in chunks(made)) == read * CHUNK


def test_short_prompts_share_a_step_but_not_without_end():
    """A short chunk costs more than its share of tokens."""
    made = scheduler(64)
    made.add(first := state(0, 1))
    chunks(made)
    assert first.phase is Phase.DECODE
    for id in range(1, 60):
        made.add(state(id, 1))
    assert len(chunks(made)) == MOST_CHUNKS * MOST_CHUNKS


def test_who_leaves_in_any_phase_leaves_no_trace():
    made = scheduler(1)
    waiting, reading, decoding = state(1, 40), state(2, 70), state(3, 8)
    for each in (decoding, reading, waiting):
        made.add(each)
    chunks(made)
    made.finish(decoding)
    chunks(made)
    assert reading.phase is Phase.PREFILL and waiting.phase is Phase.WAITING
    made.finish(waiting)
    made.finish(reading)
    made.finish(reading)
    assert {each.phase for each in (waiting, reading, decoding)} == {Phase.FINISHED}
    assert not made.running and not made.waiting and made.slots.num_free == 1


# ---- slots --------------------------------------------------------------------------------

TEXT = tuple(range(100, 140))


def taken(table: SlotTable, prompt: Sequence[int], *answer: int) -> tuple[int, int, int]:
    """A request comes and goes."""
    found = table.assign(prompt)
    table.hold(found.slot, [*prompt, *answer])
    table.release(found.slot)
    return found


def test_the_next_turn_of_a_chat_takes_over_its_slot():
    table = SlotTable(2, reuses=True)
    assert taken(table, TEXT, 1, 2) == (0, 0, 0)
    assert taken(table, (*TEXT, 1, 2, 3, 4)) == (0, 0, len(TEXT) + 2)


def test_a_common_prefix_is_copied_and_stays():
    """From a free slot and from one in use, into the slot that was used longest ago."""
    table = SlotTable(3, reuses=True)
    taken(table, (*TEXT, 1))
    taken(table, tuple(range(40)))
    first = table.assign((*TEXT, 2, 3))
    assert first == (2, 0, len(TEXT))  # an empty slot comes first
    table.hold(first.slot, (*TEXT, 2, 3))
    assert table.assign((*TEXT, 2, 4, 5)) == (1, 2, len(TEXT) + 1)
    assert table.num_free == 1 and table.assign((*TEXT, 7)).num_cached == len(TEXT)


def test_the_last_token_of_a_prompt_is_always_computed():
    table = SlotTable(2, reuses=True)
    taken(table, TEXT)
    assert table.assign(TEXT).num_cached == len(TEXT) - 1


def test_few_tokens_are_not_reused():
    table = SlotTable(2, reuses=True)
    taken(table, TEXT)
    common = TEXT[: LEAST_REUSED - 1]
    assert table.assign((*common, 1, 2)).num_cached == 0
    table = SlotTable(2, reuses=True)
    taken(table, TEXT)
    assert table.assign((*TEXT[:LEAST_REUSED], 1, 2)).num_cached == LEAST_REUSED


def test_texts_are_forgotten_and_need_not_be_kept():
    table = SlotTable(2, reuses=True)
    taken(table, TEXT)
    assert table.num_kept == 1
    table.clear()
    assert table.num_kept == 0 and table.assign(TEXT).num_cached == 0
    table = SlotTable(2, reuses=False)
    taken(table, TEXT)
    assert table.num_kept == 0 and table.assign(TEXT).num_cached == 0


def test_a_scored_prompt_is_computed_whole_and_serves_others():
    made = scheduler(2)
    for id in range(2):
        made.add(state(id, TEXT, top_logprobs=1, prompt_logprobs=True))
        assert sum(end - start for _, start, end in chunks(made)) == min(len(TEXT), CHUNK)
        while made.has_prefill():
            chunks(made)
    made.finish(made.running[0])
    made.add(state(2, (*TEXT, 5)))
    (chunk,) = made.next_prefill()
    assert (chunk.start, chunk.end, chunk.copy_from) == (len(TEXT), len(TEXT) + 1, None)


def test_a_request_that_ends_keeps_what_its_caches_surely_hold():
    """The newest token is in no cache, and a chunk that is sent counts."""
    made = scheduler(1)
    made.add(one := state(0, TEXT))
    chunks(made)
    assert one.known_tokens() == list(TEXT[:CHUNK])
    chunks(made)
    one.answer += [7, 8, 9]
    assert one.known_tokens() == [*TEXT, 7, 8]
    made.finish(one)
    held = made.slots.assign((*TEXT, 7, 8, 9, 10))
    assert held.num_cached == len(TEXT) + 2


def test_assignments_are_those_of_a_search_by_hand():
    """Random requests come and go: each gets a free slot and the longest prefix of all."""
    random = np.random.default_rng(0)
    table, held, used = SlotTable(5, reuses=True), {}, []
    for _ in range(300):
        prompt = tuple(random.integers(0, 2, 1 + random.integers(40)).tolist())
        prompt = (9,) * LEAST_REUSED + prompt
        if len(used) == 4 or (used and random.random() < 0.4):
            slot = used.pop(random.integers(len(used)))
            table.release(slot)
        longest = 0
        for tokens in held.values():
            same = 0
            while same < min(len(tokens), len(prompt) - 1) and tokens[same] == prompt[same]:
                same += 1
            longest = max(longest, same)
        found = table.assign(prompt)
        assert found.slot not in used
        assert found.num_cached == (longest if longest >= LEAST_REUSED else 0)
        if found.num_cached:
            assert tuple(held[found.source][: found.num_cached]) == prompt[: found.num_cached]
        table.hold(found.slot, prompt)
        held[found.slot] = prompt
        used.append(found.slot)
