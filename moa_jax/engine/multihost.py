"""One engine over several processes: process 0 leads, the others run the programs that it runs.

    clients -> process 0   engine's thread --- LeadingPrograms.run --> its devices
                                                  |                     |
                                      CompileMessage, RunMessage    collectives
                                                  v                     |
               process 1   run_follower() ----- ProgramCache.run ------> its devices

Before process 0 runs a program it sends the program's name and the host arrays among the arguments
to its followers. An array on devices is sent as a number: each process holds its own shards of the
array under this number, until process 0 frees the array. Only process 0 schedules and reads
results, so no decision depends on the clocks of two processes.

Messages are msgpack, which cannot contain code: the name of a program, and the leaves of its
arguments, whose structure follows from the name. They are sent over sockets, which close when a
process dies. Both ends of a socket prove that they have a key. Process 0 publishes the key with
`kv_set`, which is as trusted as the network.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import socket
import struct
import threading
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Literal, Protocol

import jax
import msgspec
import numpy as np
from jax.tree_util import PyTreeDef

from moa_jax.config import DraftShape
from moa_jax.engine.program_cache import ProgramCache, ProgramName
from moa_jax.errors import first_line
from moa_jax.runtime import multihost as processes
from moa_jax.runtime.rendezvous import GREETING_TIMEOUT_S as SECONDS_TO_GREET
from moa_jax.runtime.rendezvous import accept_all
from moa_jax.runtime.rendezvous import listen as listener_at

# Types of the other parts of a program's name, by its first part.
NAMES: dict[str, tuple[Any, ...]] = {
    "empty": (),
    "copy": (),
    "catch_up": (),
    "prefill": (int,),
    "score": (int,),
    "decode": (int, DraftShape, int),
}


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A msgpack array that begins with the name of its class."""


class RemoteArray(Message):
    """An array on devices: a result of an earlier run, by its place among the run's results."""

    run: int
    place: int


