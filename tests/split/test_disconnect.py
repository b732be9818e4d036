"""Answers of split clients whose links fail: cut, refused, reset, or of servers that lie."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from infer.split.client.answering import SplitClient
from infer.split.client.replies import TokenRows, joined
from infer.split.client.state import ClientOptions
from infer.split.link import Busy, Lost
from infer.split.network.proxy import Proxy
from infer.split.server.app import ConnectionLimits
from moa_jax.config import DraftShape, Sampling
from moa_jax.split import wire
from tests.split.split_client import (
    CLOSE,
    HANG,
    ToyHalf,
    alone,
    answered,
    ask,
    ask_in_haste,
    hurry,
    is_linked,
    linked,
    nothing_left,
    relayed,
    rest_until_linked,
    run_client,
    server_at,
    spoiler,
)
from tests.split.split_server import (
    LIMITS,
    PATIENCE,
    Client,
    ToySlots,
    next_token,
    opening,
    plain,
    running,
)

PROMPT = list(range(1, 21))
NEW = 60
CHAIN, TREE = ClientOptions(), ClientOptions(DraftShape(4, 2, 6))
OPTIONS = {
    "chain": CHAIN,
    "tree": TREE,
    "plain": ClientOptions(lengths=()),
    "stream": ClientOptions(lengths=(), stream=True),
    "no-ahead": ClientOptions(draft_ahead=False),
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Attempts to connect again come fast."""
    monkeypatch.setattr("infer.split.client.session.FIRST_WAIT", 0.01)
    monkeypatch.setattr("infer.split.client.session.LONGEST_WAIT", 0.1)


@pytest.fixture(scope="module")
def server():
    with running(ToySlots(8)) as found:
        yield found
        assert found.metric("split_failures_total") == 0


@pytest.mark.parametrize("name", OPTIONS)
def test_split_client_writes_the_targets_text(server, name):
    with nothing_left():
        found = ask(server_at(server.port), OPTIONS[name], PROMPT, NEW)
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


# Links through a proxy that fails as a schedule says


def fault(proxy: Proxy, chance: random.Random) -> None:
    """Something goes wrong with the link, and is well again soon."""
    kind = chance.choice(["cut", "refuse", "up", "down", "down", "down"])
    if kind in ("cut", "refuse"):
        getattr(proxy, kind)()
        threading.Timer(chance.uniform(0.0, 0.3), proxy.heal).start()
    else:
        proxy.reset_after(chance.choice([0, 1, 5, 40, 200, 1000, 3000]), kind)


def with_faults(seed: int, server, options: ClientOptions, every: int = 4, **given):
    """An answer with a fault every few events."""
    chance = random.Random(seed)
    with linked(server.port) as proxy:

        def act(index: int, answering) -> None:
            if chance.random() * every < 1:
                fault(proxy, chance)
            if chance.random() < 0.2:
                time.sleep(chance.uniform(0, 0.02))

        prompt = [chance.randrange(97) for _ in range(chance.choice([1, 5, 20, 40]))]
        found = ask_in_haste(server_at(proxy.port), options, prompt, NEW, act=act, **given)
        proxy.heal()
    return found


MATRIX = [(name, seed) for name in OPTIONS for seed in range(2)]
MORE = [
    pytest.param(name, seed, marks=pytest.mark.slow) for name in OPTIONS for seed in range(2, 30)
]


@pytest.mark.parametrize(("name", "seed"), [*MATRIX, *MORE])
def test_disconnect_verified_text_is_the_targets(server, name, seed):
    with nothing_left():
        found = with_faults(seed, server, OPTIONS[name])
    found.check()
    assert found.tokens == plain(found.prompt, NEW) and found.done == "length"


@pytest.mark.parametrize(("name", "seed"), [*MATRIX, *MORE])
def test_disconnect_kept_text_stays_and_the_target_goes_on(server, name, seed):
    options = dataclasses.replace(OPTIONS[name], policy="keep")
    with nothing_left():
        found = with_faults(seed, server, options)
    found.check("keep")
    assert len(found.tokens) == NEW and found.done == "length"


