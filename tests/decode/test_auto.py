"""The chooser against simulated texts: close to the best fixed way, whatever the text accepts.

There is no clock: rounds take what a table says, and a way that is chosen counts what its rounds
commit on average, so that luck shows in the choices alone.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from moa_jax.config import DraftShape
from moa_jax.decode import auto, heard
from moa_jax.decode.auto import PLAIN, Chooser, ShapeChoice, Terms

TREE, OWN = DraftShape(7, 8, 62), DraftShape(5)
CPU = {PLAIN: 1.0, TREE: 4.0} | {
    DraftShape(depth): ms for depth, ms in ((2, 1.3), (3, 1.45), (4, 1.6), (6, 1.9), (8, 2.3))
}
GPU = {PLAIN: 1.0, DraftShape(3): 1.22, DraftShape(5): 1.4, TREE: 1.65}
BUSY = {PLAIN: 1.0, DraftShape(2): 1.6, DraftShape(3): 2.1, DraftShape(4): 2.6, TREE: 6.0}
LOADED = {PLAIN: 1.0, DraftShape(2): 2.1, DraftShape(3): 3.2, DraftShape(4): 4.3, TREE: 9.0}
# As measured on a CPU with the bundled pair.
SLOW = {
    PLAIN: 4.03,
    DraftShape(3): 6.67,
    OWN: 7.42,
    DraftShape(8): 9.08,
    DraftShape(5, 4, 16): 13.9,
}
TABLES = {"cpu": CPU, "gpu": GPU, "busy": BUSY, "loaded": LOADED}

# What a stretch of text accepts: its tokens, and the share of each drafted position.
Stretch = tuple[int, Sequence[float]]


def even(share: float, tokens: int = 3000) -> Stretch:
    return tokens, [share] * 7


TEXTS = {str(share): [even(share)] for share in (0.0, 0.3, 0.45, 0.6, 0.9)} | {
    "falling": [(3000, [0.85 * 0.75**place for place in range(7)])],
    "rising": [(3000, [0.5, 0.75, 0.85, 0.9, 0.9, 0.9, 0.9])],
}
CHANGING = {
    "0.0 to 0.9": [even(0.0, 1500), even(0.9, 1500)],
    "0.9 to 0.0": [even(0.9, 1500), even(0.0, 1500)],
    "0.3 to 0.9": [even(0.3, 1500), even(0.9, 1500)],
    "0.9 to 0.3": [even(0.9, 1500), even(0.3, 1500)],
}


def shares_of(way: DraftShape, stretch: Stretch) -> np.ndarray:
    share_P = np.array(stretch[1][: way.levels - 1])
    return share_P if way.is_chain else 1 - (1 - share_P) ** 1.5


def tokens_of(way: DraftShape, stretch: Stretch) -> float:
    """What a round commits on average."""
    return 1 + float(np.cumprod(shares_of(way, stretch)).sum())


def lengths_of(answers: tuple[int, int] | None, seed: int) -> Iterator[float]:
    """Tokens of one answer after the other, from `answers`; without them the text is one."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(*answers) if answers else np.inf


def speed(
    next_choice: Callable[[], ShapeChoice],
    heard: Callable[[DraftShape, list[int], int], None],
    costs: dict[DraftShape, float],
    text: list[Stretch],
    seed: int,
    batch: int = 1,
    answers: tuple[int, int] | None = None,
) -> float:
    """Tokens a millisecond over a text."""
    rng, lengths = np.random.default_rng(seed), lengths_of(answers, seed)
    ends = np.cumsum([tokens for tokens, _ in text])
    done = expected = spent = 0.0
    left = next(lengths)
    while done < ends[-1]:
        way, rounds = next_choice()
        place = int(np.searchsorted(ends, done, side="right"))
        stretch = text[place]
        mean, share_P = tokens_of(way, stretch), shares_of(way, stretch)
        accepted_RB = np.cumprod(rng.random((rounds, batch, len(share_P))) < share_P, 2).sum(2)
        counted = 0
        for committed in 1 + accepted_RB.mean(1):
            spent += costs[way]
            if is_cut := committed >= left:
                committed = mean = left
            done, expected, left = done + committed, expected + mean, left - committed
            if is_cut:
                left = next(lengths)
                break
            counted += 1
            if done >= ends[place]:
                break
        heard(way, accepted_RB[:counted].ravel().tolist(), counted)
    return expected / spent


