"""Servers and pairs that the tests of one file share, and fast reconnects."""

from __future__ import annotations

from typing import Any

import pytest

from moa_jax.pretrained import describe_target
from moa_jax.split.client_drafter import ClientDrafter
from moa_jax.split.pairing import pairing_of
from moa_jax.split.server_target import TargetSlots
from tests.pairs import Pair, random_pair_of
from tests.split.split_server import ToySlots, running


@pytest.fixture
def impatient(monkeypatch):
    """Shortens the time between attempts to connect."""
    monkeypatch.setattr("infer.split_client.session.FIRST_WAIT", 0.01)
    monkeypatch.setattr("infer.split_client.session.LONGEST_WAIT", 0.1)


@pytest.fixture(scope="module")
def server():
    with running(ToySlots(8)) as found:
        yield found
        assert found.metric("split_failures_total") == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    """Returns a random pair; some of its drafts are accepted."""
    return random_pair_of(1, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def slots(pair: Pair):
    """Returns slots with few sizes, so that few programs are compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moa_jax.split.server_target.NODES", (16,))
        patch.setattr("moa_jax.split.server_target.SESSIONS", (4,))
        yield TargetSlots(
            pair.target, pair.drafter, num_slots=4, max_tokens=64, max_nodes=16, chunk=32
        )


@pytest.fixture(scope="module")
def facts(pair: Pair) -> dict[str, Any]:
    return pairing_of(pair.target, pair.drafter)


@pytest.fixture(scope="module")
def drafter(pair: Pair) -> ClientDrafter:
    """Returns a drafter that reads its borrowed weights from files, not from the target."""
    return ClientDrafter(describe_target(pair.target.folder), pair.drafter, max_tokens=64)
