"""Probes of the chooser: when they come, how long they are, and what ends them."""

import itertools
import operator

import pytest

from moa_jax.config import DraftShape
from moa_jax.decode import auto, heard
from moa_jax.decode.auto import PLAIN, Chooser, ShapeChoice, Terms
from tests.decode.test_auto import (
    BUSY,
    CHANGING,
    CPU,
    OWN,
    SLOW,
    TREE,
    after,
    choices,
    of_the_best_ways,
    plain_rounds,
)


@pytest.mark.parametrize(
    "text, without",
    [
        ("0.0 to 0.9", {"_probe": lambda *asked: None}),
        ("0.9 to 0.0", {"KEPT": 1.0, "MOST_HEARD": float("inf"), "AS_EXPECTED": 1e9}),
        ("0.9 to 0.3", {"KEPT": 1.0, "MOST_HEARD": float("inf"), "AS_EXPECTED": 1e9}),
    ],
)
def test_without_probes_or_forgetting_changes_are_missed(text, without, monkeypatch):
    assert of_the_best_ways(CPU, CHANGING[text]) > 0.9
    for name, value in without.items():
        monkeypatch.setattr(auto if hasattr(auto, name) else heard, name, value)
    assert of_the_best_ways(CPU, CHANGING[text]) < 0.87


def test_probes_become_rare_but_never_stop():
    found = choices(Chooser(list(CPU), OWN), CPU, accepted=0, looks=1000)
    stretches, rounds = [], 0
    for shape, count in found:
        if shape == PLAIN:
            rounds += count
        elif rounds:
            stretches.append(rounds)
            rounds = 0
    assert stretches[:4] == [32, 64, 128, 256]
    assert set(stretches[4:]) == {auto.LAST_WAIT} and len(stretches) > 8
    probes = [choice for choice in found[8:] if choice.shape != PLAIN]
    assert max(choice.rounds * (CPU[choice.shape] - 1) for choice in probes) < 3


def test_probes_are_as_rare_as_their_terms_say():
    """Also where the terms change in the middle of a wait."""
    chooser, rare = Chooser(list(CPU), OWN), Terms(first_wait=64, most_wait=1024, least_probe=7)
    waits: list[int] = []
    for look in range(4000):
        choice = chooser.next(CPU, set(CPU), terms := rare if look < 2000 else Terms())
        assert choice.shape == PLAIN or len(waits) < 2 or (choice.rounds >= 7) == (terms == rare)
        chooser.heard(choice.shape, [0] * choice.rounds, choice.rounds)
        if choice.shape == PLAIN:
            waits[-1:] = [sum(waits[-1:]) + choice.rounds]
        elif waits[-1:] != [0]:
            waits.append(0)
    assert waits[:7] == [64, 128, 256, 512, 1024, 1024, 1024] and waits[-3:-1] == [256, 256]
    chooser = Chooser(list(CPU), OWN)
    while chooser.next(CPU, set(CPU)).shape != PLAIN:  # the usual terms set a wait of 32
        chooser.heard(OWN, [0], 1)
    waited = 0
    while (choice := chooser.next(CPU, set(CPU), rare)).shape == PLAIN:
        chooser.heard(PLAIN, [], choice.rounds)
        waited += choice.rounds
    assert waited == 64


def test_a_probe_that_pays_is_followed_by_an_early_one():
    chooser = Chooser(list(CPU), OWN)
    choices(chooser, CPU, accepted=0, looks=300)
    found = choices(chooser, CPU, accepted=7, looks=200)
    first = next(index for index, choice in enumerate(found) if choice.shape != PLAIN)
    assert found[-1].shape.num_drafted >= 5
    assert {choice.shape for choice in found[first + 20 :]} <= {DraftShape(6), DraftShape(8), TREE}
    found = choices(chooser, CPU, accepted=0, looks=200)
    given_up = itertools.dropwhile(lambda choice: choice.shape != PLAIN, found)
    plain = itertools.takewhile(lambda choice: choice.shape == PLAIN, given_up)
    assert sum(choice.rounds for choice in plain) == 32


def test_a_probe_that_an_answer_ends_is_taken_up_again():
    chooser = Chooser(list(CPU), OWN)
    while (choice := chooser.next(CPU, set(CPU))).shape != PLAIN:
        chooser.heard(choice.shape, [0] * choice.rounds, choice.rounds)
    while (choice := chooser.next(CPU, set(CPU))).shape == PLAIN:
        chooser.heard(choice.shape, [0] * choice.rounds, choice.rounds)
    chooser.heard(choice.shape, [0], 1)
    assert chooser.next(CPU, set(CPU)) == ShapeChoice(choice.shape, choice.rounds - 1)
    assert chooser.next(CPU, {PLAIN}).shape == PLAIN  # it is not ready any more


def test_a_probe_is_sent_once():
    """Where a call is heard after the next one was sent."""
    chooser, waits = Chooser(list(CPU), OWN), None
    sent: list[ShapeChoice] = []
    for _ in range(400):
        sent.append(chooser.next(CPU, set(CPU), under_way=waits))
        if waits:
            chooser.heard(waits.shape, [0] * waits.rounds, waits.rounds)
        waits = sent[-1]
    late = [choice.shape != PLAIN for choice in sent[20:]]
    assert sum(late) > 8 and not any(map(operator.and_, late, late[1:]))
    rounds = sum(choice.rounds for choice in sent[20:] if choice.shape == PLAIN)
    assert rounds / sum(late) > 0.9 * auto.LAST_WAIT


