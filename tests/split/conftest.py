"""A server without a model that the tests of one file share, and clients that try again soon."""

from __future__ import annotations

import pytest

from tests.split.split_server import ToySlots, running


@pytest.fixture
def impatient(monkeypatch):
    """Attempts to connect again come fast."""
    monkeypatch.setattr("infer.split_client.session.FIRST_WAIT", 0.01)
    monkeypatch.setattr("infer.split_client.session.LONGEST_WAIT", 0.1)


@pytest.fixture(scope="module")
def server():
    with running(ToySlots(8)) as found:
        yield found
        assert found.metric("split_failures_total") == 0
