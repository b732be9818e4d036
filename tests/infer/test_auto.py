"""Mode auto in the programs: draft shapes, their costs, and the comparison with plain decoding."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from infer.cli.flags import auto, pair
from moa_jax.config import DraftShape
from moa_jax.decode.session import Session
from moa_jax.model.kernels import cpu
from moa_jax.speculation.calibrate import TURNS
from moa_jax.speculation.controller import NO_DRAFT
from tests.decode.test_chunks import drafter, target
from tests.infer.test_pair import parse

OWN = DraftShape(4)


def test_ways_are_plain_the_own_shape_chains_and_a_tree():
    ways = auto.ways_of(OWN)
    assert ways[:2] == (NO_DRAFT, OWN) and DraftShape(8) in ways and len(set(ways)) == len(ways)
    assert sum(way.is_dynamic for way in ways) == 1
    assert auto.ways_of(OWN, drafter("lookup")) == (NO_DRAFT, OWN)
    drawn = auto.ways_of(DraftShape(4, sampled=True))
    assert all(way.is_chain and (way.sampled or way == NO_DRAFT) for way in drawn)


@pytest.mark.parametrize(
    ("flags", "mode"),
    [((), "auto"), (("--depth", "3"), "chain"), (("--num-speculative-tokens", "3"), "chain")]
    + [(("--sampled-drafts",), "chain"), (("--mode", "auto", "--sampled-drafts"), "auto")]
    + [(("--mode", name), name) for name in ("auto", "chain", "tree")]
    + [(("--mode", "auto", "--depth", "3"), "auto")],
)
def test_a_depth_selects_a_chain(flags, mode):
    assert pair.asked_mode(parse(*flags)) == mode


def session_of(folder) -> Session:
    args = parse()
    args.weights = None
    return pair.open_session(args, target(), drafter("moa-0"))


@pytest.fixture
def timed(monkeypatch) -> list[int]:
    """Records the batches that sessions time, without decoding."""
    batches: list[int] = []

    def seconds(session, batch, shape, length):
        batches.append(batch)
        return 1e-3 * (1.0 + shape.num_drafted)

    monkeypatch.setattr(Session, "seconds_of_a_round", seconds)
    return batches


def test_costs_are_measured_once(tmp_path, monkeypatch, capsys, timed):
    """A second session reads the costs; a damaged file is reported and measured again."""
    monkeypatch.setattr(auto, "folder", lambda: tmp_path)
    first = session_of(tmp_path)
    calls = len(first.ways) * (1 + TURNS)
    assert pair.mode_of(first) == "auto" and first.costs.entries() == []
    auto.fill(first)
    auto.fill(first)
    second = session_of(tmp_path)
    auto.fill(second)
    assert timed == [1] * calls and second.costs.entries() == first.costs.entries()
    assert second.costs.ms(1, NO_DRAFT, 64) == 1.0
    auto.fill(second, 4)
    assert timed[calls:] == [4] * calls and session_of(tmp_path).costs.ms(4, NO_DRAFT, 64) == 1.0
    assert capsys.readouterr().err.count("timing") == 2
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    third = session_of(tmp_path)
    assert capsys.readouterr().err.count("\n") == 1 and third.costs.entries() == []
    auto.fill(third)
    assert timed[2 * calls :] == [1] * calls


def test_other_models_weights_cores_and_code_have_costs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "folder", lambda: tmp_path)
    keys = {
        auto.costs_of(target(), drafter("moa-0"), None, None).key,
        auto.costs_of(target(), drafter("moa-1"), None, None).key,
        auto.costs_of(target(), drafter("moa-0"), None, "int8").key,
        auto.costs_of(target(), drafter("moa-0"), SimpleNamespace(ids_U=[1, 2]), None).key,
    }
    with cpu.laid_out_for(cpu.MANY_ROWS):
        keys.add(auto.costs_of(target(), drafter("moa-0"), None, None).key)
    monkeypatch.setattr(auto, "_num_cores", lambda: 99)
    keys.add(auto.costs_of(target(), drafter("moa-0"), None, None).key)
    monkeypatch.setattr(Path, "read_bytes", lambda file: b"changed code")
    keys.add(auto.costs_of(target(), drafter("moa-0"), None, None).key)
    assert len(keys) == 7


def test_without_a_compile_cache_costs_stay_in_memory(monkeypatch):
    monkeypatch.undo()  # conftest.py removes the folder
    places = {None: None, "gs://bucket/somewhere": None, "somewhere": Path("somewhere/costs")}
    for place, found in places.items():
        held = SimpleNamespace(jax_compilation_cache_dir=place, jax_enable_compilation_cache=True)
        monkeypatch.setattr(auto, "jax", SimpleNamespace(config=held))
        assert auto.folder() == found


def test_a_chat_measures_while_a_user_types(capsys, timed):
    """The measurement prints nothing and runs once."""
    session = session_of(None)
    for _ in range(2):
        auto.fill_meanwhile(session)
        session.background.wait()
    assert timed == [1] * len(session.ways) * (1 + TURNS)
    assert session.costs.ms(1, NO_DRAFT, 64) == 1.0
    assert capsys.readouterr().err == ""