def test_a_probe_of_one_text_is_none_of_several():
    """Those who join it have prompts that the drafter would have to read, and wait for theirs."""
    chooser, several = Chooser(list(CPU), OWN), Terms(first_wait=640, most_wait=640, rows=4)
    while (choice := chooser.next(CPU, set(CPU))).shape == PLAIN or not chooser._probe:
        chooser.heard(choice.shape, [0] * choice.rounds, choice.rounds)
    for _ in range(600 // auto.ROUNDS_OF_PLAIN):
        choice = chooser.next(CPU, set(CPU), several)
        assert choice.shape == PLAIN
        chooser.heard(PLAIN, [], choice.rounds)
    for _ in range(640 // auto.ROUNDS_OF_PLAIN):
        if (choice := chooser.next(CPU, set(CPU), several)).shape == PLAIN:
            chooser.heard(PLAIN, [], choice.rounds)
    assert (
        choice.shape != PLAIN and chooser.next(CPU, set(CPU)) == choice
    )  # one of several holds for the last of them
    chooser.heard(choice.shape, [0] * choice.rounds, choice.rounds)
    doublings = chooser._doublings
    chooser.next(CPU, set(CPU), several._replace(rows=8))
    assert chooser._doublings == doublings + 1  # one that was heard is judged, whoever has come


def test_a_long_probe_goes_on_while_a_part_of_it_is_under_way():
    shape = DraftShape(2)
    chooser = Chooser([PLAIN, shape], shape)
    chooser._probe, chooser._left = shape, 9
    costs, half = {PLAIN: 1.0, shape: 1.1}, ShapeChoice(shape, 5)
    assert chooser.next(costs, set(costs), under_way=half) == ShapeChoice(shape, 4)
    assert chooser.next(costs, set(costs), under_way=ShapeChoice(PLAIN, 5)).rounds == 9


def test_a_probe_promises_what_it_is_asked_to():
    chooser = Chooser(list(CPU), OWN)
    while (choice := chooser.next(CPU, set(CPU))).shape != PLAIN:
        chooser.heard(choice.shape, [0] * choice.rounds, choice.rounds)
    for _ in range(100):
        assert chooser.next(CPU, set(CPU), Terms(gain_of_probe=10.0)).shape == PLAIN
        chooser.heard(PLAIN, [0] * 8, 8)
    assert chooser.next(CPU, set(CPU)).shape != PLAIN


def test_short_texts_that_decode_plainly_are_probed_at_last():
    """Though each begins with what is usual, and none is long enough to forget it."""
    costs = {PLAIN: BUSY[PLAIN], DraftShape(2): BUSY[DraftShape(2)]}
    chooser, found = Chooser(list(costs), DraftShape(2)), []
    for text in range(200):
        chooser.begins(50)
        for _ in range(2):
            choice = chooser.next(costs, costs)
            found += [text] * (choice.shape != PLAIN)
            chooser.heard(choice.shape, [0] * choice.rounds, choice.rounds)
    assert max(found) > 100


def test_a_probe_ends_with_its_text():
    """The next text waits as long as this one did."""
    chooser = after([(50, 0)] * 10, 50)
    while (choice := chooser.next(SLOW, SLOW)).shape == PLAIN:
        chooser.heard(PLAIN, [], choice.rounds)
    doublings = chooser._doublings
    chooser.begins(50)
    assert chooser.next(SLOW, SLOW) == ShapeChoice(PLAIN, auto.ROUNDS_OF_PLAIN)
    assert chooser._doublings == doublings


def test_a_probe_that_pays_is_soon_followed():
    """In a text of which nothing but the probe has drafted yet."""
    chooser = after([(50, 0)] * 10, 50)
    chooser._doublings = 2
    while (choice := chooser.next(CPU, CPU)).shape == PLAIN:
        chooser.heard(PLAIN, [], choice.rounds)
    chooser.heard(choice.shape, [choice.shape.levels - 1] * 40, choice.rounds)
    assert chooser.next(CPU, CPU).shape != PLAIN and chooser._doublings == 0


def test_a_probe_that_cannot_be_sent_soon_comes_again():
    """Texts may outgrow their state while the drafter reads for it."""
    chooser = after([(50, 0)] * 10, 50)
    while (choice := chooser.next(CPU, CPU)).shape == PLAIN:
        chooser.heard(PLAIN, [], choice.rounds)
    doublings = chooser._doublings
    assert chooser.next({PLAIN: CPU[PLAIN]}, {PLAIN}).shape == PLAIN
    assert chooser.next(CPU, CPU).shape != PLAIN and chooser._doublings == doublings


@pytest.mark.parametrize("under_way", [0, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_probe_waits_for_as_long_as_the_drafter_has_to_read(under_way, rows):
    for prompt, least, most in ((0, 0, 300), (700, rows * 650, rows * 750)):
        chooser = after([(50, 0)] * 10, 50)
        chooser._since = 0
        assert least <= plain_rounds(chooser, prompt, under_way, rows) <= most