def chosen(costs: dict[DraftShape, float], text: list[Stretch], seed: int, **how) -> float:
    """The speed of a new chooser."""
    chooser = Chooser(list(costs), OWN)
    ready = set(costs)
    return speed(lambda: chooser.next(costs, ready), chooser.heard, costs, text, seed, **how)


def fixed(costs: dict[DraftShape, float], text: list[Stretch], **how) -> float:
    """The speed of the best way, where it is taken for the whole text."""
    total = sum(tokens for tokens, _ in text)
    if how.get("answers"):
        seeds = range(max(2, 2000 // total))
        ways = (lambda way=way: ShapeChoice(way, 8) for way in costs)
        return max(
            np.mean([speed(way, lambda *_: None, costs, text, seed, **how) for seed in seeds])
            for way in ways
        )
    return max(
        total / sum(stretch[0] * ms / tokens_of(way, stretch) for stretch in text)
        for way, ms in costs.items()
    )


@pytest.mark.parametrize("how", [{}, {"batch": 8}, {"answers": (60, 201)}], ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_a_text_is_nearly_as_fast_as_the_best_way(table, how):
    costs = TABLES[table]
    for name, text in TEXTS.items():
        least = 0.97 * max(fixed(costs, text, **how), 1.0)
        speeds = [chosen(costs, text, seed, **how) for seed in range(3)]
        assert min(speeds) >= least, (name, speeds, least / 0.97)


@pytest.mark.parametrize("how", [{}, {"batch": 8}, {"answers": (60, 201)}], ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_a_text_that_changes_is_followed(table, how):
    costs = TABLES[table]
    for name, text in CHANGING.items():
        least = 0.97 * max(fixed(costs, text, **how), 1.0)
        speeds = [chosen(costs, text, seed, **how) for seed in range(3)]
        assert min(speeds) >= least, (name, speeds, least / 0.97)


def of_new_choosers(costs: dict[DraftShape, float], text: list[Stretch]) -> float:
    """The mean speed of answers that each have a new chooser, as a share of the best way's."""
    total = sum(tokens for tokens, _ in text)
    how = {"answers": (total, total + 1)}
    speeds = [chosen(costs, text, seed, **how) for seed in range(2000 // total)]
    return float(np.mean(speeds)) / fixed(costs, text, **how)


# Shares that are accepted, how many rounds at first miss, and the least share of the best way's
# speed in answers of 16, 40 and 128 tokens.
ANSWERS = {
    "0.0": (0.0, 0, (0.8, 0.9, 0.93)),
    "0.3": (0.3, 0, (0.88, 0.9, 0.93)),
    "0.6": (0.6, 0, (0.9, 0.9, 0.93)),
    "0.9": (0.9, 0, (0.85, 0.9, 0.95)),
    "a miss, then 0.9": (0.9, 1, (0.85, 0.9, 0.94)),
    "a miss, then 1.0": (1.0, 1, (0.78, 0.87, 0.94)),
}


def answer(name: str, tokens: int) -> list[Stretch]:
    share, missed, _ = ANSWERS[name]
    return [even(0.0, 1)] * missed + [even(share, tokens - missed)]


@pytest.mark.parametrize("costs", [CPU, SLOW], ids=["cpu", "slow"])
@pytest.mark.parametrize("name", ANSWERS)
def test_one_answer_is_nearly_as_fast_as_the_best_way(name, costs):
    for tokens, least in zip((16, 40, 128), ANSWERS[name][-1], strict=True):
        assert of_new_choosers(costs, answer(name, tokens)) >= least, tokens


@pytest.mark.parametrize("costs", [CPU, SLOW], ids=["cpu", "slow"])
def test_a_light_first_guess_gives_up_after_one_miss(costs, monkeypatch):
    monkeypatch.setattr(auto, "FIRST_SHARE", 0.6)
    monkeypatch.setattr(auto, "FIRST_HEARD", 0.0)
    assert of_new_choosers(costs, answer("a miss, then 0.9", 40)) < 0.6


def of_the_best_ways(costs: dict[DraftShape, float], text: list[Stretch]) -> float:
    """The share of the speed that one would have who knows each stretch beforehand."""
    spent = sum(stretch[0] / fixed(costs, [stretch]) for stretch in text)
    return chosen(costs, text, seed=0) * spent / sum(tokens for tokens, _ in text)


# As measured on an EPYC with the bundled pair: chains of eight are cheap there.
CHEAP = {PLAIN: 1.3, DraftShape(3): 2.0, DraftShape(5): 2.75, DraftShape(8): 3.27}


def in_clusters(tokens: int, seed: int) -> np.ndarray:
    """How many tokens a draft from each place has right, where wrong ones stand together."""
    rng, right, found = np.random.default_rng(seed), 0, np.zeros(tokens, int)
    for place in reversed(range(tokens)):
        right = right + 1 if rng.random() < (0.85 if right else 0.45) else 0
        found[place] = right
    return found


def along(next_choice: Callable[[], ShapeChoice], heard: Callable, right: np.ndarray) -> float:
    """Tokens a millisecond where the text, not the round, says what is accepted."""
    place = spent = 0.0
    while place < len(right):
        way, rounds = next_choice()
        accepted = []
        for _ in range(rounds):
            if place < len(right):
                accepted.append(min(int(right[int(place)]), way.num_drafted))
                place, spent = place + 1 + accepted[-1], spent + CHEAP[way]
        heard(way, accepted, len(accepted))
    return place / spent


def test_a_long_chain_begins_where_drafts_are_refused(monkeypatch):
    """Shares that short chains told promise it too much; what came of it corrects them."""

    def of_the_best() -> float:
        found = []
        for seed in range(4):
            right, chooser = in_clusters(6000, seed), Chooser(list(CHEAP), DraftShape(3))
            ours = along(lambda c=chooser: c.next(CHEAP, set(CHEAP)), chooser.heard, right)
            ways = [lambda way=way: ShapeChoice(way, 8) for way in CHEAP]
            found.append(ours / max(along(way, lambda *_: None, right) for way in ways))
        return float(np.mean(found))

    assert of_the_best() > 0.97
    monkeypatch.setattr(heard, "AS_EXPECTED", 1e9)
    assert of_the_best() < 0.95


def choices(
    chooser: Chooser, costs: dict[DraftShape, float], accepted: int, looks: int
) -> list[ShapeChoice]:
    """What is chosen if every round accepts the same, or all that it drafts if that is less."""
    found = []
    for _ in range(looks):
        choice = chooser.next(costs, set(costs))
        length = min(accepted, choice.shape.levels - 1)
        chooser.heard(choice.shape, [length] * choice.rounds, choice.rounds)
        found.append(choice)
    return found


def test_the_example_of_the_docstring():
    chooser = Chooser(list(CPU), OWN)
    chooser.heard(DraftShape(4), np.array([3, 1, 3, 1, 1, 2] * 1000), 1)
    at_4 = 1 + 1 + 1 / 2 + 1 / 3
    costs = {PLAIN: 1.0, DraftShape(4): 1.6}
    assert chooser.next(costs, set(costs)).shape == DraftShape(4)
    assert chooser.next(costs | {DraftShape(4): 0.99 * at_4}, set(costs)).shape == DraftShape(4)
    assert chooser.next(costs | {DraftShape(4): 1.01 * at_4}, set(costs)).shape == PLAIN


def test_a_position_is_counted_where_the_one_before_it_was_accepted():
    """A longer chain without measurements gets the acceptance rates of the shorter one."""
    chooser = Chooser([PLAIN, DraftShape(4), DraftShape(5)], DraftShape(4))
    chooser.heard(DraftShape(4), np.array([3, 1, 3, 1, 1, 2] * 1000), 1)
    at_5 = 1 + 1 + 1 / 2 + 1 / 3 + 1 / 3 * 2 / 3
    for factor, shape in ((0.97, DraftShape(5)), (1.03, PLAIN)):
        costs = {PLAIN: 1.0, DraftShape(5): factor * at_5}
        assert chooser.fastest(costs, set(costs)) == shape


def test_where_no_draft_can_win_none_is_tried():
    found = choices(Chooser(list(LOADED), OWN), LOADED, accepted=7, looks=300)
    assert {choice.shape for choice in found} == {PLAIN}


def test_the_first_choices_hold_for_few_rounds():
    for accepted, later in ((0, [8, 16]), (7, [8, 8])):  # plain decoding tells nothing
        found = choices(Chooser(list(CPU), OWN), CPU, accepted, looks=6)
        assert [choice.rounds for choice in found] == [1, 1, 2, 4, *later]


def test_a_first_guess_does_not_come_back():
    """Probes stay as short as where little was guessed, however long nothing is accepted."""
    found = choices(Chooser(list(SLOW), OWN), SLOW, accepted=0, looks=1000)
    drafts = [choice for choice in found if choice.shape != PLAIN]
    lost = [choice.rounds * (SLOW[choice.shape] / SLOW[PLAIN] - 1) for choice in drafts]
    assert len(drafts) > 8 and max(lost) < 4
    assert all(
        PLAIN in (one.shape, two.shape) for one, two in zip(found[4:], found[5:], strict=False)
    )


def test_without_costs_it_is_the_drafters_own_shape():
    chooser = Chooser(list(CPU), OWN)
    assert chooser.next({}, {PLAIN, OWN, TREE}).shape == OWN
    assert chooser.next({TREE: 1.0}, {PLAIN, OWN}).shape == OWN
    assert chooser.next({}, {PLAIN, TREE}).shape == PLAIN
    assert chooser.next({}, {TREE}).shape == TREE
    with pytest.raises(ValueError, match="no way to draft is ready"):
        chooser.next(CPU, set())
    assert chooser.next({PLAIN: 1.0}, {PLAIN, OWN, TREE}).shape == PLAIN


def test_only_what_is_ready_and_has_a_cost_is_chosen():
    for accepted in (0, 1, 7):
        chooser = Chooser(list(CPU), OWN)
        few = {way: CPU[way] for way in (PLAIN, DraftShape(3), DraftShape(6))}
        for _ in range(200):
            choice = chooser.next(few, {PLAIN, DraftShape(3), DraftShape(8), TREE})
            assert choice.shape in (PLAIN, DraftShape(3)) and choice.rounds >= 1
            length = min(accepted, choice.shape.levels - 1)
            chooser.heard(choice.shape, [length] * choice.rounds, choice.rounds)


def test_a_cost_that_changes_changes_the_choice():
    chooser = Chooser(list(GPU), OWN)
    assert choices(chooser, GPU, accepted=2, looks=50)[-1].shape == DraftShape(3)
    assert chooser.next(GPU | {DraftShape(3): 4.0, TREE: 4.0, OWN: 4.0}, set(GPU)).shape == PLAIN
    assert chooser.next(GPU | {OWN: 1.0}, set(GPU)).shape == OWN


def test_several_who_are_drafted_for_go_on_for_less_than_it_began_for():
    """Else a gain about as large as the terms would have the drafter read again and again."""
    chain, terms = DraftShape(3), Terms(gain=1.5, gain_to_go_on=1.1, rows=2)
    chooser = Chooser([PLAIN, chain], chain)
    chooser.heard(chain, [2] * 200, 200)
    looks = [(2.2, PLAIN), (1.9, chain), (2.2, chain), (2.9, PLAIN), (2.2, PLAIN)]
    for ms, way in looks:
        costs = {PLAIN: 1.0, chain: ms}
        assert chooser.fastest(costs, costs, terms) == way
        assert chooser.next(costs, costs, terms).shape == way
        chooser.next({PLAIN: 1.0, chain: 2.0}, costs)  # one alone changes no mind of several


def test_drawn_candidates_go_by_the_costs_of_the_likeliest():
    drawn = DraftShape(3, sampled=True)
    chooser = Chooser([PLAIN, drawn], drawn)
    assert chooser.next({PLAIN: 1.0, DraftShape(3): 1.1}, {PLAIN, drawn}).shape == drawn


def test_the_same_calls_give_the_same_choices():
    first, second = (choices(Chooser(list(GPU), OWN), GPU, 1, 100) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("rows", [1, 64])
def test_what_many_rows_said_fades_as_soon_as_what_one_said(rows):
    chooser = Chooser(list(GPU), OWN)
    for _ in range(100):
        chooser.heard(TREE, [0] * 8 * rows, 8)
    costs = {PLAIN: 1.0, TREE: GPU[TREE]}
    assert chooser.next(costs, set(costs)).shape == PLAIN
    for _ in range(75):
        chooser.heard(OWN, [4] * 8 * rows, 8)
    assert chooser.next(costs, set(costs)).shape == TREE  # its guess is the chain's


def test_chains_and_trees_tell_of_each_other():
    """After what a tree accepted, a chain is not thought better than it can be, nor the reverse."""
    costs = {PLAIN: 1.0, DraftShape(3): 1.2, TREE: 1.4}
    for spoke, other in ((TREE, DraftShape(3)), (DraftShape(3), TREE)):
        chooser = Chooser(list(costs), OWN)
        chooser.heard(spoke, [0] * 200, 200)
        assert chooser.next({PLAIN: 1.0, other: costs[other]}, set(costs)).shape == PLAIN
        chooser.heard(spoke, [2] * 400, 400)
        assert chooser.next({PLAIN: 1.0, other: costs[other]}, set(costs)).shape == other


def after(texts: Sequence[tuple[int, int]], tokens: int) -> Chooser:
    """A chooser that has heard texts of so many tokens, whose rounds all accepted as many drafts.

    Another text has just begun.
    """
    chooser = Chooser(list(CPU), OWN)
    for length, accepted in texts:
        chooser.begins(length)
        for _ in range(8):
            chooser.heard(DraftShape(8), [accepted] * 4, 4)
    chooser.begins(tokens)
    return chooser


def rounds_until_it_drafts_no_more(chooser: Chooser) -> int:
    """Where nothing is accepted any more."""
    rounds = 0
    while (choice := chooser.next(CPU, CPU)).shape != PLAIN:
        chooser.heard(choice.shape, [0] * choice.rounds, choice.rounds)
        rounds += choice.rounds
    return rounds


def test_what_others_accepted_is_soon_overruled():
    """Of texts one by one, the next of which accepts nothing that all before it accepted."""
    chooser = Chooser(list(CPU), OWN)
    for _ in range(40):
        chooser.heard(DraftShape(8), [7] * 8, 8)  # one text, and no other begins
    assert rounds_until_it_drafts_no_more(chooser) > 40
    assert rounds_until_it_drafts_no_more(after([(50, 7)] * 10, 50)) < 25


def drafts(chooser: Chooser) -> bool:
    return chooser.fastest(CPU, CPU) != PLAIN


def test_a_text_begins_with_what_is_usual():
    """The last text is one of many, and what it accepted counts as theirs does."""
    for usual, last in ((7, 0), (0, 7)):
        assert drafts(after([*[(50, usual)] * 10, (50, last)], 50)) == (usual == 7)


def test_a_long_text_is_one_text():
    chooser = after([(50, 7)] * 10, 50)
    chooser.heard(DraftShape(8), [0] * 10_000, 10_000)
    chooser.begins(50)
    assert drafts(chooser)


def test_what_is_usual_is_told_by_texts_alone():
    """Whoever is left of several may be of another length than the one that began alone."""
    for joins in (False, True):
        chooser = after([(50, 0)] * 2, 50)
        if joins:
            chooser.joins(50, 1)
        for _ in range(8):
            chooser.heard(DraftShape(8), [7] * 8, 8)
        chooser.begins(50)
        assert drafts(chooser) != joins


def test_several_draft_again_when_those_have_gone_who_accept_nothing():
    """Each that joins is as usual, and beside plain decoding nothing else is heard."""
    chooser, found = after([(50, 7)] * 10, 50), []
    chooser.joins(50, 1)
    for _ in range(40):
        chooser.heard(OWN, [0] * 8, 4)
    for _ in range(6):
        found.append(drafts(chooser))
        chooser.joins(50, 1)
    assert not found[0] and found[-1]


def test_one_that_was_alone_tells_what_is_usual_when_another_joins():
    """A server may never be empty again."""
    for accepted in (7, 0):
        chooser = Chooser(list(CPU), OWN)
        chooser.begins(50)
        for _ in range(8):
            chooser.heard(DraftShape(8), [accepted] * 4, 4)
        chooser.joins(50, 1)
        for _ in range(40):
            chooser.heard(OWN, [0] * 8, 4)
        for _ in range(6):
            chooser.joins(50, 1)
        assert drafts(chooser) == (accepted == 7)


def test_who_joins_many_changes_little():
    shares = []
    for others in (0, 1, 15):
        chooser = after([(50, 7)] * 10, 50)
        chooser._chains[0].share = 0.2
        chooser.joins(50, others)
        shares.append(chooser._chains[0].share)
    more = shares[0] - 0.2
    assert shares[1:] == pytest.approx([0.2 + more / 2, 0.2 + more / 16]) and more > 0.5


def test_after_several_a_text_alone_is_not_bound_by_them():
    chooser = Chooser(list(CPU), OWN)
    for _ in range(40):
        chooser.heard(DraftShape(8), [7] * 8, 8)
    chooser.begins(50)
    assert drafts(chooser) and rounds_until_it_drafts_no_more(chooser) < 25


def test_one_missed_round_is_not_what_is_usual():
    chooser = Chooser(list(CPU), OWN)
    chooser.begins(50)
    chooser.heard(OWN, [0], 1)
    chooser.begins(50)
    assert drafts(chooser)


def test_usual_is_what_texts_of_this_length_accepted():
    texts = [(50, 7), (700, 0)] * 5
    for tokens, usual in ((2, True), (128, True), (513, False), (1000, False), (5000, False)):
        assert drafts(after(texts, tokens)) == usual, tokens
    assert drafts(after([(50, 7)], 1000))  # of the nearest, at first


def test_another_text_is_no_change_of_one():
    """Of two lengths by turns, one of which drafts: probes are as rare as of one kind."""
    chooser, probes = Chooser(list(CPU), OWN), 0
    for text in range(200):
        chooser.begins((50, 700)[text % 2])
        for _ in range(4):
            choice = chooser.next(CPU, CPU)
            drafted = choice.shape.levels - 1
            chooser.heard(choice.shape, [drafted * (1 - text % 2)] * choice.rounds, choice.rounds)
            probes += text > 40 and text % 2 and drafted > 0
    assert 0 < probes < 60


def test_who_cannot_draft_for_a_while_has_not_given_up():
    """A state may have no rows for drafts, or no program yet."""
    chooser = after([(50, 7)] * 4, 50)
    before = chooser.next(CPU, CPU).shape
    chooser.heard(before, [before.levels - 1] * 16, 16)
    chooser.next(CPU, CPU)
    since, doublings, before = chooser._since, chooser._doublings, chooser._best
    assert since and before.num_drafted
    assert chooser.next({PLAIN: CPU[PLAIN]}, {PLAIN}).shape == PLAIN
    assert (chooser._best, chooser._since, chooser._doublings) == (before, since, doublings)


def plain_rounds(chooser: Chooser, prompt: int, under_way: int, rows: int) -> int:
    """Before a probe, where the drafter has read nothing of prompts and of what came since.

    So many rounds are always sent that were not heard.
    """
    rounds = 0
    while rounds < 5000:
        terms = Terms(unread=prompt + rounds + under_way, rows=rows)
        if (choice := chooser.next(CPU, CPU, terms)).shape != PLAIN:
            break
        chooser.heard(PLAIN, [], choice.rounds)
        rounds += choice.rounds
    return rounds


def test_who_could_be_the_fastest():
    sure = after([(50, 0)] * 10, 50)
    for _ in range(50):
        sure.heard(DraftShape(8), [0] * 8, 8)
    assert sure.contenders(CPU, CPU) == {PLAIN}
    assert sure.contenders(CPU, CPU, doubt=1.5) == {PLAIN, DraftShape(2), DraftShape(3)}
    assert sure.contenders(CPU, {PLAIN, TREE}, doubt=1.5) == {PLAIN}
    assert sure.contenders(CPU, CPU, Terms(gain=2.0), doubt=1.5) == {PLAIN}
    assert Chooser(list(CPU), OWN).contenders({}, CPU) == set()