def test_disconnect_before_the_first_answer_is_an_error_and_later_not(server):
    """Without a server there is none at the start; an answer after one is begun alone."""
    with linked(server.port) as proxy:

        async def work(answering):
            proxy.refuse()
            with pytest.raises(Lost):
                await answered(answering, PROMPT, NEW)
            proxy.heal()
            first = await answered(answering, PROMPT, NEW)
            proxy.refuse()
            heal = lambda index, _: proxy.heal() if index == 4 else None  # noqa: E731
            return first, await answered(answering, [7, *PROMPT], NEW, act=heal)

        with nothing_left():
            first, second = run_client(server_at(proxy.port), CHAIN, work)
        assert first.tokens == plain(PROMPT, NEW) and first.counts.drops == 0
        second.check()
        assert second.tokens == plain([7, *PROMPT], NEW)
        begin = second.events[0]
        assert begin.verified == 0 and begin.notice.startswith("link lost: ")


@pytest.mark.parametrize("policy", ["verify", "keep"])
@pytest.mark.parametrize("seed", range(4))
def test_disconnect_while_the_prompt_is_read(server, policy, seed):
    """The rows of a long prompt come in parts; they and the way there are cut anywhere."""
    prompt = [seed * 7 % 97, *range(60)]
    options = dataclasses.replace(CHAIN, policy=policy)
    with linked(server.port) as proxy:

        async def work(answering):
            await answered(answering, [5], 3)  # the server is known
            proxy.reset_after(random.Random(seed).randrange(2500), "down")
            return await answered(answering, prompt, NEW)

        found = run_client(server_at(proxy.port), options, work)
    found.check(policy)
    assert found.done == "length"
    if policy == "verify":
        assert found.tokens == plain(prompt, NEW)


def test_disconnect_for_good_ends_alone(server):
    for name, policy in (("chain", "verify"), ("tree", "keep"), ("plain", "verify")):
        options = dataclasses.replace(OPTIONS[name], policy=policy, reconnect_seconds=0.2)
        with linked(server.port) as proxy, nothing_left():
            refuse = lambda index, _, proxy=proxy: proxy.refuse() if index == 5 else None  # noqa: E731
            found = ask(server_at(proxy.port), options, PROMPT, NEW, act=refuse)
        assert found.done == "length" and found.kept[-1] and not found.kept[0]
        found.check("keep")


def test_disconnect_for_good_without_a_drafter_to_go_on(server):
    """A drafter that only makes trees waits for a link, and gives up in time."""
    with linked(server.port) as proxy:
        half, options = ToyHalf(can_go_on=False), dataclasses.replace(TREE, reconnect_seconds=0.3)
        refuse = lambda index, _: proxy.refuse() if index == 5 else None  # noqa: E731
        found = ask(server_at(proxy.port), options, PROMPT, NEW, half, act=refuse)
        assert found.done == "lost" and not any(found.kept)
        proxy.heal()
        options = dataclasses.replace(TREE, reconnect_seconds=30)

        def blink(index, _):
            if index == 5:
                proxy.refuse()
                proxy.heal()

        found = ask(server_at(proxy.port), options, PROMPT, NEW, half, act=blink)
        assert found.tokens == plain(PROMPT, NEW) and found.counts.drops == 1


def test_disconnect_stop_id_in_what_was_written_alone(server):
    """A stop of the drafter's ends the answer if it is kept; else only if it is the target's."""
    wanted = plain(PROMPT, NEW)
    for policy in ("verify", "keep"):
        options = dataclasses.replace(CHAIN, policy=policy)
        for stop in range(0, 97, 6):
            with linked(server.port) as proxy:

                def act(index, answering, proxy=proxy):
                    if index == 3:
                        proxy.refuse()
                    if index == 9 or answering.text.is_written:
                        proxy.heal()

                found = ask(server_at(proxy.port), options, PROMPT, NEW, stop_ids=[stop], act=act)
            found.check(policy)
            assert stop not in found.tokens[:-1]
            if policy == "verify":
                end = wanted.index(stop) + 1 if stop in wanted else NEW
                assert found.tokens == wanted[:end]


def test_disconnect_session_that_is_gone_is_replayed(server):
    """The slot was given away, or the server is another one: all tokens start it again."""
    for policy in ("verify", "keep"):
        options = dataclasses.replace(CHAIN, policy=policy)
        half, gone = ToyHalf(), []
        with linked(server.port) as proxy:

            def act(index, answering, proxy=proxy, half=half, gone=gone):
                rest_until_linked(half, answering)
                is_back = is_linked(answering) and answering.counts.prompts > len(gone)
                if index < 4 or len(gone) == 2 or not is_back:
                    return
                gone.append(index)
                proxy.refuse()
                sessions = server.service._sessions
                server.loop.call_soon_threadsafe(
                    lambda: [server.service.close(s, "test") for s in list(sessions.values())]
                )
                server.wait(lambda: not sessions)
                proxy.heal()

            found = ask(server_at(proxy.port), options, PROMPT, 200, half, act=act)
        assert len(gone) == 2 and found.counts.prompts >= 3
        found.check(policy)
        if policy == "verify":
            assert found.tokens == plain(PROMPT, 200)


