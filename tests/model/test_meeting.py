"""Processes find each other before jax starts, or each says in one line who is missing."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from moa_jax.errors import InputError
from moa_jax.runtime import rendezvous as meeting
from moa_jax.runtime.rendezvous import Meeting, meet
from tests.meeting import free_port
from tests.train.test_processes import PROGRAM, ROOT


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(meeting, "SECONDS_BETWEEN_CALLS", 0.02)


def lines(*places: Meeting, seconds: float = 20.0, meanwhile: Callable = lambda: None) -> list[str]:
    """What becomes of processes that meet at the same time: "met", or their refusal."""

    def line(place: Meeting) -> str:
        try:
            meet(place, seconds).close()
        except InputError as error:
            return str(error)
        return "met"

    with ThreadPoolExecutor(len(places)) as pool:
        found = [pool.submit(line, place) for place in places]
        meanwhile()
        return [each.result(30) for each in found]


def places(count: int) -> list[Meeting]:
    address = f"127.0.0.1:{free_port()}"
    return [Meeting(address, count, index) for index in range(count)]


def test_all_hear_when_all_have_come():
    assert lines(*places(4)) == ["met"] * 4
    meet(Meeting("nobody.invalid:1", 1, 0), 0.0).watch(print)  # one has nobody to meet


def test_who_does_not_come_is_named_to_all_that_have():
    first, _, third, _ = places(4)
    line, told = lines(first, third, seconds=1.5)
    assert line.startswith(
        f"of 4 processes these did not come to {first.address} within 1.5 s: 1, 3"
    )
    assert told == f"process 0: {line}"


def test_without_process_0_the_others_say_so():
    first, second = places(2)
    (line,) = lines(second, seconds=0.3)
    assert line.startswith(f"process 0 was not found at {first.address} within 0.3 s ([Errno 111]")


@pytest.mark.parametrize(
    "change, line",
    [
        ({"index": 1}, "two processes say that they are process 1: number them from 0"),
        ({"count": 4}, "process 2 says that there are 4 processes, and process 0 that there are 3"),
    ],
)
def test_places_that_contradict_each_other_are_refused(change, line):
    first, second, third = places(3)
    told, found, wrong = lines(first, second, third._replace(**change))
    assert line in told
    for each in (found, wrong):  # process 0 has ended where one comes late
        assert line in each or "was not found" in each


def test_who_ends_without_a_farewell_has_died():
    """Its line ends; others hear it from process 0, which ends then, too."""
    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(lambda place: meet(place, 20.0), places(3))
    heard: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for name, each in (("first", first), ("third", third)):
        each.watch(lambda process, name=name: heard.put((name, process)))
    second.close()
    assert heard.get(timeout=10) == ("first", 1)
    first.part()
    third.part()
    for each in (first, third):
        each.close()
    time.sleep(0.2)
    assert heard.empty()


@pytest.mark.parametrize("slow", [False, True])
def test_who_is_greeted_when_nobody_listens_any_more_is_hung_up_on(slow):
    """Process 0 may have ended what it waits for while it greets: no line may stay open."""
    both, may_end, turns = threading.Barrier(2), threading.Event(), itertools.count()

    def greet(caller: socket.socket) -> socket.socket:
        both.wait(10)
        if next(turns) and slow:
            assert may_end.wait(10)
        return caller

    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as open_:
        address = listener.getsockname()
        lines = [open_.enter_context(socket.create_connection(address, 10)) for _ in range(2)]
        greeted = meeting.greeted(listener, greet, 10.0)
        known = open_.enter_context(next(greeted)).getpeername()
        greeted.close()
        may_end.set()
        (other,) = [line for line in lines if line.getsockname() != known]
        assert other.recv(1) == b""


def test_strangers_keep_nobody_waiting(monkeypatch, caplog):
    """One says nothing, one is no process of ours, one hangs up, and all were there first."""
    first, second = places(2)
    monkeypatch.setattr(meeting, "SECONDS_TO_GREET", 20.0)
    with contextlib.ExitStack() as open_:

        def intrude():
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"process": 0, "processes": 2}\n'):
                open_.enter_context(called(first)).sendall(said)
            called(first).close()
            wait = time.monotonic() + 10
            while len(caplog.records) < 3 and time.monotonic() < wait:
                time.sleep(0.01)
            meet(second, 10.0).close()

        assert lines(first, meanwhile=intrude) == ["met"]
        said = sorted(record.getMessage() for record in caplog.records)
    assert said == [
        "a stranger called: another program is there",
        "a stranger called: it says that it is process 0 of 2",
        "a stranger called: the connection was closed",
    ]


def called(place: Meeting) -> socket.socket:
    """A connection to process 0, as soon as that listens."""
    for _ in itertools.count():
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(meeting._host_port(place.address))
        time.sleep(0.01)
    raise AssertionError


def test_who_has_come_and_gone_may_come_again(monkeypatch):
    """As where a launcher has started it again."""
    first, second, third = places(3)
    heard, trouble = threading.Event(), meeting._trouble
    monkeypatch.setattr(meeting, "_trouble", lambda *told: (heard.set(), trouble(*told))[1])

    def come_and_go():
        with called(first) as caller:
            meeting._say(caller, process=1, processes=3)
            assert heard.wait(30)

    def again():
        come_and_go()
        assert lines(second, third) == ["met", "met"]

    assert lines(first, meanwhile=again) == ["met"]


def test_a_port_that_is_taken_is_named():
    first, _ = places(2)
    port = int(first.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        (line,) = lines(first)
    assert line.startswith(f"port {port} cannot be opened for the other processes (Address already")


@pytest.mark.slow
@pytest.mark.parametrize(
    "process, line", [(0, "of 2 processes these did not come"), (1, "process 0 was not found")]
)
def test_a_program_that_is_left_alone_refuses_in_one_line(process, line):
    code = PROGRAM.format(first="pass", second="pass", before="pass", there="")
    flags = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--join-timeout", "2"]
    command = [sys.executable, "-c", code, *flags, "--process", str(process)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert told.returncode == 2
    (said,) = told.stderr.splitlines()
    assert f": {line}" in said