class HostArray(Message):
    """A host array, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class CompileMessage(Message):
    """Compile a program that will be run later."""

    name: ProgramName


class RunMessage(Message):
    """Run a program on arrays of the host and of earlier runs."""

    number: int
    name: ProgramName
    leaves: list[RemoteArray | HostArray]
    dead: list[RemoteArray]  # to be freed: no later run takes them


class End(Message):
    """The last message: the followers may exit."""


READER = msgspec.msgpack.Decoder(CompileMessage | RunMessage | End)


def read_message(data: bytes) -> CompileMessage | RunMessage | End:
    """Decodes a message; raises msgspec.DecodeError for malformed data and unknown programs."""
    found = READER.decode(data)
    if isinstance(found, End):
        return found
    (kind,) = msgspec.convert(found.name[:1], tuple[Literal[tuple(NAMES)]])
    typed = msgspec.convert(found.name[1:], tuple[NAMES[kind]])
    return msgspec.structs.replace(found, name=(kind, *typed))


def _host_array(array: np.ndarray) -> HostArray:
    return HostArray(str(array.dtype), array.shape, array.tobytes())


def _numpy_array(array: HostArray) -> np.ndarray:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


class LeaderDied(ConnectionError):
    """Process 0 has died."""


# ---- process 0 ----------------------------------------------------------------------------


class EndGroup(Protocol):
    """Ends all processes of the group; may be called from any thread."""

    def __call__(self, line: str, lost: int | None = None) -> None:
        """`line` has the reason, and `lost` is the number of a process that has died."""


class Followers:
    """The connections of process 0 to the other processes."""

    def __init__(self, others: dict[int, Connection], end: EndGroup) -> None:
        """`others` are the connections by process; `end` is called if one of them closes."""
        self._others, self._end = others, end
        self._lock, self._closing = threading.Lock(), False
        watching = [functools.partial(self._watch, *each) for each in others.items()]
        self._threads = [threading.Thread(target=each, daemon=True) for each in watching]
        for thread in self._threads:
            thread.start()

    def broadcast(self, message: CompileMessage | RunMessage | End) -> None:
        """Sends a message to every follower; `_watch` notices those that have died."""
        data = msgspec.msgpack.encode(message)
        with self._lock:
            for other in self._others.values():
                with contextlib.suppress(OSError):
                    other.send_bytes(data)

    def end(self, line: str, lost: int | None = None) -> None:
        """Ends all processes, because one of them failed; does nothing after `close`."""
        if not self._closing:
            self._end(line, lost)

    def close(self) -> None:
        """Sends the last message."""
        self._closing = True
        self.broadcast(End())

    def wait(self, seconds: float) -> None:
        """Waits until each follower has exited, at most `seconds` for each."""
        for thread in self._threads:
            thread.join(seconds)

    def _watch(self, process: int, other: Connection) -> None:
        with contextlib.suppress(OSError, EOFError):
            other.recv_bytes()  # followers send nothing: it returns when the process ends
        self.end(f"process {process} has died", process)


class LeadingPrograms(ProgramCache):
    """The programs of process 0: its followers compile and run the same programs."""

    def __init__(self, followers: Followers, *args: Any) -> None:
        super().__init__(*args)
        self._followers, self._runs = followers, itertools.count()
        # Results of runs that process 0 still holds, by `id`.
        self._results: dict[int, tuple[weakref.ref[jax.Array], RemoteArray]] = {}
        self._dead: deque[RemoteArray] = deque()

    def compile(self, name: ProgramName) -> None:
        if not self.has(name):
            self._followers.broadcast(CompileMessage(name))
        super().compile(name)

    def put(self, arrays: Any) -> Any:
        return arrays  # `run` sends host arrays to the followers and to the devices

    def run(self, name: ProgramName, *arrays: Any) -> Any:
        number, (leaves, structure) = next(self._runs), jax.tree.flatten(arrays)
        own = [leaf if id(leaf) in self._results else np.asarray(leaf) for leaf in leaves]
        sent = [
            self._results[id(leaf)][1] if id(leaf) in self._results else _host_array(array)
            for leaf, array in zip(leaves, own, strict=True)
        ]
        dead = [self._dead.popleft() for _ in range(len(self._dead))]
        self._followers.broadcast(RunMessage(number, name, sent, dead))
        try:
            found = super().run(name, *structure.unflatten(own))
        except Exception as error:  # the followers wait for this process in a collective
            self._followers.end(f"{type(error).__name__}: {first_line(error)}")
            raise
        for place, leaf in enumerate(jax.tree.leaves(found)):
            died = weakref.ref(leaf, functools.partial(self._died, id(leaf)))
            self._results[id(leaf)] = died, RemoteArray(number, place)
        return found

    def _died(self, key: int, _: Any) -> None:
        self._dead.append(self._results.pop(key)[1])


# ---- followers ----------------------------------------------------------------------------


def run_follower(programs: ProgramCache, leader: Connection) -> None:
    """Compiles and runs the programs that process 0 sends, until its last message.

    Raises LeaderDied if process 0 dies before, and the exceptions of programs.
    """
    results: dict[RemoteArray, jax.Array] = {}
    compiled: dict[ProgramName, Future[PyTreeDef]] = {}
    compiler = ThreadPoolExecutor(1, "compiler")
    try:
        while not isinstance(message := _receive(leader), End):
            if isinstance(message, CompileMessage):
                compiled.setdefault(message.name, compiler.submit(_compile, programs, message.name))
                continue
            arguments = compiled[message.name].result()
            array_of = lambda leaf: (
                results[leaf] if isinstance(leaf, RemoteArray) else _numpy_array(leaf)
            )
            arrays = arguments.unflatten(map(array_of, message.leaves))
            found = programs.run(message.name, *arrays)
            for each in message.dead:
                del results[each]
            for place, leaf in enumerate(jax.tree.leaves(found)):
                results[RemoteArray(message.number, place)] = leaf
    finally:
        compiler.shutdown(wait=False, cancel_futures=True)


def _compile(programs: ProgramCache, name: ProgramName) -> PyTreeDef:
    """Compiles a program and returns the structure of its arguments.

    Compiles once more after an exception, since jax sometimes fails while another thread traces.
    """

    def compile_once() -> PyTreeDef:
        programs.compile(name)
        return programs.arguments_of(name)

    try:
        return compile_once()
    except Exception:
        return compile_once()


def _receive(leader: Connection) -> CompileMessage | RunMessage | End:
    try:
        return read_message(leader.recv_bytes())
    except (EOFError, OSError) as error:
        raise LeaderDied("process 0 has died") from error


# ---- connecting ---------------------------------------------------------------------------

POINT = "engine"  # key under which process 0 publishes its port and the secret


def gather(end: EndGroup) -> Followers:
    """On process 0: waits until every other process has connected."""
    key, others = secrets.token_bytes(32), {}
    with listener_at("::", 0, backlog=processes.count()) as listener:
        processes.kv_set(POINT, [listener.getsockname()[1], key.hex()])
        for index, other in accept_all(listener, functools.partial(_greet, key)):
            others[index] = other
            if len(others) == processes.count() - 1:
                break
    return Followers(others, end)


def _greet(key: bytes, caller: socket.socket) -> tuple[int, Connection]:
    """Authenticates a caller; returns the number of its process, and the connection."""
    _limit(caller, SECONDS_TO_GREET)
    with caller:
        other = Connection(os.dup(caller.fileno()))
        deliver_challenge(other, key)
        answer_challenge(other, key)
        index = int(other.recv_bytes())
        _limit(caller, 0)  # later messages may take any time
    return index, other


def _limit(caller: socket.socket, seconds: float) -> None:
    """Sets the timeout of a socket, and of all its copies; 0 is no timeout."""
    limit = struct.pack("ll", int(seconds), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        caller.setsockopt(socket.SOL_SOCKET, option, limit)


def join() -> Connection:
    """On a follower: connects to process 0."""
    port, key = processes.kv_get(POINT)
    leader = Connection(socket.create_connection((processes.host_of_first(), port)).detach())
    answer_challenge(leader, bytes.fromhex(key))
    deliver_challenge(leader, bytes.fromhex(key))
    leader.send_bytes(b"%d" % processes.index())
    return leader