def test_disconnect_client_waits_for_a_slot_and_writes_on():
    """A replay that queues is silent; meanwhile the drafter goes on."""
    with running(ToySlots(1), queue_seconds=20) as server:
        with linked(server.port) as proxy, Client(server) as other:
            opened = []

            def act(index, answering):
                if index == 4:
                    proxy.refuse()
                    server.wait(lambda: server.service.num_connected == 0)
                    other.send(opening(PROMPT))  # takes the slot away
                    assert isinstance(other.receive(), wire.Opened)
                    proxy.heal()
                    opened.append(len(answering.text.answer))
                if opened and len(answering.text.answer) > opened[0] + 20 and len(opened) == 1:
                    opened.append(len(answering.text.answer))
                    other.send(wire.Close())

            found = ask(server_at(proxy.port), CHAIN, PROMPT, 200, act=act)
    assert len(opened) == 2
    found.check()
    assert found.tokens == plain(PROMPT, 200)


def test_disconnect_server_without_room_is_said_at_the_start():
    with running(ToySlots(1), max_queue=0) as server, Client(server) as other:
        other.open(PROMPT)
        with nothing_left(), pytest.raises(Busy, match="queue is full"):
            ask(server_at(server.port), CHAIN, PROMPT, NEW)


def test_disconnect_server_that_drains_is_left_and_found_again():
    """SIGTERM to one server, another at its place: the answer goes on there."""
    with running(ToySlots(2)) as first, running(ToySlots(2)) as second:
        with linked(first.port) as proxy:

            def act(index, answering):
                if index == 4:
                    proxy._target = ("127.0.0.1", second.port)
                    first.drain(0).result(10)

            found = ask(server_at(proxy.port), CHAIN, PROMPT, NEW, act=act)
        assert found.tokens == plain(PROMPT, NEW) and found.counts.drops >= 1
        assert second.named("open") and found.counts.prompts == 2


def test_disconnect_token_that_is_refused_later_is_said_once():
    """Denied while dialling: what is left is written alone, with one notice of why."""
    with (
        running(limits=ConnectionLimits(token="a")) as first,
        running(limits=ConnectionLimits(token="b")) as other,
    ):
        with linked(first.port) as proxy:

            def act(index, answering):
                if index == 4:
                    proxy._target = ("127.0.0.1", other.port)
                    proxy.refuse()
                    proxy.heal()

            with nothing_left():
                found = ask(server_at(proxy.port, token="a"), CHAIN, PROMPT, NEW, act=act)
        found.check("keep")
        assert found.kept[-1] and found.done == "length"
        notices = [event.notice for event in found.events if "token" in event.notice]
        assert notices == ["the server does not know this token: see --token-file"]


def test_disconnect_clients_do_not_touch_each_other(server):
    """Clients whose links fail all the time beside others whose links do not."""
    with linked(server.port) as proxy:
        chance, all_begun = random.Random(5), threading.Barrier(3)

        def act(index, answering):
            if index == 1:  # without a server at its start, an answer is an error
                all_begun.wait(PATIENCE)
            if chance.random() < 0.1:
                fault(proxy, chance)

        def one(index: int):
            prompt = [index, *PROMPT]
            if index % 2:  # steady
                found = ask(server_at(server.port, timeout=PATIENCE), CHAIN, prompt, NEW)
            else:
                found = ask_in_haste(server_at(proxy.port), CHAIN, prompt, NEW, act=act)
            return found, plain(prompt, NEW)

        with ThreadPoolExecutor(6) as clients:
            found = list(clients.map(one, range(6)))
        proxy.heal()
        for index, (answer, wanted) in enumerate(found):
            answer.check()
            assert answer.tokens == wanted
            assert not (index % 2 and answer.counts.drops)


