"""Followers run every program of process 0, from its messages alone."""

from __future__ import annotations

import pickle
import queue
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client

import msgspec
import pytest

from moa_jax.engine import Engine, Request
from moa_jax.engine.multihost import READER, Message, run_follower
from moa_jax.engine.program_cache import ProgramCache, ProgramName
from moa_jax.grammar.compile import json_schema
from moa_jax.runtime import multihost as processes
from moa_jax.runtime.followers import END, Followers, LeaderDied, gather, join
from tests.decode.test_chunks import target
from tests.decode.tiny import END as END_ID
from tests.decode.tiny import tiny_grammar
from tests.engine.engines import answers, assert_as_alone, mixed

SETTINGS = dict(num_slots=2, max_tokens=140, chunk=32, prefix_bytes=1 << 20)


@pytest.mark.slow
def test_another_process_runs_what_the_first_one_runs():
    """The follower is a thread with its own program cache; it repeats the run of each program."""
    ends = []
    ours, theirs = Pipe()
    followers = Followers({1: ours}, lambda *reason: ends.append(reason))
    other = noting(Engine(target(), **SETTINGS).programs)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(run_follower, other, theirs)
        engine = Engine(target(), followers=followers, **SETTINGS)
        own, engine.programs.later = noting(engine.programs), lambda: []
        engine.start()
        requests = mixed(8, 1, longest=60)
        requests += [Request((*range(20), index), 9, ()) for index in range(3)]  # with a copy
        assert_as_alone(requests, answers(engine, requests))
        engine.prepare_masks()
        grammar = tiny_grammar(json_schema({"enum": ["5", "7"]}))
        (listener,) = answers(engine, [Request((5,), 9, (END_ID,), grammar=grammar)])
        assert listener.token_ids[-1] == END_ID
        engine.close()
        followers.close()
        assert following.result(60) is None
    assert other.runs == own.runs and ends == []
    assert {name.kind for name in own.runs} >= {"empty", "copy", "prefill", "decode", "verify"}


def noting(programs: ProgramCache) -> ProgramCache:
    """Records the names of the programs that run in `runs`."""
    run, programs.runs = programs.run, []
    programs.run = lambda name, *arrays: programs.runs.append(name) or run(name, *arrays)
    return programs


def test_messages_hold_no_code():
    """A pickle could run code, so a follower refuses it; it refuses unknown programs as well."""
    names = [["decode", "3"], ["x"], [], [["decode"]]]
    for data in (pickle.dumps(print), b"", *(msgspec.msgpack.encode([name, []]) for name in names)):
        with pytest.raises(msgspec.DecodeError):
            READER.decode(data)


def test_both_sides_notice_that_the_other_has_died():
    ours, theirs = Pipe()
    ended = queue.SimpleQueue()
    followers = Followers({1: ours}, lambda *reason: ended.put(reason))
    theirs.close()
    assert ended.get(timeout=10) == ("process 1 has died", 1)
    followers.broadcast(END)  # no error, though the follower is gone
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(LeaderDied, match="process 0 has died"):
        run_follower(None, theirs)


def test_closing_does_not_wait_for_a_stuck_message(monkeypatch):
    monkeypatch.setattr("moa_jax.runtime.followers.STUCK_S", 0.05)
    ours, theirs = Pipe()
    followers = Followers({1: ours}, lambda *reason: None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(followers.broadcast, bytes(1 << 24))  # the other end is not read yet
        while not followers._lock.locked():
            pass
        followers.close()
        assert len(theirs.recv_bytes()) == 1 << 24
        assert theirs.poll(30) and theirs.recv_bytes() == END


def test_a_run_that_fails_ends_the_group(monkeypatch):
    """At that time, the followers wait for this process in a collective."""
    ours, theirs = Pipe()
    ends = []
    followers = Followers({1: ours}, lambda *reason: ends.append(reason))
    engine = Engine(target(), followers=followers, **SETTINGS)
    with pytest.raises(KeyError):
        engine.programs.run(ProgramName("copy"), None)  # which is not compiled
    assert [line.split(":")[0] for line, lost in ends] == ["KeyError"]
    assert READER.decode(theirs.recv_bytes()) == Message(ProgramName("copy"), [])


def test_processes_meet_by_a_key(monkeypatch, caplog):
    """tests/model/test_rendezvous.py tests connections of other programs."""
    word = queue.Queue()
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "index", lambda: 1)
    monkeypatch.setattr(processes, "host_of_first", lambda: "127.0.0.1")
    monkeypatch.setattr(processes, "kv_set", lambda point, value: word.put(value))
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(gather, print)
        port, key = word.get(timeout=30)
        with pytest.raises(AuthenticationError):
            Client(("127.0.0.1", port), authkey=b"another")
        monkeypatch.setattr(processes, "kv_get", lambda point: (port, key))
        first, followers = join(), found.result(30)
        followers.close()
        assert first.recv_bytes() == END
        first.close()
        followers.wait(30)
