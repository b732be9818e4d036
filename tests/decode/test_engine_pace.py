"""How an engine chooses ways and lengths of calls, from figures that tests make up."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from moa_jax.config import DraftShape
from moa_jax.decode.auto import PLAIN, Chooser
from moa_jax.decode.engine.pace import (
    CALLS_BETWEEN_TRIALS,
    CANNOT_WIN,
    LEAST_MEASURED,
    OLD,
    SURE,
    Pace,
    TypicalSeconds,
)

CHAIN, TREE = DraftShape(3), DraftShape(3, 2, 4)
FOR_A_FIGURE = LEAST_MEASURED + 1  # calls: the first does not count


def known(pace: Pace, programs: dict[DraftShape, object], seconds: dict[DraftShape, float]) -> None:
    """The pace has a sure figure of each way."""
    for way, took in seconds.items():
        for _ in range(SURE + 1):
            pace.took(programs[way], 1, took)


def test_what_the_table_does_not_know_is_measured():
    """Each way gets calls now and then until it has a figure; then the chooser has them all."""
    programs = {way: ("program", way) for way in (PLAIN, CHAIN, TREE)}
    seconds = {PLAIN: 0.001, CHAIN: 0.1, TREE: 0.2}
    pace, taken = Pace(Chooser(tuple(programs), CHAIN), None, lambda batch: CHAIN), Counter()
    for _ in range(80):
        program, rounds = pace.choose(2, programs, hurry=False)
        way = program[1]
        taken[way] += rounds
        pace.took(program, rounds, rounds * seconds[way])
        pace.heard(way, [0] * rounds, rounds)
    assert taken[PLAIN] > 300 and 0 < taken[TREE] < 10
    assert pace.choose(2, programs, hurry=False) == (programs[PLAIN], 8)


class PacedCalls:
    """Calls that a pace chooses, for a drafter that catches up before it drafts again."""

    def __init__(
        self, pace: Pace, seconds: dict[DraftShape, float], factor=lambda call: 1.0
    ) -> None:
        """`seconds` of a round, times the factor of a call."""
        self.pace, self.seconds, self.factor, self.is_late = pace, seconds, factor, False
        self.programs = {way: ("program", way) for way in seconds}

    def calls(self, count: int) -> list[DraftShape]:
        """The ways of so many calls; one beside a catch-up has no time of its own."""
        ways = []
        for call in range(count):
            program, rounds = self.pace.choose(8, self.programs, hurry=False)
            ways.append(way := program[1])
            catches_up = self.is_late and way != PLAIN and not self.pace.is_trying
            self.is_late = way == PLAIN or self.is_late and self.pace.is_trying
            if not catches_up:
                self.pace.took(program, rounds, rounds * self.seconds[way] * self.factor(call))
            self.pace.heard(way, [way.levels - 1] * rounds, rounds)
        return ways


class Table:
    """Stands for costs that know each way of every batch."""

    def for_batch(self, batch: int) -> dict[DraftShape, float]:
        return {PLAIN: 1.0, CHAIN: 50.0}


@pytest.mark.parametrize(
    ("wrong", "table"), [(0, None), *itertools.product((FOR_A_FIGURE, SURE + 1), (None, Table()))]
)
def test_a_way_that_drafts_is_measured_behind_plain_decoding(wrong, table):
    """Also one whose first figures are of a busy machine; a slow one seldom takes a call."""
    for chain, wanted in ((0.002, CHAIN), (0.1, PLAIN)):
        pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), table, lambda batch: PLAIN)
        decoded = PacedCalls(pace, {PLAIN: 0.001, CHAIN: chain})
        for _ in range(wrong):
            pace.took(decoded.programs[CHAIN], 1, 20 * chain)
            pace.took(decoded.programs[PLAIN], 1, 0.001)
        decoded.calls(CANNOT_WIN * OLD)
        assert decoded.calls(100).count(wanted) >= 95


def test_what_cannot_win_is_seldom_taken_again():
    """What could win if its figure were a busy machine's is, and as often as it grows old."""
    taken = {}
    for chain in (0.003, 0.03):  # for three tokens
        pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
        decoded = PacedCalls(pace, {PLAIN: 0.001, CHAIN: chain})
        decoded.calls(500)
        taken[chain] = decoded.calls(2000).count(CHAIN)
    assert 5 <= taken[0.003] <= 20 and taken[0.03] < taken[0.003] / 3