def test_disconnect_client_that_is_stopped_leaves_nothing(server):
    """The reader of an answer goes away at any event, with a link and without."""
    for last in (1, 3, 6, 8):
        with nothing_left(), linked(server.port) as proxy:
            client, options = server_at(proxy.port), dataclasses.replace(CHAIN)

            async def work(answering, last=last, proxy=proxy, client=client, options=options):
                events = answering.answer(PROMPT, 20 + NEW, [], Sampling())
                async with contextlib.aclosing(events):
                    count = 0
                    async for _ in events:
                        hurry(client, options, 0.3)
                        count += 1
                        if count == 4:
                            await asyncio.to_thread(proxy.cut if last == 6 else proxy.refuse)
                        if count == last:
                            await answering.stop(2)
                            break
                return answering.text.answer

            found = run_client(client, options, work)
            assert found == plain(PROMPT, NEW)[:2][: len(found)]


# A server that says what it should not


def relays(server, spoil, options: ClientOptions = CHAIN, **given):
    """An answer of a client that hurries once the server has opened a session."""
    options = dataclasses.replace(options)

    def spoil_in_haste(message, seen):
        if len(seen) > 1:
            hurry(client, options)
        return spoil(message, seen)

    with relayed(server.port, spoil_in_haste) as port, nothing_left():
        client = server_at(port)
        return ask(client, options, PROMPT, NEW, **given)


SEEDS = [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 80))]


@pytest.mark.parametrize("seed", SEEDS)
def test_disconnect_messages_twice_late_never_and_broken(server, seed):
    name = list(OPTIONS)[seed % len(OPTIONS)]
    found = relays(server, spoiler(seed, 8), OPTIONS[name])
    found.check()
    assert found.tokens == plain(PROMPT, NEW) and found.done == "length"


@pytest.mark.parametrize("seed", SEEDS)
def test_disconnect_bits_that_flip_end_no_client(server, seed):
    """What is forged and fits is believed; nothing else happens."""
    chance = random.Random(seed)

    def spoil(message, seen):
        if len(seen) < 4 or chance.random() < 0.7:
            return [message]
        changed = bytearray(message)
        for _ in range(chance.choice([1, 1, 3])):
            changed[chance.randrange(min(len(changed), 120))] ^= 1 << chance.randrange(8)
        return [bytes(changed)]

    half = ToyHalf()
    half.absorb = lambda start, tokens, rows: half._put(start, "target", tokens)
    options = dataclasses.replace(CHAIN, reconnect_seconds=1.0)
    found = relays(server, spoil, options, half=half)
    assert found.done and len(found.tokens) <= NEW


@pytest.mark.parametrize("kind", ["Welcome", "Committed", "Resumed"])
def test_disconnect_damaged_version_is_a_lost_link(server, kind):
    """Who has welcomed a client before does not speak another version now."""
    to_do = ["close", "damage"]

    def spoil(message, seen):
        if len(seen) > 4 and "close" in to_do:
            to_do.remove("close")
            return [CLOSE]  # so that Welcome and Resumed come once more
        if "close" not in to_do and to_do and wire.DOWN[message[1]].__name__ == kind:
            to_do.remove("damage")
            return [b"!" + message[1:]]
        return [message]

    found = relays(server, spoil)
    found.check()
    assert found.tokens == plain(PROMPT, NEW) and found.done == "length" and not to_do
    assert found.counts.drops >= 1 and not sum(found.kept)


def test_disconnect_session_that_never_began_is_opened_anew(server):
    """The link dies before the first token, and the server knows of no request."""
    to_do = ["close", "forge"]

    def spoil(message, seen):
        if "close" in to_do and message[1] == 67:
            to_do.remove("close")
            return [CLOSE]
        if "forge" in to_do and message[1] == 68:
            to_do.remove("forge")
            return [wire.encode(wire.Resumed(-1))]
        return [message]

    found = relays(server, spoil)
    found.check()
    assert found.tokens == plain(PROMPT, NEW) and found.done == "length" and not to_do


FORGED = {
    "nothing": {"tokens": []},
    "too much": {"tokens": list(range(30))},
    "more for ever": {"more": True, "tokens": [], "done": ""},
    "another end": {"done": "stop"},
    "other rows": {"rows": b"123"},
    "no rows": {"count": 0, "rows": b""},
    "rows before": {"start": 0},
    "rows behind": {"start": 70},
    "the future": {"seq": 1000},
    "the past": {"seq": 0},
}


