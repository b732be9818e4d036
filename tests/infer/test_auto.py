"""Mode auto in the programs: its ways, what they cost, and the comparison with plain decoding."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from moa_jax.measure.pricing import price

from infer.bench import compare as comparison
from infer.cli.flags import auto, pair
from infer.cli.program import Parser
from moa_jax import Result
from moa_jax.config import DraftShape
from moa_jax.decode.generation import Call
from moa_jax.decode.session import PLAIN, Session
from moa_jax.errors import InputError
from tests.decode.test_chunks import drafter, target

OWN = DraftShape(4)


def parse(*flags: str):
    parser = Parser("test", None)
    pair.add_pair_flags(parser)
    pair.add_draft_flags(parser)
    return parser.parse_args(list(flags))


def test_ways_are_plain_the_own_shape_chains_and_a_tree():
    ways = auto.ways_of(OWN)
    assert ways[:2] == (PLAIN, OWN) and DraftShape(8) in ways and len(set(ways)) == len(ways)
    assert sum(way.is_dynamic for way in ways) == 1
    drawn = auto.ways_of(DraftShape(4, sampled=True))
    assert all(way.is_chain and (way.sampled or way == PLAIN) for way in drawn)


def test_a_drafter_without_weights_has_its_own_shape_alone():
    assert auto.ways_of(OWN, drafter("lookup")) == (PLAIN, OWN)
    assert auto.ways_of(OWN, drafter("moa-0")) == auto.ways_of(OWN)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [((), "auto"), (("--depth", "3"), "chain"), (("--num-speculative-tokens", "3"), "chain")]
    + [(("--sampled-drafts",), "chain"), (("--mode", "auto", "--sampled-drafts"), "auto")]
    + [(("--mode", name), name) for name in ("auto", "chain", "tree")]
    + [(("--mode", "auto", "--depth", "3"), "auto")],
)
def test_whoever_gives_a_depth_wants_a_chain(flags, mode):
    assert pair.asked_mode(parse(*flags)) == mode


def session_of(folder) -> Session:
    args = parse()
    args.weights = None
    return pair.open_session(args, target(), drafter("moa-0"))


def test_costs_are_measured_once(tmp_path, monkeypatch, capsys):
    """A second session finds them; one whose file is damaged says so and measures anew."""
    measured = []

    def price(session, batch, go_on=None):
        measured.append(batch)
        return {way: 1.0 + way.num_drafted for way in session.ways}

    monkeypatch.setattr(auto, "folder", lambda: tmp_path)
    monkeypatch.setattr(auto, "price", price)
    first = session_of(tmp_path)
    assert pair.mode_of(first) == "auto" and first.costs.for_batch(1) == {}
    auto.fill(first)
    auto.fill(first)
    second = session_of(tmp_path)
    auto.fill(second)
    assert measured == [1] and second.costs.for_batch(1) == first.costs.for_batch(1)
    assert second.costs.ms(1, PLAIN) == 1.0
    auto.fill(second, 4)
    assert measured == [1, 4] and session_of(tmp_path).costs.ms(4, PLAIN) == 1.0
    assert capsys.readouterr().err.count("timing") == 2
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    third = session_of(tmp_path)
    assert capsys.readouterr().err.count("\n") == 1 and third.costs.for_batch(1) == {}
    auto.fill(third)
    assert measured == [1, 4, 1]


def test_other_models_weights_and_cores_have_costs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "folder", lambda: tmp_path)
    places = {
        auto.costs_of(target(), drafter("moa-0"), None, None).place,
        auto.costs_of(target(), drafter("moa-1"), None, None).place,
        auto.costs_of(target(), drafter("moa-0"), None, "int8").place,
        auto.costs_of(target(), drafter("moa-0"), SimpleNamespace(ids_U=[1, 2]), None).place,
    }
    monkeypatch.setattr(auto, "_num_cores", lambda: 99)
    places.add(auto.costs_of(target(), drafter("moa-0"), None, None).place)
    assert len(places) == 5


def test_without_a_compile_cache_costs_stay_in_memory(monkeypatch):
    monkeypatch.undo()  # of the folder that conftest.py takes away
    was = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        assert auto.folder() is None
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/somewhere")
        assert auto.folder() is None
        jax.config.update("jax_compilation_cache_dir", "somewhere")
        assert str(auto.folder()) == "somewhere/costs"
    finally:
        jax.config.update("jax_compilation_cache_dir", was)


def test_a_chat_measures_while_somebody_types(monkeypatch, capsys):
    """Without a word, once, and not at all where a program ends."""
    asked = []

    def price(session, batch, go_on):
        asked.append(go_on())
        return {way: 1.0 for way in session.ways}

    monkeypatch.setattr(auto, "price", price)
    session = session_of(None)
    for _ in range(2):
        auto.fill_meanwhile(session)
        session.background.wait()
    assert asked == [True] and session.costs.ms(1, PLAIN) == 1.0
    assert capsys.readouterr().err == ""


def test_pricing_gives_up_when_it_is_told_to():
    session = Session(target(), drafter("moa-0"), OWN, ways=(DraftShape(3),))
    assert price(session, 1, lambda: False) == {}


def test_a_price_leaves_out_the_rounds_in_which_caches_warm_up(monkeypatch):
    class Cold:
        """A generation whose first rounds are slow."""

        def __init__(self) -> None:
            self.rounds = 0

        def take(self, way, rounds):
            first, self.rounds = self.rounds, self.rounds + rounds
            spent = sum(1.0 if index < 14 else 0.25 for index in range(first, self.rounds))
            return Call(way, rounds, spent)

        def catch_up(self):
            return 1.0

    ways = (PLAIN, OWN)
    monkeypatch.setattr("moa_jax.measure.pricing._begin", lambda session, batch: Cold())
    found = price(SimpleNamespace(ways=ways))
    assert found == {PLAIN: 1e3 * (0.25 + 1 / 32), OWN: 250.0}  # plain: its share of catching up


@pytest.mark.parametrize("total, rounds, before", [(20, 8, 12), (15, 8, 7), (3, 2, 1), (1, 1, 0)])
def test_a_way_whose_drafts_end_the_text_has_a_price(total, rounds, before, monkeypatch):
    class Short:
        """A text that ends after few rounds, each slower than the one before."""

        taken = 0

        def take(self, way, rounds):
            first, self.taken = self.taken, min(self.taken + rounds, total)
            return Call(way, self.taken - first, float(sum(range(first, self.taken))))

    monkeypatch.setattr("moa_jax.measure.pricing._begin", lambda session, batch: Short())
    found = price(SimpleNamespace(ways=(OWN,)))
    assert found == {OWN: 1e3 * sum(range(before, total)) / rounds}


class Fake:
    """A session that answers any prompt with these tokens."""

    def __init__(self, tokens: list[int], accepted: list[int]) -> None:
        self.tokens, self.accepted = tokens, accepted

    def generate(self, prompts, count, **settings):
        self.settings = settings
        drafted = [3] * len(self.accepted)
        return [Result(prompts[0], self.tokens, "stop", self.accepted, 0.1, 0.5, drafted)]

    background = SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("tokens, word", [([7, 8, 9, 3], "the same"), ([7, 8, 9, 4], "DIFFERENT")])
def test_a_comparison_says_what_it_saw(monkeypatch, tokens, word):
    monkeypatch.setattr(comparison, "SECONDS", 0.0)
    ways = {"plain": Fake([7, 8, 9, 3], [1, 1, 1]), "auto": Fake(tokens, [3])}
    said = comparison.compare_in_turns(ways, [[1], [2, 3]], 9, lambda index: {"sampling": index})
    plain, drafted, sentence = said.splitlines()[2:]
    assert plain.startswith("| plain | 6.0 (6.0 to 6.0) | 1.00 ") and "| 1.00 | 2/2 |" in plain
    assert drafted.startswith("| auto | 6.0 ") and "| 3.00 |" in drafted
    assert f"auto writes {word} tokens, 1.00 x as fast" in sentence
    assert "2 prompts, once each" in sentence and ways["auto"].settings == {"sampling": 1}


def test_bundled_questions_are_one_of_each_set(monkeypatch):
    monkeypatch.setattr(comparison, "asking", lambda text, tokenizer: text)
    found = comparison.bundled_questions(None)
    assert len(set(found)) == len(found) == 6


@pytest.mark.slow
def test_prices_are_of_every_way_and_teach_nothing(monkeypatch):
    """Random prompts say nothing of what people ask."""
    monkeypatch.setattr("moa_jax.measure.pricing.TURNS", 2)
    session = Session(target(), drafter("moa-0"), OWN, ways=(DraftShape(3, 2, 4),))
    monkeypatch.setattr(session.chooser, "heard", None)
    found = price(session, batch=2)
    assert set(found) == set(session.ways) and all(0 < ms < 1e4 for ms in found.values())


@pytest.mark.slow
def test_prices_need_room():
    small = Session(target(), drafter("moa-0"), OWN, ways=(DraftShape(3),), cache_rows=128)
    assert set(price(small)) == set(small.ways)
    with pytest.raises(InputError, match="make them larger"):
        price(Session(target(), drafter("moa-0"), OWN, ways=(DraftShape(64, 2),), cache_rows=128))