def test_a_figure_ages_while_its_program_could_be_taken():
    """Another size of the same slots makes it no older."""
    pace, sizes = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN), (128, 1024)
    programs = {rows: {way: (rows, way) for way in (PLAIN, CHAIN)} for rows in sizes}
    for rows, way in itertools.product(sizes, (PLAIN, CHAIN)):
        for _ in range(SURE + 1):
            pace.took(programs[rows][way], 1, {PLAIN: 0.001, CHAIN: 0.0021}[way])
    for _ in range(10 * OLD):
        program, rounds = pace.choose(1, programs[128], hurry=False)
        pace.took(program, rounds, rounds * {PLAIN: 0.001, CHAIN: 0.0021}[program[1]])
    for _ in range(CALLS_BETWEEN_TRIALS):
        pace.choose(1, programs[1024], hurry=False)
        assert not pace.is_trying


def test_whether_so_many_will_be_drafted_for():
    """By the table, until the engine's own figures say as much; by the first way without any."""
    table = Table()
    assert Pace(None, None, lambda batch: CHAIN).would_draft(1)
    assert not Pace(None, None, lambda batch: PLAIN).would_draft(1)
    for first in (CHAIN, PLAIN):
        pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: first)  # noqa: B023
        assert pace.would_draft(1) == (first == CHAIN)
    first_of = lambda batch: CHAIN if batch == 1 else PLAIN
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), table, first_of)
    assert not pace.would_draft(1)  # 50 ms for a chain
    programs = {way: ("program", way) for way in (PLAIN, CHAIN)}
    for way in (CHAIN, PLAIN):
        for _ in range(FOR_A_FIGURE):
            pace.took(programs[way], 1, {PLAIN: 0.001, CHAIN: 0.0015}[way])
        pace.choose(1, programs, hurry=False)
        assert pace.would_draft(1) == (way == PLAIN)  # then both are known
    for _ in range(5):
        for _ in range(4):
            pace.heard(CHAIN, [0] * 8, 8)
        pace.begins(50)
    for tokens in (50, 5000):
        pace.begins(tokens)
        assert not pace.would_draft(1)
    assert not pace.would_draft(2)  # plain decoding is the first way of several


def test_a_state_without_rows_for_drafts_changes_no_mind():
    """Else one for plain decoding alone would be left for no other."""
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
    programs = {way: ("program", way) for way in (PLAIN, CHAIN)}
    for way in programs:
        for _ in range(SURE + 1):
            pace.took(programs[way], 1, {PLAIN: 0.001, CHAIN: 0.0011}[way])
    pace.choose(2, programs, hurry=False)
    assert pace.would_draft(2)
    plain = {PLAIN: ("another program", PLAIN)}
    for _ in range(FOR_A_FIGURE):
        pace.took(plain[PLAIN], 1, 0.001)
    for _ in range(8):
        pace.choose(2, plain, hurry=False)
    assert pace.would_draft(2)