@pytest.mark.parametrize("policy", ["verify", "keep"])
@pytest.mark.parametrize("name", FORGED)
def test_disconnect_replies_that_do_not_fit_are_lost_links(server, name, policy):
    """Always the same wrong reply: the answer ends alone, soon after it is written."""

    def spoil(message, seen):
        if message[1] == 67 and len(seen) > 8:
            verdict = wire.decode_down(message, LIMITS)
            return [wire.encode(dataclasses.replace(verdict, **FORGED[name]))] * 3
        return [message]

    options = dataclasses.replace(CHAIN, policy=policy, reconnect_seconds=0.3)
    found = relays(server, spoil, options)
    found.check("keep")
    assert found.done == "length" and found.counts.drops


@pytest.mark.parametrize("kind", ["Welcome", "Opened", "Committed", "Resumed"])
@pytest.mark.parametrize("then", [CLOSE, HANG, "flood", "denied"])
def test_disconnect_servers_that_fail_at_one_message_always(server, kind, then):
    """Once the answer has begun, every message of a kind is replaced."""
    number = {"Welcome": 65, "Opened": 66, "Committed": 67, "Resumed": 68}[kind]
    fault = wire.encode(wire.Fault("pairing", "no", True))

    def spoil(message, seen):
        if len(seen) == 7:
            return [CLOSE]
        if len(seen) < 7 or message[1] != number:
            return [message]
        return {"flood": [seen[0]] * 2000, "denied": [fault]}.get(then, [then])

    options = dataclasses.replace(CHAIN, reconnect_seconds=30 if kind == "Opened" else 0.5)
    with relayed(server.port, spoil) as port:
        found = ask_in_haste(server_at(port), options, PROMPT, NEW, seconds=0.3)
    assert found.done == "length"
    found.check("keep")
    if kind == "Opened":  # it is not needed to resume
        assert found.tokens == plain(PROMPT, NEW)


def test_disconnect_kept_tail_is_read_by_the_session_that_waited(server):
    """Nothing was missed: the server reads the tail, which stays unverified, and goes on."""
    options = dataclasses.replace(CHAIN, policy="keep", lengths=(1,), draft_ahead=False)
    half = ToyHalf()
    with linked(server.port) as proxy:

        def act(index, answering):
            rest_until_linked(half, answering)
            if index == 4:
                proxy.refuse()
            if len(answering.text.tail) > 20:
                proxy.heal()

        found = ask(server_at(proxy.port), options, PROMPT, 200, half, act=act)
    assert found.counts.prompts == 2
    found.check("keep")
    assert 20 < sum(found.kept) < 190 and not found.kept[-1]


def refuses_until(proxy, tokens: int):
    """For `answered`: no link from the fourth event on, until so many tokens are written alone."""

    def act(index, answering) -> None:
        if index == 4:
            proxy.refuse()
        if len(answering.text.tail) > tokens:
            proxy.heal()

    return act


def test_disconnect_again_in_the_middle_of_a_long_tail(server, monkeypatch):
    """A padded reply hides the drafter's rows behind it: they are written again."""
    half = ToyHalf()
    monkeypatch.setattr("tests.split.split_client.guess", lambda text: next_token(list(text)))
    verify, calls = SplitClient._verify_tail, []

    async def failing(self):
        calls.append(len(self.text.tail))
        if len(calls) == 2:
            raise Lost("again")
        await verify(self)

    monkeypatch.setattr(SplitClient, "_verify_tail", failing)
    with linked(server.port) as proxy:
        act = refuses_until(proxy, 100)
        found = ask(server_at(proxy.port), CHAIN, PROMPT, 300, half, act=act)
    assert found.tokens == plain(PROMPT, 300) and calls[0] > 100 and len(calls) > 2


# What a link costs while it is there, and what is kept of it when it is not


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_split_client_drafting_ahead_delays_no_reply(server, name):
    """A token takes far longer than a reply: nothing of use can be drafted meanwhile."""
    half, steps = ToyHalf(), []
    chain, tree = half.chain, half.tree

    def slow(text, known, count):
        steps.append(count)
        time.sleep(1.0 if len(steps) <= 2 else 0.15)
        return chain(text, known, count)

    def slow_tree(text, shape):
        time.sleep(0.15 * (shape.depth - 1))
        return tree(text, shape)

    half.chain, half.tree = slow, slow_tree
    options = dataclasses.replace(OPTIONS[name], lengths=(3,))
    found = ask(server_at(server.port), options, PROMPT, 8, half)
    assert found.tokens == plain(PROMPT, 8)
    assert found.counts.round_trips_s[0] < 0.9  # a reply's time, not a token's
    drafts = found.counts.rounds if name == "chain" else 0
    assert len(steps) <= drafts + 2 and set(steps) <= {1, 2, 3}
    ahead = steps if name == "tree" else steps[1:2]
    assert set(ahead) <= {1}


