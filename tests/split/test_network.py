"""Networks for tests: the delays of a link, and the proxy with its faults."""

from __future__ import annotations

import io
import select
import socket
import sys
from collections.abc import Iterator

import pytest

from infer.bench.network import PROFILES, Lane, Profile, Proxy, in_thread
from infer.split.network import main
from tests.meeting import PATIENCE, wait_for
from tests.split.split_client import nothing_left


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


def dial(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout=PATIENCE)


def receive(end: socket.socket, size: int) -> bytes:
    """Returns `size` bytes, or fewer at the end of the stream."""
    data = b""
    while len(data) < size and (more := end.recv(size - len(data))):
        data += more
    return data


def is_silent(*ends: socket.socket) -> bool:
    """Returns whether no end receives data or an end of stream for a tenth of a second."""
    return not select.select(ends, [], [], 0.1)[0]


# One direction of a link.


def test_a_lane_delays_and_paces():
    lane = Lane(Profile("", delay_ms=10.0, rate_mbit=8.0), 0, "up")  # a byte takes a microsecond
    assert lane.due(1.0, 1000) == pytest.approx(1.011)
    assert lane.due(1.0, 1000) == pytest.approx(1.012)  # it waits for the first one
    assert lane.due(5.0, 500) == pytest.approx(5.0105)


def test_a_lane_keeps_the_order_under_jitter():
    lane = Lane(PROFILES["4g"], 0, "up")
    dues = [lane.due(number * 1e-3, 100) for number in range(500)]
    assert dues == sorted(dues)


def test_a_lane_holds_what_is_lost_for_two_round_trips():
    lane = Lane(Profile("", delay_ms=10.0, loss=0.25), 0, "down")
    delays = [lane.due(float(number), 0) - number for number in range(4000)]
    assert {round(delay, 6) for delay in delays} == {0.01, 0.05}
    assert sum(delay > 0.02 for delay in delays) == pytest.approx(1000, abs=100)


# The proxy.


def test_cut_is_silent_and_heal_delivers_the_rest():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE)
        link = Proxy(*listener.getsockname(), PROFILES["loopback"])
        with in_thread(link) as proxy, dial(proxy) as client, listener.accept()[0] as server:
            server.settimeout(PATIENCE)
            client.sendall(b"before")
            assert receive(server, 6) == b"before"
            proxy.cut()
            client.sendall(b"while cut")
            client.shutdown(socket.SHUT_WR)
            server.sendall(b"unheard")
            assert is_silent(server, client)
            wait_for(lambda: proxy.carried == {"up": 6, "down": 0})
            with dial(proxy) as late:  # accepted, then silent
                assert is_silent(late)
                assert is_silent(listener)  # the target has no such connection
                proxy.heal()
                assert receive(server, 99) == b"while cut"
                assert receive(client, 7) == b"unheard"
                listener.accept()[0].close()
                assert late.recv(1) == b""


def test_proxy_by_hand(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        monkeypatch.setattr(sys, "stdin", io.StringIO("cut\nstats\nhum\n"))
        main(["--profile", "wired", "--proxy", f"{host}:{port}"])
    said = capsys.readouterr()
    assert said.out.splitlines()[2:] == ['"cut"', '{"up": 0, "down": 0}']
    assert said.err == "hum: commands are cut, heal, refuse, stats\n"