def test_a_probe_waits_for_what_the_drafter_has_to_read():
    for batch, prompt, least, most in ((1, 0, 32, 400), (1, 500, 500, 600), (4, 500, 1900, 2200)):
        pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
        programs, rounds = {way: ("program", way) for way in (PLAIN, CHAIN)}, 0
        for way in (PLAIN, CHAIN):
            for _ in range(SURE + 1):
                pace.took(programs[way], 1, {PLAIN: 0.001, CHAIN: 0.0015}[way])
        pace.heard(CHAIN, [0] * 100, 100)
        while True:
            program, more = pace.choose(batch, programs, False, unread=prompt + rounds)
            if program == programs[CHAIN]:
                break
            pace.heard(PLAIN, [], more)
            rounds += more
        assert least <= rounds < most and not pace.is_trying


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_a_busy_machine_seldom_changes_a_choice(share):
    """A share of the calls take three or ten times as long, and for a while all take three."""
    for seed, chain in itertools.product(range(2), (0.002, 0.02)):
        draw = np.random.default_rng(seed)
        slow = draw.choice([1.0, 1.0, 3.0], 8)
        spike = lambda: draw.choice([3, 10]) if draw.random() < share else 1  # noqa: B023
        factor = lambda call: slow[call // 100] * spike()  # noqa: B023
        pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
        ways = PacedCalls(pace, {PLAIN: 0.001, CHAIN: chain}, factor).calls(800)
        assert ways.count(CHAIN if chain < 0.01 else PLAIN) >= 0.9 * len(ways)


def test_a_machine_that_slows_down_changes_no_choice():
    """What is not called at the time is slower as well, though nobody has seen it."""
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
    decoded = PacedCalls(pace, {PLAIN: 0.001, CHAIN: 0.002})
    decoded.calls(100)
    decoded.factor = lambda call: 2.0  # a token of the chain takes longer than plain's took
    assert decoded.calls(60).count(CHAIN) >= 56


def test_noise_does_not_add_up():
    """Neither in figures nor in how fast the machine is: one is divided by the other."""
    for seed in range(4):
        draw = np.random.default_rng(seed)
        factor = lambda call: draw.lognormal(0, 0.2)  # noqa: B023
        pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
        decoded = PacedCalls(pace, {PLAIN: 0.001, CHAIN: 0.0015}, factor)
        decoded.calls(1000)
        assert decoded.calls(5000).count(CHAIN) > 4500
        for way, figure in ((way, pace._round_s[decoded.programs[way]]) for way in (PLAIN, CHAIN)):
            assert 0.5 < figure.typical / decoded.seconds[way] < 2


def test_a_size_that_comes_back_is_not_measured_anew():
    """A figure ages while its own size is there; elsewhere many calls are made meanwhile."""
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
    few, many = ({way: (size, way) for way in (PLAIN, CHAIN)} for size in (2, 8))

    def call(batch: int) -> DraftShape:
        (_, way), rounds = pace.choose(batch, few if batch == 2 else many, hurry=False)
        pace.took((batch, way), rounds, rounds * {PLAIN: 0.001, CHAIN: 0.1}[way])
        pace.heard(way, [0] * rounds, rounds)
        return way

    for batch in (8, 2):
        for _ in range(600):
            call(batch)
    assert [call(8) for _ in range(30)] == [PLAIN] * 30
    larger = {way: (rows, way) for rows, way in ((512, PLAIN), (512, CHAIN))}
    known(pace, larger, {PLAIN: 0.001, CHAIN: 0.1})  # as while nobody was there
    assert [pace.choose(8, larger, False)[0] for _ in range(30)] == [larger[PLAIN]] * 30


def test_states_of_a_batch_agree_on_what_drafting_costs():
    """A figure that one of them took on a busy machine decides nothing where two others have one;
    nor does what states of other batches say."""
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
    programs = {rows: {way: (rows, way) for way in (PLAIN, CHAIN)} for rows in (256, 512, 1024)}
    for rows, busy in ((256, 3.0), (512, 1.0), (1024, 1.0)):
        seconds = {PLAIN: 0.001, CHAIN: 0.002 * busy}
        known(pace, programs[rows], {way: took * rows / 256 for way, took in seconds.items()})
    pace.heard(CHAIN, [2] * 50, 50)  # three tokens a round
    for rows in (1024, 512, 256):
        assert pace.choose(4, programs[rows], hurry=True)[0] == programs[rows][CHAIN]
    full = {PLAIN: programs[512][PLAIN]}  # a state without rows for drafts still says what it knows
    assert pace.choose(4, full, hurry=True)[0] == full[PLAIN]
    assert pace.choose(4, programs[256], hurry=True)[0] == programs[256][CHAIN]
    assert pace.choose(8, programs[256], hurry=True)[0] == programs[256][PLAIN]


def test_a_state_whose_plain_rounds_alone_are_known_takes_the_ratio_of_others():
    """And not their milliseconds, which are of other rows."""
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
    small, large = ({way: (rows, way) for way in (PLAIN, CHAIN)} for rows in (256, 1024))
    known(pace, small, {PLAIN: 0.001, CHAIN: 0.004})
    known(pace, large, {PLAIN: 0.003})
    pace.heard(CHAIN, [2] * 50, 50)
    for programs in (small, large):
        assert pace.choose(4, programs, hurry=True)[0] == programs[PLAIN]
    assert not pace.would_draft(4)


def test_a_way_whose_calls_tell_nothing_keeps_no_other_from_its_trial():
    """As one whose drafter catches up at each of its calls."""
    pace = Pace(Chooser((PLAIN, CHAIN, TREE), PLAIN), None, lambda batch: PLAIN)
    programs = {way: ("program", way) for way in (CHAIN, TREE, PLAIN)}
    for _ in range(60):
        program, rounds = pace.choose(2, programs, hurry=False)
        if program != programs[CHAIN]:
            pace.took(program, rounds, 0.001 * rounds)
    assert pace.unsure({program: program[1] for program in programs.values()}) == programs[CHAIN]
    assert pace._round_s.keys() == {programs[PLAIN], programs[TREE]}


def test_trials_are_single_calls():
    """Of whatever way: the drafter need not catch up for them."""
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda batch: PLAIN)
    programs, ways = {way: ("program", way) for way in (PLAIN, CHAIN)}, []
    for _ in range(60):
        program, rounds = pace.choose(8, programs, hurry=False)
        ways.append(program[1])
        assert pace.is_trying or ways[-1] == PLAIN
        if ways[-1] == PLAIN:
            pace.took(program, rounds, 0.001 * rounds)
    trials = [len([*same]) for way, same in itertools.groupby(ways) if way == CHAIN]
    assert len(trials) > 5 and set(trials) == {1}


def test_one_slow_call_does_not_make_a_figure():
    measured = TypicalSeconds()
    for seconds in (5.0, 0.9, 0.1, 0.1):
        measured.add(seconds)
    assert measured.typical == 0.1


def test_the_first_call_does_not_count():
    measured = TypicalSeconds()
    for seconds in (0.1, 1.0, 2.0):
        measured.add(seconds)
    assert (measured.typical, measured.count) == (1.0, 2)


