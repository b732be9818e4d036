"""Networks for tests: the delays of a link, and the proxy with its faults."""

from __future__ import annotations

import io
import socket
import sys
from collections.abc import Iterator

import pytest

from infer.bench.network import Lane, Profile
from infer.split.network import main
from tests.split.split_client import nothing_left


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with nothing_left():
        yield


# One direction of a link.


def test_a_lane_delays_and_paces():
    lane = Lane(Profile("", delay_ms=10.0, rate_mbit=8.0), 0, "up")  # a byte takes a microsecond
    assert lane.due(1.0, 1000) == pytest.approx(1.011)
    assert lane.due(1.0, 1000) == pytest.approx(1.012)  # it waits for the first one
    assert lane.due(5.0, 500) == pytest.approx(5.0105)


def test_a_lane_holds_what_is_lost_for_two_round_trips():
    lane = Lane(Profile("", delay_ms=10.0, loss=0.25), 0, "down")
    delays = [lane.due(float(number), 0) - number for number in range(4000)]
    assert {round(delay, 6) for delay in delays} == {0.01, 0.05}
    assert sum(delay > 0.02 for delay in delays) == pytest.approx(1000, abs=100)


# The proxy.


def test_proxy_by_hand(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        monkeypatch.setattr(sys, "stdin", io.StringIO("cut\nstats\nhum\n"))
        main(["--profile", "wired", "--proxy", f"{host}:{port}"])
    said = capsys.readouterr()
    assert said.out.splitlines()[2:] == ['"cut"', '{"up": 0, "down": 0}']
    assert said.err == "hum: commands are cut, heal, refuse, stats\n"
