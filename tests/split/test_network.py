"""Networks for tests: what a link does to a segment, and the proxy with its faults."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.bench.network import PROFILES, SEGMENT, Lane, Profile, Proxy, in_thread
from infer.split.network import main
from tests.split.resets import ResettingProxy

PATIENCE_S = 20.0  # nothing here takes as long, unless it hangs
SLOW_LINK = Profile("slow", delay_ms=30.0)


def open_files() -> set[tuple[str, str]]:
    """Descriptors of this process and what they are, as far as they are still there."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((path.name, os.readlink(path)))
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread, socket or pipe is left by a test."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    assert set(threading.enumerate()) <= threads  # another test's may have ended meanwhile
    assert open_files() <= files


@contextlib.contextmanager
def linked(profile: Profile = PROFILES["loopback"]) -> Iterator[tuple]:
    """A proxy, and the two ends of one connection through it."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(PATIENCE_S)
        proxy = stack.enter_context(in_thread(ResettingProxy(*listener.getsockname(), profile)))
        client = stack.enter_context(dial(proxy))
        server = stack.enter_context(listener.accept()[0])
        server.settimeout(PATIENCE_S)
        yield proxy, client, server, listener


def dial(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout=PATIENCE_S)


def receive(end: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the stream ends or is reset."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < size and (more := end.recv(size - len(data))):
            data += more
    return data


def carried(proxy: Proxy, **wanted: int) -> None:
    """The proxy counts these bytes, which it does just after they have gone on."""
    until = time.monotonic() + PATIENCE_S
    while any(proxy.carried[way] != count for way, count in wanted.items()):
        assert time.monotonic() < until, proxy.carried
        time.sleep(0.001)


def is_silent(end: socket.socket) -> bool:
    """Whether nothing comes for a tenth of a second, not even an end."""
    end.settimeout(0.1)
    try:
        end.recv(1)
        return False
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE_S)


def is_reset(end: socket.socket) -> bool:
    try:
        end.recv(1)
        return False
    except ConnectionResetError:
        return True


# What one direction of a link does.


def test_a_lane_delays_and_paces():
    lane = Lane(Profile("", delay_ms=10.0, rate_mbit=8.0), 0, "up")  # a byte in a microsecond
    assert lane.due(1.0, 1000) == pytest.approx(1.011)
    assert lane.due(1.0, 1000) == pytest.approx(1.012)  # it waits for the first one
    assert lane.due(5.0, 500) == pytest.approx(5.0105)


def test_a_lane_keeps_the_order_under_jitter():
    lane = Lane(PROFILES["4g"], 0, "up")
    dues = [lane.due(number * 1e-3, 100) for number in range(500)]
    assert dues == sorted(dues)
    alone = Lane(PROFILES["4g"], 0, "up")
    delays = [alone.due(float(number), 0) - number for number in range(4000)]
    assert min(delays) == 0.0  # a normal law that is cut at 0
    assert 0.021 < sum(delays) / len(delays) < 0.025


def test_a_lane_holds_what_is_lost_for_two_round_trips():
    lane = Lane(Profile("", delay_ms=10.0, loss=0.25), 0, "down")
    delays = [lane.due(float(number), 0) - number for number in range(4000)]
    assert {round(delay, 6) for delay in delays} == {0.01, 0.05}
    assert sum(delay > 0.02 for delay in delays) == pytest.approx(1000, abs=100)


def test_lanes_repeat_with_their_seed():
    def draws(seed, way):
        lane = Lane(PROFILES["4g"], seed, way)
        return [lane.due(float(number), 0) for number in range(9)]

    assert draws(1, "up") == draws(1, "up")
    assert draws(1, "up") != draws(1, "down")
    assert draws(1, "up") != draws(2, "up")


def test_profiles_are_named():
    assert all(name == profile.name for name, profile in PROFILES.items())


# The proxy.


def test_proxy_carries_and_counts():
    with linked() as (proxy, client, server, _):
        sent = os.urandom(5 * SEGMENT + 7)
        client.sendall(sent)
        assert receive(server, len(sent)) == sent
        server.sendall(sent[:99])
        assert receive(client, 99) == sent[:99]
        client.shutdown(socket.SHUT_WR)
        assert server.recv(1) == b""  # one way has ended, the other has not
        server.sendall(b"still here")
        assert receive(client, 10) == b"still here"
        server.close()
        assert client.recv(1) == b""
        carried(proxy, up=len(sent), down=109)


def test_proxy_delays_each_way():
    with linked(SLOW_LINK) as (_, client, server, _):
        begun = time.monotonic()
        client.sendall(b"ping")
        server.sendall(receive(server, 4))
        assert receive(client, 4) == b"ping"
        assert time.monotonic() - begun >= 0.06


def test_proxy_paces():
    with linked(Profile("narrow", rate_mbit=8.0)) as (_, client, server, _):
        begun = time.monotonic()
        client.sendall(bytes(200_000))
        assert len(receive(server, 200_000)) == 200_000
        assert time.monotonic() - begun >= 0.2


def test_proxy_holds_what_tcp_would_send_again():
    with linked(Profile("bad", delay_ms=10.0, loss=1.0)) as (_, client, server, _):
        begun = time.monotonic()
        client.sendall(b"ping")
        assert receive(server, 4) == b"ping"
        assert time.monotonic() - begun >= 0.05  # one way, and two round trips before


def test_a_sender_waits_for_a_receiver_that_does_not_read():
    with linked() as (proxy, client, server, _):
        client.settimeout(1.0)
        sent = 0
        with pytest.raises(TimeoutError):
            while True:
                sent += client.send(bytes(1 << 16))
                assert sent < 1 << 26, "64 MiB wait somewhere"
        assert len(receive(server, sent)) == sent
        carried(proxy, up=sent)


@pytest.mark.parametrize("position", [0, 1, SEGMENT, 3 * SEGMENT + 5])
@pytest.mark.parametrize("way", ["up", "down"])
def test_reset_at_a_byte(way, position):
    with linked() as (proxy, client, server, listener):
        proxy.reset_after(position, way)
        source, sink = (client, server) if way == "up" else (server, client)
        source.sendall(bytes(4 * SEGMENT))
        assert len(receive(sink, 4 * SEGMENT)) == position
        assert is_reset(source)
        carried(proxy, **{way: position})
        check_echo(proxy, listener)  # it happens once


def test_reset_waits_for_a_slow_reader():
    with linked() as (proxy, client, server, _):
        proxy.reset_after(1 << 20, "up")
        client.sendall(bytes((1 << 20) + 99))
        time.sleep(0.2)  # for a reset that does not wait
        assert len(receive(server, 2 << 20)) == 1 << 20
        assert is_reset(client)


def check_echo(proxy: Proxy, listener: socket.socket) -> None:
    """A new connection works."""
    with dial(proxy) as client, listener.accept()[0] as server:
        client.sendall(b"again")
        server.sendall(receive(server, 5))
        assert receive(client, 5) == b"again"


def test_cut_is_silent_and_heal_delivers_the_rest():
    with linked() as (proxy, client, server, listener):
        client.sendall(b"before")
        assert receive(server, 6) == b"before"
        proxy.cut()
        client.sendall(b"while cut")
        client.shutdown(socket.SHUT_WR)
        server.sendall(b"unheard")
        assert is_silent(server) and is_silent(client)
        carried(proxy, up=6, down=0)
        with dial(proxy) as late:  # taken, and then nothing
            assert is_silent(late)
            assert not select.select([listener], [], [], 0)[0]  # the target knows nothing of it
            proxy.heal()
            assert receive(server, 99) == b"while cut"
            assert receive(client, 7) == b"unheard"
            listener.accept()[0].close()
            assert late.recv(1) == b""


def test_a_peer_that_resets_while_cut_is_half_open():
    with linked() as (proxy, client, server, _):
        proxy.cut()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        assert is_silent(server)
        proxy.heal()
        assert is_reset(server)


def test_refuse_closes_and_heal_listens_at_the_same_port():
    with linked() as (proxy, client, server, listener):
        proxy.refuse()
        assert client.recv(1) == b""
        assert server.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            dial(proxy)
        proxy.refuse()  # twice is as good
        proxy.heal()
        check_echo(proxy, listener)


def test_a_target_that_is_not_there_resets():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with in_thread(Proxy(*address)) as proxy, pytest.raises(ConnectionResetError):
        with dial(proxy) as client:  # the reset may come before it returns
            client.recv(1)


def test_many_connections_at_once():
    with linked() as (proxy, _, _, listener), contextlib.ExitStack() as stack:
        ends = []
        for _ in range(32):
            client = stack.enter_context(dial(proxy))
            ends.append((client, stack.enter_context(listener.accept()[0])))
        for number, (client, _) in enumerate(ends):
            client.sendall(b"%4d" % number)
        assert [int(receive(server, 4)) for _, server in ends] == list(range(32))


def test_proxy_in_a_loop_leaves_no_task():
    async def scenario() -> bytes:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(9))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        async with server, Proxy(*server.sockets[0].getsockname(), SLOW_LINK) as proxy:
            reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
            writer.write(b"ping")
            heard = await reader.read()
            proxy.cut()  # from the loop's own thread
            writer.write(b"never heard")
            writer.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return heard

    assert asyncio.run(scenario()) == b"ping"


def test_proxy_by_hand(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        monkeypatch.setattr(sys, "stdin", io.StringIO("cut\nstats\nhum\n"))
        main(["--profile", "wired", "--proxy", f"{host}:{port}"])
    said = capsys.readouterr()
    assert said.out.splitlines()[2:] == ['"cut"', '{"up": 0, "down": 0}']
    assert said.err == "hum: commands are cut, heal, refuse, stats\n"


def test_a_link_without_a_server_is_refused_with_one_line(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--profile", "4g"])
    assert exit.value.code == 2 and "required: --proxy" in capsys.readouterr().err
