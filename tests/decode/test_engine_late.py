"""The drafter of an engine that chooses reads prompts and answers no sooner than it drafts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moa_jax.config import DraftShape
from moa_jax.decode.auto import PLAIN
from moa_jax.decode.engine import Engine, Request, seats, shelf
from moa_jax.decode.engine.prefixes import Kept, Prefixes
from moa_jax.decode.engine.rows import EVERY
from moa_jax.decode.engine.shelf import Size
from tests.decode.engines import (
    CHAIN,
    LAWS,
    LONG,
    NO_STOP,
    Listener,
    alone,
    answers,
    assert_as_alone,
    engine_of,
    failing,
    kept,
    serving,
    split,
)
from tests.decode.test_chunks import KINDS

NEW, FAST = 40, ("moa-1", "eagle")
BEGINNING = tuple((5 + 3 * i * i) % 61 for i in range(70))  # two chunks, and three turns
TAILS = [(), (10, 8, 7), (10, 8, 6, 5), tuple(range(30))]
REQUESTS = [Request((*BEGINNING, *tail), NEW, NO_STOP, LAWS[i]) for i, tail in enumerate(TAILS)]
PLAIN_CALLS = 4  # of a text, before those that draft


@pytest.fixture(autouse=True)
def _hidden_in_memory(monkeypatch):
    """The kind that is bundled, which reads rows of the target and its final-normed state."""
    method, config = KINDS["moa-0"]
    monkeypatch.setitem(KINDS, "moa-hidden", (method, replace(config, hidden_in_memory=True)))


def choosing(name: str) -> Engine:
    """An engine that may choose between a chain and plain decoding."""

    def make() -> Engine:
        engine = engine_of(name, CHAIN, ways=(LONG,), chunk=64)
        for size in (engine.shelf.largest, Size(1, engine.shelf.rows[0])):
            for way in (PLAIN, CHAIN):
                engine.shelf.make_call(size, way, EVERY)
        return engine

    return kept((name, "choosing"), make)


def stopped() -> Request:
    """Its answer ends with the first token, so the drafter never reads all that is kept of it."""
    request = Request(BEGINNING[:67], 2, NO_STOP)
    return replace(request, stop_ids=(alone(request)[0][0],))


class Reader:
    """Has an engine answer, one request after the other, and counts what it runs."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, *plain_calls: int) -> None:
        """So many first calls of each text are plain decoding's; the last number goes on."""
        self._engine, self._patch, self._plain_calls = engine, patch, plain_calls
        self._calls, self._most_plain, self.ran = 0, plain_calls[-1], Counter[str]()
        if engine.session.chooser:
            patch.setattr(engine._pace, "_way", self._way)
            patch.setattr(engine._pace, "would_draft", lambda batch: not self._most_plain)
        run = engine.shelf.run

        def noted(name, *arrays):
            self.ran[name[0]] += 1
            return run(name, *arrays)

        patch.setattr(engine.shelf, "run", noted)
        patch.setattr("moa_jax.decode.engine.pace.LONGEST_S", 1e9)  # or slow calls are cut shorter

    def _way(self, batch: int, programs, *alone: bool) -> tuple[DraftShape, int]:
        self._calls += 1
        return (PLAIN if self._calls <= self._most_plain else CHAIN), 3

    def drafts(self, at_once: bool) -> tuple[tuple[int, int], list[Kept]]:
        """Tokens drafted and accepted where the drafter reads prompts `at_once` or late; and texts
        that were kept, of which each prompt uses some."""
        readings, kept = self._engine._readings, Prefixes(1 << 30)
        times = math.inf if at_once else 0
        read_on, before = type(readings).read_on, self._engine.load()
        forced = lambda task, _: read_on(readings, task, lambda: times)
        self._patch.setattr(readings, "read_on", forced)
        self._patch.setattr(readings, "prefixes", kept)
        for index, request in enumerate([stopped(), *REQUESTS], start=-1):
            self._calls = 0
            self._most_plain = self._plain_calls[min(max(index, 0), len(self._plain_calls) - 1)]
            assert_as_alone([request], answers(self._engine, [request]))
        found = self._engine.load()
        assert found.prefix_hits - before.prefix_hits == len(REQUESTS)
        drafted = found.drafted_tokens - before.drafted_tokens
        accepted = found.accepted_tokens - before.accepted_tokens
        return (drafted, accepted), in_order(kept)


