"""The server of split decoding over real sockets: its replies, refusals and failures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from infer.split_server.app import ConnectionLimits
from moa_jax.split import protocol
from tests.split.split_server import PAIRING, PATIENCE, Client, ToySlots, opening, plain, running

PROMPT = list(range(1, 21))
PAGE = os.sysconf("SC_PAGE_SIZE")


def ended(client: Client) -> protocol.Fault | None:
    """Returns the last Fault of a connection that the server closed, or None without a Fault."""
    fault = None
    with contextlib.suppress(ConnectionClosed):
        while True:
            message = client.receive()
            fault = message if isinstance(message, protocol.Fault) else fault
    return fault


def change_limits(server, **changes) -> None:
    """Sets the limits of the only connection, from its next message on."""
    (connection,) = server.server.connections
    connection._limits = dataclasses.replace(connection._limits, **changes)


def test_split_resume_takes_a_session_from_a_half_open_connection(server):
    with Client(server) as old, Client(server) as new:
        old.open(PROMPT)
        assert new.resume(old.session, 0) == protocol.Resumed(0)
        assert ended(old).code == "state"
        assert new.draft(1).seq == 1


def test_split_resume_in_another_codec_or_of_a_stranger_is_gone(server):
    with Client(server) as client:
        client.open(PROMPT)
    with Client(server, codec="int8") as other:
        for name in (client.session, "0" * 32):
            fault = other.resume(name, 0)
            assert (fault.code, fault.fatal) == ("gone", False)
        assert other.open(PROMPT)[-1].tokens == plain(PROMPT, 1)  # the connection continues


def status(server, **headers) -> int:
    with pytest.raises(InvalidStatus) as error:
        Client(server, additional_headers=headers)
    return error.value.response.status_code


def test_split_wrong_token_is_401_before_the_upgrade():
    with running(limits=ConnectionLimits(token="right")) as server:
        for shown in ("wrong", "Bearer wrong", "Basic right"):
            assert status(server, Authorization=shown) == 401
        assert status(server) == status(server, Origin="http://example.org") == 401
        assert server.get("/metrics").status_code == 401
        assert server.get("/health").json() == {"status": "ok"}
        assert server.get("/metrics", authorization="Bearer right").status_code == 200
        shown = {"Authorization": "Bearer right", "Origin": "http://example.org"}
        with Client(server, additional_headers=shown) as client:
            assert client.open(PROMPT)[-1].tokens == plain(PROMPT, 1)
        assert "right" not in repr(server.events) and "wrong" not in repr(server.events)


def hello(**changes) -> bytes:
    return protocol.encode(protocol.Hello("x", PAIRING | changes, "float32", False))


HELLO = hello()
REFUSED = {  # a message, whether a session is open, the code and a part of the text
    "version": (b"\x07" + HELLO[1:], False, "version", "version 7"),
    "vocabulary": (hello(vocab_size=96), False, "pairing", "97 on the server, 96 on the client"),
    "before_hello": (opening([1]), False, "state", "Open came before Hello"),
    "malformed": (bytes((protocol.VERSION, 2)) + b"nonsense", False, "message", "Open"),
    "text": ("hello", False, "message", "text"),
    "hello_again": (HELLO, True, "state", "twice"),
    "open_again": (opening([1, 2], seq=5), True, "state", "close that first"),
    "read_too_much": (protocol.Read(2, [1] * 400), True, "state", "400 at most"),
    "twins": (protocol.Verify(2, [5, 5], [0, 0]), True, "message", "the same token"),
    "too_many": (protocol.Verify(2, [1] * 64, list(range(64))), True, "message", "tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_split_protocol_refusals_end_the_connection_and_keep_the_session(server, name):
    message, is_open, code, text = REFUSED[name]
    with Client(server, hello=is_open) as client:
        if is_open:
            client.open(PROMPT)
            client.draft(1)
        client.send(message)
        fault = ended(client)
        assert (fault.code, fault.fatal) == (code, True) and text in fault.text
    if is_open:
        with Client(server) as back:
            assert back.resume(client.session, 1) == protocol.Resumed(1)
            assert back.draft(2).seq == 2
            back.send(protocol.Close())


def test_split_requests_that_do_not_fit_leave_the_connection():
    too_long = [opening([1] * 600, 600), opening([1], 600), opening([1] * 21)]
    with running(max_prompt=20) as server, Client(server) as client:
        for message in [*too_long, opening([1] * 30, prompt_length=21, root_given=True)]:
            client.send(message)
            fault = client.receive()
            assert (fault.code, fault.fatal) == ("too_long", False), message
        assert client.open(PROMPT + [5] * 9, prompt_length=20, root_given=True)[-1].count


def test_split_oversized_messages_and_too_many_clients_are_refused():
    limits = ConnectionLimits(max_message_bytes=2000, max_clients=1)
    with running(limits=limits) as server, Client(server) as client:
        assert status(server) == 503
        client.send(bytes((protocol.VERSION, 2)) + bytes(5000))
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd.code == 1009
        server.wait(lambda: not server.server.connections)
        with Client(server) as another:
            assert another.open(PROMPT)


def test_split_silence_ends_connections_and_frees_their_slots():
    with running(limits=ConnectionLimits(hello_seconds=0.2)) as server:
        with Client(server, hello=False) as client:
            assert "no Hello" in ended(client).text
    with running() as server:
        with Client(server) as client:
            client.open(PROMPT)
            change_limits(server, idle_seconds=0.2)
            client.draft(1)  # the idle time starts after this call
            assert ended(client).code == "gone"
        server.wait(lambda: server.slots.slots == [None] * 4)
        assert server.named("close")[-1]["reason"] == "idle"


def test_split_slow_reader_loses_its_connection_and_delays_no_other():
    slots = ToySlots(chunk=64, width=2000)  # one reply is some 20 MB
    with running(slots, ConnectionLimits(send_seconds=10 * PATIENCE), max_prompt=512) as server:
        with Client(server, max_queue=1, max_size=None) as slow:
            change_limits(server, send_seconds=0.3)
            with Client(server, max_queue=1, max_size=None) as stuck, Client(server) as other:
                stuck.send(opening([1] * 300, 500))  # the time limit is still long
                other.open([5])
                assert other.draft(1, plain([5], 5)[1:]).tokens == plain([5], 6)[1:]
                slow.send(opening([1] * 300, 500))
                server.wait(lambda: server.named("slow"))
                server.wait(lambda: len(server.server.connections) == 2)
                assert sum(slot is not None for slot in slots.slots) == 3  # kept for its return
                slow.drop()
                stuck.drop()


def test_split_drain_lets_running_sessions_end_for_a_while():
    with running() as server, Client(server) as client, Client(server) as late:
        client.open(PROMPT)
        done = server.drain(10)
        server.wait(lambda: server.service.draining)
        assert late.open(PROMPT)[0].code == "draining"
        assert server.get("/health").status_code == 503
        assert client.draft(1).seq == 1 and not done.done()
        client.send(protocol.Close())
        done.result(PATIENCE)
        assert ended(client).code == "draining"


def hostile_message(random: np.random.Generator) -> bytes | str:
    """Returns noise, or a valid message with a piece removed or changed."""
    messages = [opening([1, 2, 3]), protocol.Verify(1, [1, 2], [0, 1]), protocol.Read(1, [5])]
    good = [HELLO, *map(protocol.encode, messages)][random.integers(4)]
    place = int(random.integers(len(good)))
    changed = good[:place] + random.bytes(1) + good[place + 1 :]
    noise = random.bytes(random.integers(0, 400))
    return [noise, good[:place], changed, good, "text", bytes(70_000)][random.integers(6)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_split_fuzz_of_a_thousand_messages_leaves_server_memory_and_others_alone():
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    limits = ConnectionLimits(max_message_bytes=60_000, max_clients=8)
    with running(limits=limits, resume_seconds=0.2) as server, Client(server) as other:
        random, text = np.random.default_rng(7), list(other.open(PROMPT)[-1].tokens)
        seqs = itertools.count(1)

        def attack(count: int) -> None:
            sent = 0
            while sent < count:
                with Client(server, hello=bool(random.integers(4))) as client:
                    with contextlib.suppress(ConnectionClosed, TimeoutError):
                        for _ in range(random.integers(1, 6)):
                            sent += 1
                            client.send(hostile_message(random))
                    client.drop()
                if sent % 7 == 0:
                    text.extend(other.draft(next(seqs)).tokens)

        attack(200)
        before, threads = resident(), threading.active_count()
        attack(1000)
        assert text == plain(PROMPT, len(text)) and len(text) > 30
        assert resident() - before < 20e6 and threading.active_count() <= threads + 2
        server.wait(lambda: len(server.server.connections) == 1)
        server.wait(lambda: len(server.service._sessions) == 1)
        assert server.metric("split_failures_total") == 0
        assert server.get("/health").status_code == 200
        # The server keeps only the events of a connection.
        assert len(asyncio.all_tasks(server.loop)) < 16


def test_split_metrics_count_as_vllm_does():
    with running() as server, Client(server) as client:
        root = client.open(PROMPT)[-1].tokens
        right = plain(PROMPT + root, 3)
        client.draft(1, [right[0], right[1], (right[2] + 1) % 97])
        client.draft(2)  # a plain step
        client.send(protocol.Close())
        client.open(PROMPT + [5], prompt_length=20, root_given=True)  # root picked before
        text = server.get("/metrics").text
        for line in (
            "generated_tokens_total 5.0",
            "spec_decode_num_draft_tokens_total 3.0",
            "spec_decode_num_accepted_tokens_total 2.0",
            "split_slots_in_use 1.0",
            "split_batch_size_count 2.0",
        ):
            assert line in text, line
        assert server.metric("split_bytes_down_total") > server.metric("split_bytes_up_total") > 0


def test_split_events_hold_counts_and_never_tokens(server):
    with Client(server) as client:
        client.open([11, 12, 13])
        client.draft(1, [5, 6])
        client.send(protocol.Close())
        server.wait(lambda: server.named("close"))
    facts = server.named("close")[-1]
    assert facts["reason"] == "done" and facts["accepted"] <= facts["drafted"]
    plain_kinds = (str, int, float, bool, type(None))
    assert all(type(v) in plain_kinds for _, facts in server.events for v in facts.values())
    assert client.session not in repr(server.events)  # a client can resume it by its name


def test_no_web_page_is_let_in_without_a_token(server):
    assert status(server, Origin="http://example.org") == 403
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/").status_code == 404
