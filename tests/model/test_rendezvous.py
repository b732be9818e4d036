"""Processes connect before JAX starts, or each of them names the missing ones in one line."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from moa_jax.errors import InputError, TemporaryError
from moa_jax.runtime import rendezvous
from moa_jax.runtime.rendezvous import ProcessSpec, connect
from tests.meeting import free_port, wait_for

REJECTED = "rejected a connection that did not identify itself"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(rendezvous, "RETRY_INTERVAL_S", 0.02)


def lines(*places: ProcessSpec, seconds=20.0, meanwhile: Callable = lambda: None) -> list[str]:
    """Returns, for processes that connect at the same time, "met" or the error of each."""

    def line(place: ProcessSpec) -> str:
        try:
            for each in connect(place, seconds).values():
                each.close()
        except InputError as error:
            may_pass = re.search("timed out|already in use", str(error)) is not None
            assert isinstance(error, TemporaryError) == may_pass
            return str(error)
        return "met"

    with ThreadPoolExecutor(len(places)) as pool:
        found = [pool.submit(line, place) for place in places]
        meanwhile()
        return [each.result(30) for each in found]


def places(count: int) -> list[ProcessSpec]:
    address = f"127.0.0.1:{free_port()}"
    return [ProcessSpec(address, count, index) for index in range(count)]


def test_all_processes_connect():
    assert lines(*places(4)) == ["met"] * 4
    assert connect(ProcessSpec("nobody.invalid:1", 1, 0), 0.0) == {}  # one process alone


def test_a_missing_process_is_named_in_every_error():
    first, _, third, _ = places(4)
    line, message = lines(first, third, seconds=1.5)
    missing = f"processes [1, 3] of 4 did not connect to {first.coordinator_address}"
    assert line.startswith(f"timed out after 1.5 s: {missing}; check their logs")
    assert message == f"process 0: {line}"


def test_without_process_0_the_others_say_so():
    first, second = places(2)
    (line,) = lines(second, seconds=0.3)
    where = f"{first.coordinator_address} ([Errno 111]"
    assert line.startswith(f"timed out after 0.3 s: process 0 did not answer at {where}")


CONTRADICTIONS = {
    "two processes have the id 1; number them from 0": {"process_id": 1},
    "--processes: 4 for process 2, 3 for process 0": {"num_processes": 4},
}


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_places_that_contradict_each_other_are_refused(line):
    first, second, third = places(3)
    message, found, wrong = lines(first, second, third._replace(**CONTRADICTIONS[line]))
    assert line in message
    for each in (found, wrong):  # process 0 has ended if the process connects late
        assert line in each or "did not answer" in each


def test_foreign_connections_delay_no_process(monkeypatch, caplog):
    """Foreign connections send nothing or other data, or close; all of them come first."""
    first, second = places(2)
    monkeypatch.setattr(rendezvous, "GREETING_TIMEOUT_S", 20.0)
    with contextlib.ExitStack() as open_:

        def intrude():
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"process": 0, "processes": 2}\n'):
                open_.enter_context(called(first)).sendall(said)
            called(first).close()
            wait_for(lambda: len(caplog.records) >= 3)
            for each in connect(second, 10.0).values():
                each.close()

        assert lines(first, meanwhile=intrude) == ["met"]
        said = sorted(record.getMessage() for record in caplog.records)
    assert said == [
        f"{REJECTED}: Expecting value: line 1 column 1 (char 0)",
        f"{REJECTED}: process 0 of 2",
        f"{REJECTED}: the connection was closed",
    ]


def called(place: ProcessSpec) -> socket.socket:
    """Returns a connection to process 0, as soon as that process listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(rendezvous._host_port(place.coordinator_address))
        time.sleep(0.01)


def test_a_port_that_is_taken_is_named():
    first, _ = places(2)
    port = int(first.coordinator_address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        (line,) = lines(first)
    fault = f"cannot open port {port} for the other processes: Address already in use"
    assert line.startswith(fault)
