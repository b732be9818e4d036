"""Answers of split clients whose links fail: cut, refused, reset, spoiled; a server that restarts."""

from __future__ import annotations

import random
import threading
import time

import pytest

from infer.split.answering import Ways
from infer.split.link import Denied, Lost
from infer.split.network.proxy import Proxy, in_thread
from moa_jax.config import DraftShape
from tests.split_client import (
    ToyHalf,
    alone,
    answered,
    ask,
    nothing_left,
    run_client,
    server_at,
)
from tests.split_server import ToySlots, plain, running

PROMPT = list(range(1, 21))
NEW = 60
CHAIN, TREE = Ways(), Ways(DraftShape(4, 2, 6))
WAYS = {
    "chain": CHAIN,
    "tree": TREE,
    "plain": Ways(lengths=()),
    "stream": Ways(lengths=(), stream=True),
    "no-ahead": Ways(draft_ahead=False),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Attempts to connect again come fast."""
    monkeypatch.setattr("infer.split.answering.FIRST_WAIT", 0.01)
    monkeypatch.setattr("infer.split.answering.LONGEST_WAIT", 0.1)


@pytest.fixture(scope="module")
def server():
    with running(ToySlots(8)) as found:
        yield found
        assert found.metric("split_failures_total") == 0


@pytest.mark.parametrize("name", WAYS)
def test_split_client_writes_the_targets_text(server, name):
    with nothing_left():
        found = ask(server_at(server.port), WAYS[name], PROMPT, NEW)
    assert found.tokens == plain(PROMPT, NEW) and found.done == "length"
    assert found.counts.drops == found.counts.rewritten == 0
    found.check()


def test_split_client_ends_at_stop_ids(server):
    stop = plain(PROMPT, 30)[29]
    found = ask(server_at(server.port), CHAIN, PROMPT, NEW, stop_ids=[stop])
    wanted = plain(PROMPT, NEW)
    assert found.tokens == wanted[: wanted.index(stop) + 1] and found.done == "stop"


def test_disconnect_offline_is_the_drafter_alone():
    with nothing_left():
        found = ask(None, CHAIN, PROMPT, NEW)
    assert found.tokens == alone(PROMPT, NEW) and all(found.kept)
    found.check("keep")
