"""What process 0 tells the others is enough to run all that it runs."""

from __future__ import annotations

import contextlib
import gc
import pickle
import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client

import msgspec
import pytest

from moa_jax.decode.engine import Engine
from moa_jax.decode.engine import group as group_module
from moa_jax.decode.engine.group import (
    End,
    Group,
    LeaderDied,
    Make,
    RunCall,
    follow,
    gather,
    join,
    read_message,
)
from moa_jax.decode.engine.shelf import Shelf
from moa_jax.runtime import multihost as processes
from tests.decode.engines import CHAIN, answers, assert_as_alone, mixed
from tests.decode.test_chunks import drafter, target
from tests.meeting import wait_for

SETTINGS = dict(num_slots=2, max_tokens=140, chunk=32, prefix_bytes=1 << 20)


class NotingConnection:
    """A connection that notes what comes."""

    def __init__(self, connection) -> None:
        self._connection, self.messages = connection, []

    def recv_bytes(self):
        data = self._connection.recv_bytes()
        self.messages.append(read_message(data))
        return data


@pytest.mark.parametrize("name", [None, pytest.param("moa-1", marks=pytest.mark.slow)])
def test_another_process_runs_what_the_first_one_runs(name, monkeypatch):
    """Here it is a thread with a shelf of its own, which runs everything a second time."""
    pair = (target(), drafter(name), CHAIN) if name else (target(),)
    ours, theirs = Pipe()
    ends, faults, heard = [], queue.SimpleQueue(), NotingConnection(theirs)
    group = Group({1: ours}, lambda *told: ends.append(told))
    other, runs = Engine(*pair, **SETTINGS).shelf, []
    run = other.run
    other.run = lambda name, *arrays: runs.append(name) or run(name, *arrays)

    def following() -> None:
        try:
            follow(other, heard)
            faults.put(None)
        except BaseException as error:
            faults.put(error)

    thread = threading.Thread(target=following)
    thread.start()
    engine = Engine(*pair, group=group, **SETTINGS)
    engine._make_ahead = lambda: None  # most of a test is compiling
    engine._time_next = lambda: False
    own, run_here = [], Shelf.run

    def noted(shelf, name, *arrays):
        if shelf is engine.shelf:
            own.append(name)
        return run_here(shelf, name, *arrays)

    monkeypatch.setattr(Shelf, "run", noted)
    engine.start()
    requests = mixed(8, 1, longest=60)
    assert_as_alone(requests, answers(engine, requests))
    engine.close()
    group.close()
    assert faults.get(timeout=60) is None
    thread.join()
    told = [each for each in heard.messages if isinstance(each, RunCall)]
    assert runs == own == [each.name for each in told] and {name[0] for name in runs} >= {
        "empty",
        "restart",
        "read",
        "first",
        "insert",
        "call",
        "take",
    }
    made = {each.name for each in heard.messages if isinstance(each, Make)}
    assert made >= set(runs)
    engine._seats.reset()
    engine._readings.prefixes.clear()
    gc.collect()
    kept, dead = len(engine.shelf._held), sum(len(each.dead) for each in told)
    assert dead > 100 and kept < 100, (dead, kept)
    assert ends == []


def test_messages_hold_no_code():
    """A pickle would run what it names; a follower refuses it, and programs that are not there."""
    encode = msgspec.msgpack.encode
    names = [["call", 3], ["x"], [], [["call"]]]
    for data in (pickle.dumps(print), b"", *(encode(["Make", name]) for name in names)):
        with pytest.raises(msgspec.DecodeError):
            read_message(data)


def test_both_sides_notice_that_the_other_has_died():
    ours, theirs = Pipe()
    ended = queue.SimpleQueue()
    group = Group({1: ours}, lambda *told: ended.put(told))
    theirs.close()
    assert ended.get(timeout=10) == ("process 1 has died", 1)
    group.tell(End())  # nobody hears it
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(LeaderDied, match="process 0 has died"):
        follow(None, theirs)


def test_a_run_that_fails_ends_the_group(monkeypatch):
    """The others wait for this process in a collective by then."""
    ours, theirs = Pipe()
    ends = []
    engine = Engine(target(), group=Group({1: ours}, lambda *told: ends.append(told)), **SETTINGS)
    with pytest.raises(KeyError):
        engine.shelf.run(("call", "that is not there"))
    assert ends == [("KeyError: ('call', 'that is not there')", None)]
    with pytest.raises(msgspec.ValidationError):  # no program has that name
        read_message(theirs.recv_bytes())


def test_strangers_keep_no_process_waiting(monkeypatch, caplog):
    """One says nothing, one says too much, one has another key; all called first."""
    word = queue.Queue()
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: 1)
    monkeypatch.setattr(processes, "host_of_first", lambda: "127.0.0.1")
    monkeypatch.setattr(processes, "kv_set", lambda point, told: word.put(told))
    monkeypatch.setattr(group_module, "SECONDS_TO_GREET", 60.0)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as strangers:
        found = pool.submit(gather, print)
        port, key = word.get(timeout=30)
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 99):
            stranger = socket.create_connection(("127.0.0.1", port))
            strangers.enter_context(stranger).sendall(said)
        with pytest.raises(AuthenticationError):
            Client(("127.0.0.1", port), authkey=b"another")
        monkeypatch.setattr(processes, "kv_get", lambda point: (port, key))
        first = join()
        group = found.result(30)
        group.tell(End())
        assert read_message(first.recv_bytes()) == End()
        group.close()
        first.close()
        group.wait(30)
    wait_for(lambda: sum("rejected a connection" in each for each in caplog.messages) >= 2)


def test_a_stranger_that_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(group_module, "SECONDS_TO_GREET", 1.0)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(BlockingIOError):
        group_module._greet(b"key", ours)
