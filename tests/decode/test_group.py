"""What process 0 tells the others is enough to run all that it runs."""

from __future__ import annotations

import gc
import queue
import threading
from multiprocessing import Pipe

import pytest

from moa_jax.decode.engine import Engine
from moa_jax.decode.engine.group import Group, LeaderDied, Make, RunCall, follow
from tests.decode.test_chunks import drafter, target
from tests.decode.test_engine import CHAIN, answers, assert_as_alone, mixed

SETTINGS = dict(num_slots=2, max_tokens=140, chunk=32, prefix_bytes=1 << 20)


class NotingConnection:
    """A connection that notes what comes."""

    def __init__(self, connection) -> None:
        self._connection, self.messages = connection, []

    def recv(self):
        self.messages.append(self._connection.recv())
        return self.messages[-1]


@pytest.mark.parametrize("name", [None, pytest.param("moa-1", marks=pytest.mark.slow)])
def test_another_process_runs_what_the_first_one_runs(name):
    """Here it is a thread with a shelf of its own, which runs everything a second time."""
    pair = (target(), drafter(name), CHAIN) if name else (target(),)
    ours, theirs = Pipe()
    ends, faults, heard = [], queue.SimpleQueue(), NotingConnection(theirs)
    group = Group({1: ours}, ends.append)
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
    engine.start()
    requests = mixed(8, 1, longest=60)
    assert_as_alone(requests, answers(engine, requests))
    engine.close()
    group.close()
    assert faults.get(timeout=60) is None
    thread.join()
    told = [each for each in heard.messages if isinstance(each, RunCall)]
    assert runs == [each.name for each in told] and {name[0] for name in runs} >= {
        "empty",
        "restart",
        "read",
        "first",
        "insert",
        "call",
    }
    made = {each.name for each in heard.messages if isinstance(each, Make)}
    assert made >= set(runs)
    engine._seats.reset()
    engine._prefixes.clear()
    gc.collect()
    kept, dead = len(engine.shelf._held), sum(len(each.dead) for each in told)
    assert dead > 100 and kept < 100, (dead, kept)
    assert ends == []


def test_both_sides_notice_that_the_other_has_died():
    ours, theirs = Pipe()
    ended = queue.SimpleQueue()
    group = Group({1: ours}, ended.put)
    theirs.close()
    assert ended.get(timeout=10) == "process 1 has died"
    group.tell(None)  # nobody hears it
    ours, theirs = Pipe()
    ours.close()
    with pytest.raises(LeaderDied, match="process 0 has died"):
        follow(None, theirs)


def test_a_run_that_fails_ends_the_group(monkeypatch):
    """The others wait for this process in a collective by then."""
    ours, theirs = Pipe()
    ends = []
    engine = Engine(target(), group=Group({1: ours}, ends.append), **SETTINGS)
    with pytest.raises(KeyError):
        engine.shelf.run(("call", "that is not there"))
    assert ends == ["KeyError: ('call', 'that is not there')"]
    assert isinstance(theirs.recv(), RunCall)
