"""Answers of split clients whose links are cut, refused, reset, slow or dead, and then healed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time

import pytest

from infer.split_client.link import ConnectionLost
from moa_jax.config import Sampling
from moa_jax.split import protocol
from tests.conftest import slow
from tests.split import split_client
from tests.split.split_client import CHAIN, NEW, OPTIONS, PROMPT, answered, ask, linked, server_at
from tests.split.split_server import Client, ToySlots, opening, plain, running

pytestmark = pytest.mark.usefixtures("impatient")
BOTH_POLICIES = pytest.mark.parametrize("policy", ["verify", "keep"])


@pytest.fixture
def proxy(server):
    """Returns a link to the server that can fail."""
    with linked(server.port) as found:
        yield found


SEEDS = [0, 1, *map(slow, (2, 3))]


@BOTH_POLICIES
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_disconnect_text_is_the_targets_or_was_kept(server, name, seed, policy):
    options = dataclasses.replace(OPTIONS[name], policy=policy)
    prompt = [token * 31 % 97 for token in range((1, 5, 20, 40)[seed % 4])]
    with split_client.nothing_left(), linked(server.port) as proxy:
        act = split_client.failing(proxy, seed, 0.25)
        found = ask(server_at(proxy.port), options, prompt, NEW, act=act, haste=0.5)
        proxy.heal()
    found.check(policy)


def test_disconnect_before_the_first_answer_is_an_error_and_later_not(proxy):
    """Without a server, the first answer raises; after one answer, the client drafts alone."""

    async def work(answering):
        proxy.refuse()
        with pytest.raises(ConnectionLost):
            await answered(answering, PROMPT, NEW)
        proxy.heal()
        first = await answered(answering, PROMPT, NEW)
        proxy.refuse()
        heal = lambda index, _: proxy.heal() if index == 4 else None
        return first, await answered(answering, [7, *PROMPT], NEW, act=heal)

    with split_client.nothing_left():
        first, second = split_client.run_client(server_at(proxy.port), CHAIN, work)
    first.check()
    second.check()
    assert first.counts.drops == 0
    begin = second.events[0]
    assert begin.verified == 0 and begin.notice.startswith("link lost: ")


@BOTH_POLICIES
@pytest.mark.parametrize("seed", range(4))
def test_disconnect_while_the_prompt_is_read(proxy, policy, seed):
    """The rows of a long prompt arrive in parts; the link is cut at any byte."""
    prompt = [seed * 7 % 97, *range(60)]

    async def work(answering):
        await answered(answering, [5], 3)  # first contact
        proxy.reset_after(random.Random(seed).randrange(2500), "down")
        return await answered(answering, prompt, NEW)

    options = dataclasses.replace(CHAIN, policy=policy)
    split_client.run_client(server_at(proxy.port), options, work).check(policy)


@pytest.mark.parametrize(
    ("name", "policy"), [("chain", "verify"), ("tree", "keep"), ("plain", "verify")]
)
def test_disconnect_for_good_ends_alone(proxy, name, policy):
    options = dataclasses.replace(OPTIONS[name], policy=policy, reconnect_seconds=0.2)
    refuse = lambda index, _: proxy.refuse() if index == 5 else None
    with split_client.nothing_left():
        found = ask(server_at(proxy.port), options, PROMPT, NEW, act=refuse)
    assert found.kept[-1] and not found.kept[0]
    found.check("keep")


def test_disconnect_for_good_without_a_drafter_of_chains(proxy):
    """A drafter that only makes trees waits for a link, and ends after a time limit."""
    drafter = split_client.ToyDrafter(can_go_on=False)
    options = dataclasses.replace(split_client.TREE, reconnect_seconds=0.3)
    refuse = lambda index, _: proxy.refuse() if index == 5 else None
    found = ask(server_at(proxy.port), options, PROMPT, NEW, drafter, act=refuse)
    assert found.done == "lost" and not any(found.kept)


@BOTH_POLICIES
@pytest.mark.parametrize("stop", range(0, 97, 16))
def test_disconnect_stop_id_in_tokens_drafted_alone(proxy, policy, stop):
    """A stop token of the drafter ends the answer if it is kept, or if it is the target's token."""

    def act(index, answering):
        if index == 3:
            proxy.refuse()
        if index == 9 or answering.text.is_written:
            proxy.heal()

    options = dataclasses.replace(CHAIN, policy=policy)
    found = ask(server_at(proxy.port), options, PROMPT, NEW, stop_ids=[stop], act=act)
    found.check(policy, "stop" if stop in found.tokens else "length")
    assert stop not in found.tokens[:-1]