def test_the_shortest_call_does_not_make_a_figure():
    """It began before the host had heard of the one before it."""
    measured = TypicalSeconds()
    for late in (1.0, 0.0, 0.5, -0.5, 0.0, 0.0, 0.9, -0.9, 0.0, 0.0, 0.0):
        measured.add(1.0 + late)
    assert measured.typical == 1.0


def test_nothing_is_tried_beside_a_chunk():
    """Such a call has no time of its own, so a slow way would be tried again and again."""
    programs = {way: ("program", way) for way in (PLAIN, CHAIN, TREE)}
    pace = Pace(Chooser(tuple(programs), CHAIN), None, lambda batch: CHAIN)
    found = [pace.choose(2, programs, hurry=True) for _ in range(40)]
    assert found == [(programs[CHAIN], 1)] * 40
    found = [pace.choose(2, programs, hurry=False)[0] for _ in range(40)]
    assert programs[PLAIN] in found


def test_many_do_not_draft_for_want_of_figures():
    """Nor in a hurry; those of the nearest batch stand in where a size has none of its own."""
    programs = lambda size: {way: (size, way) for way in (CHAIN, PLAIN)}
    first = lambda batch: PLAIN if batch > 4 else CHAIN
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, first)
    few, many, more = programs(2), programs(8), programs(16)
    assert [pace.choose(n, few if n == 2 else many, True)[0] for n in (8, 2)] == [
        many[PLAIN],
        few[CHAIN],
    ]
    for way, seconds in ((CHAIN, 0.001), (PLAIN, 0.1)):
        for _ in range(FOR_A_FIGURE):
            pace.took(many[way], 1, seconds)
    assert pace.choose(8, many, True)[0] == many[CHAIN]
    assert pace.choose(16, more, True)[0] == more[CHAIN]
    for way, seconds in ((CHAIN, 0.1), (PLAIN, 0.001)):
        for _ in range(FOR_A_FIGURE):
            pace.took(more[way], 1, seconds)
    assert pace.choose(16, more, True)[0] == more[PLAIN]
    assert pace.choose(8, many, True)[0] == many[CHAIN]


@pytest.mark.parametrize(
    ("batch", "seconds", "way"),
    [(1, 1.9, CHAIN), (4, 1.52, PLAIN), (4, 1.44, CHAIN)],
)
def test_several_draft_only_for_a_clear_gain(batch, seconds, way):
    """A round of these gives two tokens, and plain decoding's takes a second."""
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda n: PLAIN)
    programs = {each: (batch, each) for each in (PLAIN, CHAIN)}
    known(pace, programs, {PLAIN: 1.0, CHAIN: seconds})
    pace.heard(CHAIN, [0, 2] * 40, 80)
    assert pace.choose(batch, programs, hurry=True)[0] == programs[way]


@pytest.mark.parametrize(("batch", "wait", "least"), [(1, 32, 1), (2, 512, 8), (8, 2048, 8)])
def test_probes_of_several_are_rare_and_long(batch, wait, least):
    """The drafter may have to read whole prompts for them."""
    pace = Pace(Chooser((PLAIN, CHAIN), CHAIN), None, lambda n: PLAIN)
    programs = {way: (batch, way) for way in (PLAIN, CHAIN)}
    known(pace, programs, {PLAIN: 1.0, CHAIN: 1.3})
    pace.heard(CHAIN, [0] * 8, 8)  # so it is given up
    waited = 0
    while (choice := pace.choose(batch, programs, hurry=False, can_try=False))[0][1] == PLAIN:
        waited += choice[1]
        pace.heard(PLAIN, [], choice[1])
    assert waited == wait and pace._chooser._left >= least  # which may take several calls
    for _ in range(12):  # probes that tell nothing
        waited = 0
        while (choice := pace.choose(batch, programs, hurry=False, can_try=False))[0][1] == PLAIN:
            waited += choice[1]
            pace.heard(PLAIN, [], choice[1])
        pace.heard(CHAIN, [], pace._chooser._left)
    assert waited == (256 if batch == 1 else 1024 * batch)


def test_calls_are_short_where_somebody_is_read():
    """About as long as a chunk; and no call is longer than news may take."""
    pace, program = Pace(None, None, lambda batch: CHAIN), "program"
    assert pace.choose(1, {CHAIN: program}, hurry=True) == (program, 1)
    for _ in range(FOR_A_FIGURE):
        pace.took(program, 8, 8 * 0.01)
    assert pace.choose(1, {CHAIN: program}, hurry=False) == (program, 5)
    for _ in range(FOR_A_FIGURE):
        pace.took_with_chunk(program, 1, 0.01 + 0.032)
    assert pace.choose(1, {CHAIN: program}, hurry=True) == (program, 3)
