"""One engine over several processes: process 0 schedules, the others run what it runs.

    clients -> process 0   engine's thread --- LeadingShelf.run --> its devices
                                                  |                     |
                                                RunCall, Make      collectives
                                                  v                     |
               process 1   follow() ----------- Shelf.run ------> its devices

Before process 0 runs a program it tells the others its name, and what the host gives to it. What
lies on devices has a number instead: every process holds its own parts of the same arrays under
the same number, until process 0 has no use for them any more. So no process but the first reads
what comes back, and nothing that a clock decides is decided twice.

Messages are msgpack, which holds no code: a program's name, and the leaves of its arguments, whose
structure each process knows. They go over sockets of the standard library, whose other end closes
when a process dies. The key to them comes from process 0 by `kv_set`, which is as trusted as the
network.
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
from moa_jax.decode.engine.rows import Kind
from moa_jax.decode.engine.shelf import Name, Shelf, Size
from moa_jax.errors import first_line
from moa_jax.runtime import multihost as processes
from moa_jax.runtime.rendezvous import GREETING_TIMEOUT_S as SECONDS_TO_GREET
from moa_jax.runtime.rendezvous import accept_all as greeted
from moa_jax.runtime.rendezvous import listen as listener_at

# Types of the parts of a program's name, by the first part.
NAMES: dict[str, tuple[Any, ...]] = {
    "empty": (Size,),
    "insert": (Size,),
    "take": (Size,),
    "catch_up": (Size,),
    "resized": (int, int),
    "restart": (int,),
    "read": (int, int),
    "score": (int,),
    "first": (int, Kind),
    "call": (Size, DraftShape, Kind),
}


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A msgpack array that begins with the name of its class."""


class Held(Message):
    """An array that lies on devices: the result of a run, by its place among the results."""

    run: int
    place: int


