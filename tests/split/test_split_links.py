"""What a link costs a split client while it is there, and what is kept when it is not."""

from __future__ import annotations

import dataclasses
import time

import pytest

from tests.split.split_client import (
    CHAIN,
    CLOSE,
    NEW,
    OPTIONS,
    PROMPT,
    ToyDrafter,
    answered,
    ask,
    linked,
    nothing_left,
    relayed,
    run_client,
    server_at,
)
from tests.split.split_server import Client, ToySlots, running

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize("name", ["chain", pytest.param("tree", marks=pytest.mark.slow)])
def test_split_client_drafting_ahead_delays_no_reply(server, name):
    """A token takes far longer than a reply: nothing of use can be drafted meanwhile."""
    drafter, steps = ToyDrafter(), []
    chain, tree = drafter.chain, drafter.tree

    def slow(text, known, count):
        steps.append(count)
        time.sleep(3.0 if count == 1 else 0.15)
        return chain(text, known, count)

    def slow_tree(text, shape):
        time.sleep(0.15 * (shape.depth - 1))
        return tree(text, shape)

    drafter.chain, drafter.tree = slow, slow_tree
    options = dataclasses.replace(OPTIONS[name], lengths=(3,))
    found = ask(server_at(server.port), options, PROMPT, 8, drafter)
    found.check()
    assert found.counts.round_trips_s[0] < 2.9  # a reply's time, not a token's
    drafts = found.counts.rounds if name == "chain" else 0
    assert len(steps) <= drafts + 2 and set(steps) <= {1, 2, 3}
    ahead = steps if name == "tree" else steps[1:2]
    assert set(ahead) <= {1}


@pytest.mark.slow
def test_split_client_waits_for_a_server_that_lives(server):
    """It compiles, say: no reply comes for long, but pongs do."""
    with running(ToySlots(2)) as slow, nothing_left():
        slow.slots.seconds = 5.0
        found = ask(server_at(slow.port, timeout=4.0), CHAIN, PROMPT[:3], 1)
    found.check()
    assert found.counts.drops == 0


def test_split_client_does_not_wait_for_a_link_that_is_dead(server):
    with linked(server.port) as proxy:
        times = []

        def act(index, answering):
            times.append(time.monotonic())
            object.__setattr__(address, "timeout", 0.4)  # only now, as the first call may take long
            if index == 3:
                proxy.cut()
            if answering.text.is_written:
                proxy.heal()

        address = server_at(proxy.port)
        found = ask(address, CHAIN, PROMPT, NEW, act=act)
    found.check()
    assert found.counts.drops >= 1
    assert times[3] - times[2] < 20  # far below what a reply may take


def test_disconnect_rows_of_a_prompt_come_once_over_links_that_die(server):
    """No link brings more than a few parts: each goes on where the last one ended."""
    prompt = [*range(97), *range(97)]
    verdicts = []

    def spoil(message, seen):
        if len(seen) % 7 == 0:
            return [CLOSE]
        verdicts.append(message[1] == 67)
        return [message]

    with relayed(server.port, spoil) as port, nothing_left():

        async def work(answering):
            await answered(answering, [5], 1)  # the server is known
            return await answered(answering, prompt, NEW)

        found = run_client(server_at(port), CHAIN, work)
    found.check()
    assert found.counts.prompts == 1
    assert sum(verdicts) < 25 + 2 * NEW  # 194 tokens in parts of 8


def test_split_rows_come_in_parts_of_few_bytes():
    with running(ToySlots(1, width=700)) as server, Client(server) as client:
        parts = client.open(PROMPT)
        assert len(parts) > 10 and max(len(part.rows) for part in parts) <= 32 << 10
        starts = [part.start for part in parts]
        assert starts == [0, *(part.start + part.count for part in parts[:-1])]
        assert parts[-1].start + parts[-1].count == len(PROMPT) and parts[-1].tokens
        assert not any(part.tokens or not part.more for part in parts[:-1])


def test_split_replies_in_small_parts_are_taken_in_whole(monkeypatch):
    monkeypatch.setattr("infer.split_server.sessions.PART_BYTES", 100)  # of two tokens
    drafter, sizes = ToyDrafter(), []
    absorb = drafter.absorb
    drafter.absorb = lambda start, tokens, rows: (
        sizes.append(len(tokens)),
        absorb(start, tokens, rows),
    )
    with running(ToySlots()) as server:
        found = ask(server_at(server.port), CHAIN, PROMPT, NEW, drafter)
    found.check()
    assert sizes[0] == len(PROMPT)
    assert sizes[1:] == found.counts.accept_lengths and max(sizes[1:]) > 2
