"""Answers of split clients whose server sends wrong replies, or fails at one message."""

from __future__ import annotations

import dataclasses

import pytest

from infer.split_client.state import ClientOptions
from infer.split_server.sessions import ReplyBuffer
from moa_jax.split import protocol
from tests.split import split_client
from tests.split.split_client import CHAIN, CLOSE, HANG, NEW, OPTIONS, PROMPT, ask, relayed
from tests.split.split_server import LIMITS

pytestmark = pytest.mark.usefixtures("impatient")


def relays(server, spoil, options: ClientOptions = CHAIN, **given):
    """Returns an answer of a client that limits its waits once the server has opened a session."""
    options = dataclasses.replace(options)

    def spoil_in_haste(message, seen):
        if len(seen) > 1:
            split_client.hurry(client, options)
        return spoil(message, seen)

    with relayed(server.port, spoil_in_haste) as port, split_client.nothing_left():
        client = split_client.server_at(port)
        return ask(client, options, PROMPT, NEW, **given)


@pytest.mark.parametrize("seed", range(5))
def test_disconnect_messages_twice_late_never_and_broken(server, seed):
    name = list(OPTIONS)[seed % len(OPTIONS)]
    relays(server, split_client.spoiler(seed, 8), OPTIONS[name]).check()


@pytest.mark.parametrize("skips", [True, False], ids=["this server", "an earlier server"])
def test_disconnect_stream_resumes_after_the_received_parts(server, skips, monkeypatch):
    """A server that cannot skip streamed parts sends all of them again, as earlier servers do."""
    if not skips:
        add = ReplyBuffer.add
        without_end = lambda reply, part, complete, end=0: add(reply, part, complete)
        monkeypatch.setattr(ReplyBuffer, "add", without_end)
    closed, parts = [], []

    def spoil(message, seen):
        part = protocol.decode_down(message, LIMITS)
        if isinstance(part, protocol.Committed) and part.seq == 1:
            if part.start == len(PROMPT) + 30 and not closed:
                closed.append(part)
                return [CLOSE]
            parts.append(part.start)
        return [message]

    found = relays(server, spoil, OPTIONS["stream"])
    found.check()
    assert closed and found.counts.drops == 1
    starts = range(len(PROMPT), len(PROMPT) + NEW - 1)
    assert parts == ([*starts] if skips else [*starts[:30], *starts])


FORGED = {
    "too much": {"tokens": list(range(30))},
    "more for ever": {"more": True, "tokens": [], "done": ""},
    "another end": {"done": "stop"},
    "other rows": {"rows": b"123"},
    "no rows": {"count": 0, "rows": b""},
    "rows before": {"start": 0},
    "rows behind": {"start": 70},
    "the future": {"seq": 1000},
}


@pytest.mark.parametrize("name", FORGED)
def test_disconnect_replies_that_do_not_fit_are_lost_links(server, name):
    """If the same reply is always wrong, the client completes the answer alone and ends soon."""

    def spoil(message, seen):
        if message[1] == 67 and len(seen) > 8:
            verdict = protocol.decode_down(message, LIMITS)
            return [protocol.encode(dataclasses.replace(verdict, **FORGED[name]))] * 3
        return [message]

    found = relays(server, spoil, dataclasses.replace(CHAIN, reconnect_seconds=0.3))
    found.check("keep")
    assert found.counts.drops


@pytest.mark.parametrize("kind", ["Opened", "Committed", "Resumed"])
@pytest.mark.parametrize("then", [CLOSE, HANG, "flood", "denied"])
def test_disconnect_servers_that_fail_at_one_message_always(server, kind, then):
    """Once the answer has begun, every message of one kind is replaced."""
    number = {"Opened": 66, "Committed": 67, "Resumed": 68}[kind]
    fault = protocol.encode(protocol.Fault("pairing", "no", True))

    def spoil(message, seen):
        if len(seen) == 7:
            return [CLOSE]
        if len(seen) < 7 or message[1] != number:
            return [message]
        return {"flood": [seen[0]] * 2000, "denied": [fault]}.get(then, [then])

    options = dataclasses.replace(CHAIN, reconnect_seconds=30 if kind == "Opened" else 0.5)
    with relayed(server.port, spoil) as port:
        found = ask(split_client.server_at(port), options, PROMPT, NEW, haste=0.3)
    found.check("verify" if kind == "Opened" else "keep")  # a resume sends no Opened