def in_order(kept: Prefixes) -> list[Kept]:
    """The texts, each with its answer, as prompts make room for what begins with them."""
    return sorted(kept._kept, key=lambda text: text.tokens.tolist())


def assert_same_drafter(kept: Sequence[Kept], others: Sequence[Kept]) -> int:
    """The drafter holds the same of these texts, as far as it has read; how many it has read.

    The first row and the last one are for roots.
    """
    whole = 0
    for one, other in zip(kept, others, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        known = int(one.live.now.draft_lag.draft_len_B[0])
        whole += known == len(one.tokens)
        caches = [jax.tree.leaves(each.live.now.draft_cache) for each in (one, other)]
        for ours, theirs in zip(*caches, strict=True):
            axis = 0 if ours.ndim == 2 else 1  # of a text, or of (K, S, E)
            rows = range(1, known - 1)
            ours, theirs = (np.take(np.asarray(leaf)[0], rows, axis) for leaf in (ours, theirs))
            largest = abs(theirs).max(initial=0)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * largest)
    return whole


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in [*KINDS, "moa-hidden"]
    ],
)
def test_drafts_are_as_good_however_late_a_text_is_read(name, monkeypatch):
    """Prompts that begin alike are read from there on, too, by a drafter that did not read it."""
    never_late, kept = Reader(serving(name), monkeypatch, 0).drafts(at_once=True)
    for plain_calls in [(0,), (PLAIN_CALLS,), (1000, 0)]:
        reader = Reader(choosing(name), monkeypatch, *plain_calls)
        at_once, late = reader.drafts(at_once=True), reader.drafts(at_once=False)
        assert at_once[0] == late[0]
        assert plain_calls != (0,) or late[0] == never_late
        never_drafted = plain_calls[0] == 1000  # the first text
        for found in (at_once[1], late[1]):
            assert assert_same_drafter(found, kept) == len(REQUESTS) - never_drafted


@pytest.mark.parametrize("which", ["all must be read in pieces", "one ends that has more left"])
def test_texts_side_by_side_are_read_as_far_as_they_are_said_to_be(which, monkeypatch):
    """Some have more to be read than others, and some end before the drafter reads them."""
    requests = [Request(BEGINNING[:45], 8, NO_STOP), Request(BEGINNING[30:50], 60, NO_STOP)]
    if "pieces" in which:
        new = (6, 14, 22, 70)
        requests = [replace(r, max_new_tokens=n) for r, n in zip(REQUESTS, new, strict=True)]
    expected = Prefixes(1 << 30)
    monkeypatch.setattr(serving("moa-1")._readings, "prefixes", expected)
    for request in requests:
        assert_as_alone([request], answers(serving("moa-1"), [request]))
    engine, found = choosing("moa-1"), []
    monkeypatch.setattr(seats, "ROUNDS_OF_A_MOVE", 1000)  # who is left alone stays in it, too
    for plain_calls in range(2, 10):
        reader, kept = Reader(engine, monkeypatch, plain_calls), Prefixes(1 << 30)
        monkeypatch.setattr(engine._readings, "prefixes", kept)
        monkeypatch.setattr(engine._pace, "would_draft", lambda batch: False)
        assert_as_alone(requests, answers(engine, requests))
        found.append(assert_same_drafter(in_order(kept), in_order(expected)))
        assert found[-1] >= 1 and reader.ran["catch_up"] >= (2 if "pieces" in which else 1)
    assert min(found) < len(requests)


def test_a_trial_drafts_before_its_drafter_has_read(monkeypatch):
    """That costs no catching up, tells nothing of what is accepted, and is made up for later."""
    expected, kept = Prefixes(1 << 30), Prefixes(1 << 30)
    monkeypatch.setattr(serving("moa-1")._readings, "prefixes", expected)
    assert_as_alone(REQUESTS[:1], answers(serving("moa-1"), REQUESTS[:1]))
    engine, heard = choosing("moa-1"), []
    reader = Reader(engine, monkeypatch, 6)

    def way(batch: int, programs, *alone: bool) -> tuple[DraftShape, int]:
        found = reader._way(batch, programs, *alone)
        engine._pace.is_trying = reader._calls in (2, 4)
        if reader._calls == 5:
            assert reader.ran["catch_up"] == 0
        return (CHAIN, 3) if engine._pace.is_trying else found

    def heard_of(way: DraftShape, accepted: list[int], rounds: int) -> None:
        heard.append((way, len(accepted)))

    monkeypatch.setattr(engine._pace, "_way", way)
    monkeypatch.setattr(engine._pace, "heard", heard_of)
    monkeypatch.setattr(engine._readings, "prefixes", kept)
    monkeypatch.setattr(engine._pace, "would_draft", lambda batch: False)
    assert_as_alone(REQUESTS[:1], answers(engine, REQUESTS[:1]))
    assert assert_same_drafter(in_order(kept), in_order(expected)) == 1
    assert heard[:6] == [(PLAIN, 0)] * 6 and heard[6][0] == CHAIN and heard[6][1] > 0
    assert reader.ran["catch_up"] == 1