def test_split_client_waits_for_a_server_that_lives(server):
    """It compiles, say: no reply comes for long, but pongs do."""
    with running(ToySlots(2)) as slow, nothing_left():
        slow.slots.seconds = 1.2
        found = ask(server_at(slow.port, timeout=0.5), CHAIN, PROMPT[:3], 2)
    assert found.tokens == plain(PROMPT[:3], 2) and found.counts.drops == 0


def test_split_client_does_not_wait_for_a_link_that_is_dead(server):
    with linked(server.port) as proxy:
        times = []

        def act(index, answering):
            times.append(time.monotonic())
            if index == 3:
                proxy.cut()
            if answering.text.is_written:
                proxy.heal()

        found = ask(server_at(proxy.port, timeout=0.4), CHAIN, PROMPT, NEW, act=act)
    assert found.tokens == plain(PROMPT, NEW) and found.counts.drops >= 1
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
    assert found.tokens == plain(prompt, NEW) and found.counts.prompts == 1
    assert sum(verdicts) < 25 + 2 * NEW  # 194 tokens in parts of 8


def test_disconnect_again_and_again_feeds_no_token_twice(server, monkeypatch):
    """The drafter's own rows of the tail stand until a reply comes."""
    half, verify, calls, fed, between = ToyHalf(), SplitClient._verify_tail, [], [], []
    chain = half.chain

    def counting(text, known, steps):
        fed.append((len(text), steps))
        return chain(text, known, steps)

    async def failing(self):
        calls.append(len(self.text.tail))
        if len(calls) == 1:
            fed.clear()
        if len(calls) < 6:
            raise Lost("again")
        if len(calls) == 6:
            between.extend(fed)
        await verify(self)

    half.chain = counting
    monkeypatch.setattr(SplitClient, "_verify_tail", failing)
    with linked(server.port) as proxy:
        act = refuses_until(proxy, 60)
        found = ask(server_at(proxy.port), CHAIN, PROMPT, 300, half, act=act)
    assert found.tokens == plain(PROMPT, 300) and calls[0] > 60 and len(calls) > 5
    assert all(steps > 1 for _, steps in between)  # none of the tail is fed once more


def test_split_rows_come_in_parts_of_few_bytes():
    with running(ToySlots(1, width=700)) as server, Client(server) as client:
        parts = client.open(PROMPT)
        assert len(parts) > 10 and max(len(part.rows) for part in parts) <= 32 << 10
        starts = [part.start for part in parts]
        assert starts == [0, *(part.start + part.count for part in parts[:-1])]
        assert parts[-1].start + parts[-1].count == len(PROMPT) and parts[-1].tokens
        assert not any(part.tokens or not part.more for part in parts[:-1])


def test_split_parts_that_follow_each_other_are_taken_in_at_once():
    text = list(range(40))
    rows = lambda a, b: [np.arange(a, b), np.arange(a, b)[:, None]]  # noqa: E731
    parts = [TokenRows(a, text[a:b], rows(a, b)) for a, b in [(0, 3), (3, 8), (8, 9), (20, 22)]]
    found = joined(parts, 8)
    assert [(part.start, part.tokens) for part in found] == [
        (0, text[:8]),
        (8, [8]),
        (20, [20, 21]),
    ]
    for part in found:
        for ours, theirs in zip(part.rows, rows(part.start, part.tokens[-1] + 1), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_split_replies_in_small_parts_are_taken_in_whole(monkeypatch):
    monkeypatch.setattr("infer.split.server.sessions.PART_BYTES", 100)  # of two tokens
    half, sizes = ToyHalf(), []
    absorb = half.absorb
    half.absorb = lambda start, tokens, rows: (
        sizes.append(len(tokens)),
        absorb(start, tokens, rows),
    )
    with running(ToySlots()) as server:
        found = ask(server_at(server.port), CHAIN, PROMPT, NEW, half)
    found.check()
    assert found.tokens == plain(PROMPT, NEW) and sizes[0] == len(PROMPT)
    assert sizes[1:] == found.counts.accept_lengths and max(sizes[1:]) > 2