class HostArray(Message):
    """A host array, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Make(Message):
    """A program will be run soon."""

    name: Name


class RunCall(Message):
    """A program is run now, on arrays of the host and on some that are held."""

    number: int
    name: Name
    leaves: list[Held | HostArray]
    dead: list[Held]  # that nobody asks for any more


class End(Message):
    """Process 0 sends no more programs: the other processes may exit."""


READER = msgspec.msgpack.Decoder(Make | RunCall | End)


def read_message(data: bytes) -> Make | RunCall | End:
    """Decodes a message; raises msgspec.DecodeError for malformed data and unknown programs."""
    found = READER.decode(data)
    if isinstance(found, End):
        return found
    (what,) = msgspec.convert(found.name[:1], tuple[Literal[tuple(NAMES)]])
    typed = msgspec.convert(found.name[1:], tuple[NAMES[what]])
    return msgspec.structs.replace(found, name=(what, *typed))


def _sent(array: np.ndarray) -> HostArray:
    return HostArray(str(array.dtype), array.shape, array.tobytes())


def _received(array: HostArray) -> np.ndarray:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


class LeaderDied(ConnectionError):
    """Process 0 has died."""


# ---- process 0 ----------------------------------------------------------------------------


class EndGroup(Protocol):
    """What is called, from any thread, where the group has to end."""

    def __call__(self, line: str, lost: int | None = None) -> None:
        """`line` says why, and `lost` is a process that has died."""


class Group:
    """The other processes, as process 0 knows them."""

    def __init__(self, others: dict[int, Connection], end: EndGroup) -> None:
        self._others, self._end = others, end
        self._lock, self._closing = threading.Lock(), False
        watching = [functools.partial(self._watch, *each) for each in others.items()]
        self._threads = [threading.Thread(target=each, daemon=True) for each in watching]
        for thread in self._threads:
            thread.start()

    def tell(self, message: Make | RunCall | End) -> None:
        """Tells all of them; whoever is gone is noticed elsewhere."""
        data = msgspec.msgpack.encode(message)
        with self._lock:
            for other in self._others.values():
                with contextlib.suppress(OSError):
                    other.send_bytes(data)

    def end(self, line: str, lost: int | None = None) -> None:
        """A process cannot go on, and so nobody can."""
        if not self._closing:
            self._end(line, lost)

    def close(self) -> None:
        """Tells all of them that there is nothing more to do."""
        self._closing = True
        self.tell(End())

    def wait(self, seconds: float) -> None:
        """Returns when the others have ended, or after so long."""
        for thread in self._threads:
            thread.join(seconds)

    def _watch(self, process: int, other: Connection) -> None:
        with contextlib.suppress(OSError, EOFError):
            other.recv_bytes()  # nothing is ever said
        self.end(f"process {process} has died", process)


class LeadingShelf(Shelf):
    """The programs of process 0, which tells the others what it makes and runs."""

    def __init__(self, group: Group, *args: Any) -> None:
        super().__init__(*args)
        self._group, self._runs = group, itertools.count()
        self._held: dict[int, tuple[weakref.ref[jax.Array], Held]] = {}  # by id
        self._dead: deque[Held] = deque()

    def make(self, name: Name) -> None:
        if not self.has(name):
            self._group.tell(Make(name))
        super().make(name)

    def put(self, arrays: Any) -> Any:
        return arrays  # each call tells them, and gives them to its devices

    def run(self, name: Name, *arrays: Any) -> Any:
        number, (leaves, structure) = next(self._runs), jax.tree.flatten(arrays)
        own = [leaf if id(leaf) in self._held else np.asarray(leaf) for leaf in leaves]
        told = [
            self._held[id(leaf)][1] if id(leaf) in self._held else _sent(array)
            for leaf, array in zip(leaves, own, strict=True)
        ]
        dead = [self._dead.popleft() for _ in range(len(self._dead))]
        self._group.tell(RunCall(number, name, told, dead))
        try:
            found = super().run(name, *structure.unflatten(own))
        except Exception as error:  # the others wait for this process now
            self._group.end(f"{type(error).__name__}: {first_line(error)}")
            raise
        for place, leaf in enumerate(jax.tree.leaves(found)):
            died = weakref.ref(leaf, functools.partial(self._died, id(leaf)))
            self._held[id(leaf)] = died, Held(number, place)
        return found

    def _died(self, place: int, _: Any) -> None:
        self._dead.append(self._held.pop(place)[1])


# ---- the others ---------------------------------------------------------------------------


def follow(shelf: Shelf, first: Connection) -> None:
    """Makes and runs what process 0 says, until there is nothing more to do.

    Raises LeaderDied where process 0 has died, and what a program raises.
    """
    held: dict[Held, jax.Array] = {}
    made: dict[Name, Future[PyTreeDef]] = {}
    maker = ThreadPoolExecutor(1, "maker")
    try:
        while not isinstance(message := _heard(first), End):
            if isinstance(message, Make):
                made.setdefault(message.name, maker.submit(_make, shelf, message.name))
                continue
            arguments = made[message.name].result()
            array_of = lambda leaf: held[leaf] if isinstance(leaf, Held) else _received(leaf)
            arrays = arguments.unflatten(map(array_of, message.leaves))
            found = shelf.run(message.name, *arrays)
            for each in message.dead:
                del held[each]
            for place, leaf in enumerate(jax.tree.leaves(found)):
                held[Held(message.number, place)] = leaf
    finally:
        maker.shutdown(wait=False, cancel_futures=True)


def _make(shelf: Shelf, name: Name) -> PyTreeDef:
    """Compiles a program and returns the structure of its arguments.

    Compiles once more after an exception, since jax sometimes fails while another thread traces.
    """

    def make() -> PyTreeDef:
        shelf.make(name)
        return shelf.arguments_of(name)

    try:
        return make()
    except Exception:
        return make()


def _heard(first: Connection) -> Make | RunCall | End:
    try:
        return read_message(first.recv_bytes())
    except (EOFError, OSError) as error:
        raise LeaderDied("process 0 has died") from error


# ---- how they meet ------------------------------------------------------------------------

POINT = "engine"  # where process 0 leaves word


def gather(end: EndGroup) -> Group:
    """On process 0: waits for the others; `end` is that of `Group`."""
    key, others = secrets.token_bytes(32), {}
    with listener_at("::", 0, backlog=processes.count()) as listener:
        processes.kv_set(POINT, [listener.getsockname()[1], key.hex()])
        for index, other in greeted(listener, functools.partial(_greet, key)):
            others[index] = other
            if len(others) == processes.count() - 1:
                break
    return Group(others, end)


def _greet(key: bytes, caller: socket.socket) -> tuple[int, Connection]:
    """The number of a process that knows the key, and the connection to it."""
    _limit(caller, SECONDS_TO_GREET)
    with caller:
        other = Connection(os.dup(caller.fileno()))
        deliver_challenge(other, key)
        answer_challenge(other, key)
        index = int(other.recv_bytes())
        _limit(caller, 0)  # from now on it waits for as long as it takes
    return index, other


def _limit(caller: socket.socket, seconds: float) -> None:
    """How long the system waits for the other end, on this and all copies of the connection."""
    limit = struct.pack("ll", int(seconds), 0)
    for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        caller.setsockopt(socket.SOL_SOCKET, way, limit)


def join() -> Connection:
    """On the other processes: the connection to process 0."""
    port, key = processes.kv_get(POINT)
    first = Connection(socket.create_connection((processes.host_of_first(), port)).detach())
    answer_challenge(first, bytes.fromhex(key))
    deliver_challenge(first, bytes.fromhex(key))
    first.send_bytes(b"%d" % processes.index())
    return first