def test_a_probe_of_texts_that_are_all_late_is_over(monkeypatch):
    """It tells nothing; but a probe that nobody hears of would be sent for ever."""
    engine, heard = choosing("moa-1"), []
    Reader(engine, monkeypatch, 0)
    monkeypatch.setattr(engine._pace, "would_draft", lambda batch: False)
    monkeypatch.setattr(engine._seats, "prepared", lambda program, plain: program)
    monkeypatch.setattr(engine._pace, "heard", lambda *said: heard.append(said))
    assert_as_alone(REQUESTS[:1], answers(engine, REQUESTS[:1]))
    assert all(way == CHAIN and not accepted for way, accepted, _ in heard)
    assert sum(rounds for *_, rounds in heard) >= NEW // 4


@pytest.mark.parametrize("answer", [6, 100])  # calls, in which a catch-up reads all or part of it
def test_newcomers_put_drafts_off_for_a_while_only(answer):
    """One text ends with each few calls, and another one comes, whose prompt has 200 tokens."""
    read = []
    stub = SimpleNamespace(catch_up=lambda size, state, ended: (read.append(size), (state, 32))[1])
    four = seats.Seats(stub, None, 0, lambda slots: False)
    four._size, plain, chain = Size(4, 512), ("plain", PLAIN, EVERY), (Size(4, 512), CHAIN, EVERY)
    comes = lambda id: seats.Text(id, [], 400, None, EVERY, unread=200)
    four._texts = [comes(id) for id in range(4)]

    def waited(most: int) -> int:
        for call in range(most):
            if call and call % max(1, answer // 4) == 0:
                four._texts[call % 4] = comes(call)
            if four.prepared(chain, plain) == chain:
                return call
        raise AssertionError(f"no draft in {most} calls")

    needed = -(-200 // 32)
    assert waited(50) <= seats.PATIENCE * needed
    if answer == 6:  # somebody is always late, and drafts go on beside the reading
        assert four.most_unread and len(read) == seats.PATIENCE * needed
        assert waited(2) == 0 and len(read) == seats.PATIENCE * needed + 1
    else:
        assert not four.most_unread
    read.clear()
    four._texts = [comes(id) for id in range(4)]
    four.prepared((Size(4, 512), PLAIN, EVERY), plain)  # drafting was given up
    assert not read and waited(50) >= needed - 1


def test_a_drafter_that_cannot_catch_up_ends_those_who_sit(monkeypatch):
    engine = choosing("moa-1")
    Reader(engine, monkeypatch, 6)
    monkeypatch.setattr(engine._pace, "would_draft", lambda batch: False)
    failing(engine, monkeypatch, "catch_up", [0])
    lost, fine = split(found := answers(engine, REQUESTS))
    assert lost
    assert_as_alone([REQUESTS[i] for i in fine], [found[i] for i in fine])
    assert_as_alone(REQUESTS, answers(engine, REQUESTS))


def test_a_prompt_is_read_behind_its_first_token_where_nobody_waits(monkeypatch):
    """However little the drafter may read at once; the first call drafts."""
    engine, order = choosing("moa-1"), []
    Reader(engine, monkeypatch, 0)
    run = engine.shelf.run
    monkeypatch.setattr(
        engine.shelf, "run", lambda name, *arrays: (order.append(name[0]), run(name, *arrays))[1]
    )
    monkeypatch.setattr(shelf, "LIGHTER", 0)  # 64 tokens at once, for a prompt of 100
    monkeypatch.setattr(engine._readings, "prefixes", Prefixes(0))
    monkeypatch.setattr(engine._pace, "would_draft", lambda batch: True)
    before = engine.load().rounds_by_way.get(PLAIN, 0)
    assert_as_alone(REQUESTS[3:], answers(engine, REQUESTS[3:]))
    reading = [name for name in order if name in ("read", "first", "catch_up", "call")][:6]
    assert reading == ["read", "read", "first", "catch_up", "catch_up", "call"]
    assert engine.load().rounds_by_way.get(PLAIN, 0) == before


def test_nobody_waits_for_the_drafter_of_another_prompt(monkeypatch):
    """All prompts are read before the drafter reads any."""
    engine, order = choosing("moa-1"), []
    Reader(engine, monkeypatch, 0)
    run = engine.shelf.run
    monkeypatch.setattr(
        engine.shelf, "run", lambda name, *arrays: (order.append(name[0]), run(name, *arrays))[1]
    )
    monkeypatch.setattr(engine._readings, "prefixes", Prefixes(0))
    monkeypatch.setattr(engine._pace, "would_draft", lambda batch: True)
    requests = [Request(BEGINNING[:40], 6, NO_STOP), Request(BEGINNING[:50], 6, NO_STOP)]
    assert_as_alone(requests, answers(engine, requests))
    assert order.index("catch_up") > [i for i, name in enumerate(order) if name == "read"][1]


@pytest.mark.parametrize("drafts", [True, False])
def test_who_joins_others_is_read_alone_where_they_are_drafted_for(drafts, monkeypatch):
    """In its own row: among others the drafter would read as many rows of each.

    What is expected of the newcomer is asked before, and the call behind it tells no time.
    """
    engine, order, second = choosing("moa-1"), [], Listener()
    Reader(engine, monkeypatch, 0 if drafts else 1000)
    run, choose, unread = engine.shelf.run, engine._pace.choose, []
    send, joined, flights = engine._seats.send, [], []

    def noted(name, *arrays):
        order.append(name[:2])
        return run(name, *arrays)

    def chosen(slots, *others):
        unread.append((slots, others[-1]))
        return choose(slots, *others)

    def sent(*args):
        flights.append(send(*args))
        return flights[-1]

    monkeypatch.setattr(engine.shelf, "run", noted)
    monkeypatch.setattr(engine._pace, "choose", chosen)
    monkeypatch.setattr(engine._pace, "joins", lambda *text: joined.append(text))
    monkeypatch.setattr(engine._pace, "would_draft", lambda slots: drafts and bool(joined))
    monkeypatch.setattr(engine._seats, "send", sent)
    monkeypatch.setattr(engine._readings, "prefixes", Prefixes(0))
    first, asked = Listener(), []

    def hear(news):
        first(news)
        if len(first.all) == 2 and not asked:
            asked.append(engine.submit(REQUESTS[3], second))

    engine.submit(REQUESTS[0], hear)
    first.wait(), second.wait()
    assert_as_alone([REQUESTS[0], REQUESTS[3]], [first, second])
    one = Size(1, engine.shelf.rows[0])
    read = [size for name, size in order[order.index(("call", one)) :] if name == "catch_up"]
    assert read == [one] * drafts and joined == [(len(REQUESTS[3].prompt_ids), 1)]
    assert next(f for f in flights if sum(map(bool, f.texts)) == 2).caught_up == drafts
    assert all(tokens == 0 for slots, tokens in unread if slots > 1) == drafts


def test_where_all_must_be_read_a_newcomer_is_not_read_alone(monkeypatch):
    """The drafter then reads those who sit as well, and the newcomer's row with them."""
    engine = choosing("moa-1")
    Reader(engine, monkeypatch, 0)
    monkeypatch.setattr(engine._readings, "prefixes", Prefixes(0))
    monkeypatch.setattr(engine._pace, "would_draft", lambda slots: True)
    catch_up, sizes = engine.shelf.catch_up, []
    monkeypatch.setattr(
        engine.shelf, "catch_up", lambda size, *rest: (sizes.append(size), catch_up(size, *rest))[1]
    )
    requests = [Request(BEGINNING[n : n + 50], 6, NO_STOP) for n in (0, 10)]  # in either order
    listeners = answers(engine, requests)
    assert sizes[0].slots > 1
    assert_as_alone(requests, listeners)


def test_a_newcomer_that_cannot_be_caught_up_is_lost_alone(monkeypatch):
    engine, listeners = choosing("moa-1"), [Listener(), Listener()]
    Reader(engine, monkeypatch, 0)
    monkeypatch.setattr(engine._readings, "prefixes", Prefixes(0))
    monkeypatch.setattr(engine._pace, "would_draft", lambda slots: True)

    def hear(news):
        listeners[0](news)
        if len(listeners[0].all) == 2:
            failing(engine, monkeypatch, "catch_up", [0])
            engine.submit(REQUESTS[3], listeners[1])

    engine.submit(REQUESTS[0], hear)
    for listener in listeners:
        listener.wait()
    lost, fine = split(listeners)
    assert (lost, fine) == ([1], [0])
    assert_as_alone(REQUESTS[:1], listeners[:1])


@pytest.mark.parametrize("sits", [True, False])
def test_who_sits_waits_for_one_reading_of_another_prompt(sits, monkeypatch):
    """What is left of a long one is read among those who sit; somebody alone reads all at once."""
    engine, second = choosing("moa-1"), Listener()
    Reader(engine, monkeypatch, 0)
    monkeypatch.setattr(engine._seats, "_would_draft", lambda slots: True)
    monkeypatch.setattr(shelf, "LIGHTER", 0)  # 64 tokens at once, for a prompt of 100
    monkeypatch.setattr(engine._readings, "prefixes", Prefixes(0))
    catch_up, sizes = engine.shelf.catch_up, []
    monkeypatch.setattr(
        engine.shelf, "catch_up", lambda size, *rest: (sizes.append(size), catch_up(size, *rest))[1]
    )
    first, asked = Listener(), []

    def hear(news):
        first(news)
        if len(first.all) == 2 and not asked:
            sizes.clear()
            asked.append(engine.submit(REQUESTS[3], second))

    engine.submit(REQUESTS[0], hear if sits else first)
    first.wait()
    if not sits:
        sizes.clear()
        engine.submit(REQUESTS[3], second)
    second.wait()
    one = Size(1, engine.shelf.rows[0])
    assert sizes[:2] == ([one, engine.shelf.largest] if sits else [one, one])
    assert_as_alone([REQUESTS[0], REQUESTS[3]], [first, second])


def test_nothing_is_read_for_drafts_that_do_not_come(monkeypatch):
    """While calls are plain decoding's, and for an answer that has no rounds."""
    engine = choosing("moa-1")
    reader = Reader(engine, monkeypatch, 1000)
    monkeypatch.setattr(engine._readings, "prefixes", Prefixes(0))
    answers(engine, REQUESTS[:1])
    reader.ran.clear()
    assert_as_alone(REQUESTS, answers(engine, REQUESTS))
    assert reader.ran["read"] == 2 * len(REQUESTS) and reader.ran["catch_up"] == 0
    reader._most_plain = 0
    first = Request(BEGINNING, 1, NO_STOP)
    assert_as_alone([REQUESTS[0], first], answers(engine, [REQUESTS[0], first]))
    reader.ran.clear()
    answers(engine, [first])
    assert reader.ran["read"] == 2 and reader.ran["catch_up"] == 0
    answers(engine, REQUESTS[:1])
    assert reader.ran["catch_up"] == 1  # behind the first token


@pytest.mark.parametrize("make", [lambda: serving(None), lambda: choosing("moa-1")])
def test_a_row_that_somebody_left_is_empty(make, monkeypatch):
    """From the next call on: a CPU reads of all rows as far as the longest one goes."""
    engine, rows = make(), []
    send = engine._seats.send

    def noted(program, rounds):
        flight = send(program, rounds)
        now = engine._seats._state.now
        known_B = now.length_B if now.draft_lag is None else now.draft_lag.draft_len_B
        rows.append(list(zip(flight.texts, now.length_B.tolist(), known_B.tolist(), strict=True)))
        return flight

    monkeypatch.setattr(engine._seats, "send", noted)
    requests = [Request((*BEGINNING, 7), 3, NO_STOP)]
    requests += [Request((9, i), 60, NO_STOP) for i in range(2)]
    assert_as_alone(requests, answers(engine, requests))
    (seat,) = {i for row in rows for i, each in enumerate(row) if each[1] > len(BEGINNING)}
    gone = [row[seat] for row in rows if row[seat][0] is None]
    assert gone and {each[1:] for each in gone} == {(0, 0)}
