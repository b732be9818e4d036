"""Calls of one generation that use different draft shapes.

The drafter's caches lag after rounds of plain decoding, and are complete again after
`sync_drafter`. test_same_text.py shows that the text is plain decoding's.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.session import GREEDY
from moa_jax.decode.step import CATCH_UP
from moa_jax.speculation.controller import LIMIT, NO_DRAFT, DraftController
from tests.decode.test_chunks import PROMPTS, assert_same_rows
from tests.decode.tiny import TINY, drafter, follow, target
from tests.pairs import NO_STOP

CHAIN, LONG, TREE = DraftShape(3), DraftShape(5), DraftShape(3, 2, 4)
NEW = 60
SOME = PROMPTS[:4]
BEHIND = 15  # rounds of a call; after three, the drafter lags by more than a turn holds


@functools.cache
def plain() -> Session:
    return Session(target())


@functools.cache
def session(name: str) -> Session:
    return Session(target(), drafter(name), CHAIN, ways=(LONG,))


def scripted(name: str, *choices: tuple[DraftShape, int]) -> Session:
    return follow(session(name), *choices)


@pytest.mark.slow
def test_a_drafted_round_of_a_lagging_drafter_leaves_it_lagging():
    """The drafter reads the round's own tokens; the tokens before them are still unread."""
    found = session("moa-1").begin([PROMPTS[1]], 20, NO_STOP, GREEDY)
    known = lambda: found.state.round.draft_lag.draft_len_B.tolist()
    before = known()
    found.take(NO_DRAFT, 4)
    found._lag = 0  # so that no catch-up runs
    found.take(CHAIN, 1)
    assert known() == before == [len(PROMPTS[1])]
    found._lag = 1
    found.take(CHAIN, 1)
    assert known() == found.state.round.length_B.tolist()


@pytest.mark.slow
def test_a_lagging_drafter_reads_the_rows_of_windows_before_they_are_dropped(monkeypatch):
    """A ring has 77 rows, and a call of 100 plain rounds follows a prompt of 61 tokens."""
    monkeypatch.setattr("moa_jax.model.cache.TILE", 1)
    pair = TINY.gemma.target(), TINY.gemma.drafter("moa-1")
    own = Session(*pair, CHAIN, ways=(LONG,), chunk=4, cache_rows=256)
    found = own.begin([PROMPTS[1]], 110, NO_STOP, GREEDY)
    assert found.take(NO_DRAFT, 100).rounds == 100 and found._sync_turns == 1
    found.catch_up()
    text = [*PROMPTS[1], *found.tokens()[0]]
    read = own.begin([text[:-1]], 9, NO_STOP, GREEDY)
    assert read.tokens() == [text[-1:]]
    assert own.room.rows_for(1) > read.state.round.target_caches[0].k_BKSE.shape[2] == 77
    caches = (each.state.round.draft_cache for each in (found, read))
    assert_same_rows(*caches, [len(text) - 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moa-1", "eagle3"])
def test_sync_drafter_reads_the_tokens_of_plain_rounds(name):
    """After `sync_drafter`, the caches and drafts equal those after a longer prompt."""
    found = scripted(name, (NO_DRAFT, BEHIND)).begin(SOME, NEW, NO_STOP, GREEDY)
    for _ in range(3):
        assert found.call()[1] == BEHIND
    assert CATCH_UP < 3 * BEHIND < 2 * CATCH_UP
    late = jax.tree.map(np.asarray, found.state.round.draft_cache)
    texts = [[*prompt, *new] for prompt, new in zip(SOME, found.tokens(), strict=True)]
    read = session(name).begin([text[:-1] for text in texts], NEW, NO_STOP, GREEDY)
    assert read.tokens() == [text[-1:] for text in texts]
    for each in (found, read):
        each.take(CHAIN, 1)
    assert [new[3 * BEHIND :] for new in found.tokens()] == read.tokens()
    whole, lengths = read.state.round.draft_cache, [len(text) - 1 for text in texts]
    assert_same_rows(found.state.round.draft_cache, whole, lengths, first=1)
    if jax.tree.leaves(whole):
        with pytest.raises(AssertionError):
            assert_same_rows(late, whole, lengths, first=1)


@pytest.mark.parametrize("rounds", [1, CATCH_UP + 1])
def test_the_drafter_reads_the_last_token_too(rounds):
    """This holds for a lag of one token, too, and for one token more than a turn holds."""
    found = scripted("moa-1").begin(SOME[:1], NEW, NO_STOP, GREEDY)
    found.take(NO_DRAFT, rounds)
    now = found.state.round
    assert int(now.length_B[0] - now.draft_lag.draft_len_B[0]) == rounds
    found.catch_up()
    now = found.state.round
    assert int(now.length_B[0]) == int(now.draft_lag.draft_len_B[0])


@pytest.mark.slow
def test_truncated_rounds_are_not_observed():
    """The tokens that a row accepts in its last round are no evidence for the drafter."""
    found = scripted("moa-1", (CHAIN, 3))
    rows = found.generate(SOME, [17, 1, 9, 17], NO_STOP)  # one ends before its first round
    observed = [n for _, accepted, _ in found.controller.observed for n in accepted]
    counted = [n - 1 for row in rows for n in row.accept_lengths[:-1]]
    assert sorted(observed) == sorted(counted)


@pytest.mark.slow
def test_a_drafter_without_weights_drafts_what_repeats_and_no_more():
    """Without costs, a miss is followed by plain rounds, and several rows decode plainly."""
    found, rows = Session(target(), drafter("lookup"), CHAIN, ways=(LONG,)), []
    new, *_ = plain().generate([SOME[1]], NEW, NO_STOP)
    prompts = [SOME[1], [*SOME[1], *new.token_ids[:6]]]  # the second one repeats from here on
    for prompt, told in zip(prompts, (0, 6), strict=True):
        found.controller = DraftController(4)
        rows += found.generate([prompt], 24, NO_STOP)
        assert rows[-1].token_ids == new.token_ids[told:][:24]
    estimated = sum(1.4 if drafted else 1.0 for drafted in rows[0].drafted)
    assert rows[0].drafted[:3] == [2, 0, 0] and estimated <= 23 + LIMIT
    assert rows[1].accept_lengths[:2] == [3, 2] and rows[1].drafted[:2] == [2, 2]
    assert not found.sync_ms  # a sync would add its milliseconds to the estimated plain rounds
    both = found.generate([SOME[1]] * 2, 24, NO_STOP)
    assert all(row.token_ids == new.token_ids[:24] for row in both)
    assert {drafted for row in both for drafted in row.drafted} == {0}
    found.background.wait()
    assert not found._programs[LONG]  # nothing is compiled beside an answer