# Servers that are full, drain, or have another token


def test_disconnect_replay_waits_for_a_slot_while_the_drafter_decodes():
    """Another client has the slot of the lost session until the drafter has decoded for a while."""
    alone = []
    with running(ToySlots(1)) as server, linked(server.port) as proxy, Client(server) as other:

        def act(index, answering):
            if index == 4:
                proxy.refuse()
                server.wait(lambda: server.service.num_connected == 0)
                other.send(opening(PROMPT))
                assert isinstance(other.receive(), protocol.Opened)
                proxy.heal()
            elif not split_client.is_linked(answering):
                alone.append(len(answering.text.answer))
                if len(alone) == 2:  # the first event without a link comes before the replay
                    server.wait(lambda: server.service._queue.num_waiting)
                if len(alone) == 12:
                    other.send(protocol.Close())

        found = ask(server_at(proxy.port), CHAIN, PROMPT, 200, act=act)
    found.check()
    assert alone[11] > alone[1] and found.counts.prompts == 2


def test_disconnect_server_that_drains_is_left_and_found_again():
    """One server gets SIGTERM, and another one takes its place: the answer continues there."""
    with running(ToySlots(2)) as first, running(ToySlots(2)) as second:
        with linked(first.port) as proxy:

            def act(index, answering):
                if index == 4:
                    proxy._target = ("127.0.0.1", second.port)
                    first.drain(0).result(10)

            found = ask(server_at(proxy.port), CHAIN, PROMPT, NEW, act=act)
        found.check()
        assert found.counts.drops >= 1
        assert second.named("open") and found.counts.prompts == 2


@pytest.mark.parametrize("last", [1, 3, 6, 8])
def test_disconnect_client_that_is_stopped_leaves_nothing(server, last):
    """The reader of an answer stops at any event, with and without a link."""

    async def work(answering):
        events = answering.answer(PROMPT, 20 + NEW, [], Sampling())
        async with contextlib.aclosing(events):
            count = 0
            async for _ in events:
                split_client.hurry(client, options, 0.3)
                count += 1
                if count == 4:
                    await asyncio.to_thread(proxy.cut if last == 6 else proxy.refuse)
                if count == last:
                    await answering.stop(2)
                    break
        return answering.text.answer

    with split_client.nothing_left(), linked(server.port) as proxy:
        client, options = server_at(proxy.port), dataclasses.replace(CHAIN)
        found = split_client.run_client(client, options, work)
    assert found == plain(PROMPT, NEW)[:2][: len(found)]


# Links that are slow or dead, and kept tokens


@pytest.mark.slow
def test_split_client_waits_for_a_server_that_lives():
    """A server that compiles sends no reply for a long time, but it sends pongs."""
    with running(ToySlots(2)) as slow, split_client.nothing_left():
        slow.slots.seconds = 2.5
        found = ask(server_at(slow.port, timeout=2.0), CHAIN, PROMPT[:3], 1)
    found.check()
    assert found.counts.drops == 0


def test_split_client_does_not_wait_for_a_link_that_is_dead(proxy):
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
    assert times[3] - times[2] < 20  # far below the time limit of a reply
