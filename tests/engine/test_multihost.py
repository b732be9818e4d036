"""Followers run every program of process 0, from its messages alone."""

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

from moa_jax.engine import Engine, Request, multihost
from moa_jax.engine.multihost import (
    CompileMessage,
    End,
    Followers,
    LeaderDied,
    RunMessage,
    gather,
    join,
    read_message,
    run_follower,
)
from moa_jax.engine.program_cache import ProgramCache
from moa_jax.runtime import multihost as processes
from tests.decode.test_chunks import drafter, target
from tests.engine.engines import CHAIN, answers, assert_as_alone, mixed
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
    """The follower is a thread with its own program cache, and runs each program again."""
    pair = (target(), drafter(name), CHAIN) if name else (target(),)
    ours, theirs = Pipe()
    ends, faults, received = [], queue.SimpleQueue(), NotingConnection(theirs)
    followers = Followers({1: ours}, lambda *reason: ends.append(reason))
    other, runs = Engine(*pair, **SETTINGS).programs, []
    run = other.run
    other.run = lambda name, *arrays: runs.append(name) or run(name, *arrays)

    def following() -> None:
        try:
            run_follower(other, received)
            faults.put(None)
        except BaseException as error:
            faults.put(error)

    thread = threading.Thread(target=following)
    thread.start()
    engine = Engine(*pair, followers=followers, **SETTINGS)
    engine._while_idle = lambda: None  # most of a test is compiling
    own, run_here = [], ProgramCache.run

    def noted(programs, name, *arrays):
        if programs is engine.programs:
            own.append(name)
        return run_here(programs, name, *arrays)

    monkeypatch.setattr(ProgramCache, "run", noted)
    engine.start()
    requests = mixed(8, 1, longest=60)
    requests += [Request((*range(20), index), 9, ()) for index in range(3)]  # with a copy
    assert_as_alone(requests, answers(engine, requests))
    engine.close()
    followers.close()
    assert faults.get(timeout=60) is None
    thread.join()
    sent = [each for each in received.messages if isinstance(each, RunMessage)]
    assert runs == own == [each.name for each in sent]
    assert {name[0] for name in runs} >= {"empty", "copy", "prefill", "decode"}
    compiled = {each.name for each in received.messages if isinstance(each, CompileMessage)}
    assert compiled >= set(runs)
    engine._batch.drop()
    gc.collect()
    kept, dead = len(engine.programs._results), sum(len(each.dead) for each in sent)
    assert dead > 100 and kept < 100, (dead, kept)
    assert ends == []


def test_messages_hold_no_code():
    """A pickle would run what it names; a follower refuses it, and programs that are not there."""
    encode = msgspec.msgpack.encode
    names = [["decode", 3], ["x"], [], [["decode"]]]
    for data in (pickle.dumps(print), b"", *(encode(["CompileMessage", name]) for name in names)):
        with pytest.raises(msgspec.DecodeError):
            read_message(data)


def test_both_sides_notice_that_the_other_has_died():
    ours, theirs = Pipe()
    ended = queue.SimpleQueue()
    followers = Followers({1: ours}, lambda *reason: ended.put(reason))
    theirs.close()
    assert ended.get(timeout=10) == ("process 1 has died", 1)
    followers.broadcast(End())  # no error, though the follower is gone
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(LeaderDied, match="process 0 has died"):
        run_follower(None, theirs)


def test_a_run_that_fails_ends_the_group(monkeypatch):
    """The followers wait for this process in a collective by then."""
    ours, theirs = Pipe()
    ends = []
    followers = Followers({1: ours}, lambda *reason: ends.append(reason))
    engine = Engine(target(), followers=followers, **SETTINGS)
    with pytest.raises(KeyError):
        engine.programs.run(("call", "that is not there"))
    assert ends == [("KeyError: ('call', 'that is not there')", None)]
    with pytest.raises(msgspec.ValidationError):  # no program has that name
        read_message(theirs.recv_bytes())


def test_strangers_keep_no_process_waiting(monkeypatch, caplog):
    """One says nothing, one says too much, one has another key; all called first."""
    word = queue.Queue()
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: 1)
    monkeypatch.setattr(processes, "host_of_first", lambda: "127.0.0.1")
    monkeypatch.setattr(processes, "kv_set", lambda point, value: word.put(value))
    monkeypatch.setattr(multihost, "SECONDS_TO_GREET", 60.0)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as strangers:
        found = pool.submit(gather, print)
        port, key = word.get(timeout=30)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 99):
            stranger = socket.create_connection(("127.0.0.1", port))
            strangers.enter_context(stranger).sendall(data)
        with pytest.raises(AuthenticationError):
            Client(("127.0.0.1", port), authkey=b"another")
        monkeypatch.setattr(processes, "kv_get", lambda point: (port, key))
        first = join()
        followers = found.result(30)
        followers.broadcast(End())
        assert read_message(first.recv_bytes()) == End()
        followers.close()
        first.close()
        followers.wait(30)
    wait_for(lambda: sum("rejected a connection" in each for each in caplog.messages) >= 2)


def test_a_stranger_that_says_nothing_is_sent_away(monkeypatch):
    monkeypatch.setattr(multihost, "SECONDS_TO_GREET", 1.0)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(BlockingIOError):
        multihost._greet(b"key", ours)
