"""Bytes from process 0 to all other processes of a run, over sockets.

    process 1   join() ---\
                           process 0   gather() -> Followers: broadcast, close, wait
    process 2   join() ---/

A socket closes when its process dies, so both ends notice. Both ends prove that they have a key,
which process 0 publishes with `kv_set`, which is as trusted as the network.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import numpy as np

from moa_jax.runtime import multihost, rendezvous

HostArray = tuple[str, tuple[int, ...], bytes]  # dtype, shape, and the data in row-major order

KEY = "followers"  # under which process 0 publishes its port and the secret
GREETING_TIMEOUT_S = rendezvous.GREETING_TIMEOUT_S
END = b""  # the last message
STUCK_S = 3.0  # for the last message, and a message before it that is stuck


class LeaderDied(ConnectionError):
    """Process 0 has died."""


def packed(arrays: Sequence[Any]) -> list[HostArray]:
    """Arrays as values of a message; waits for those that a device computes."""
    leaves = map(np.asarray, arrays)
    return [(str(leaf.dtype), leaf.shape, leaf.tobytes()) for leaf in leaves]


def unpacked(arrays: Sequence[HostArray]) -> list[np.ndarray]:
    """The arrays of a message."""
    return [np.frombuffer(data, dtype).reshape(shape) for dtype, shape, data in arrays]


class Followers:
    """The connections of process 0 to the other processes."""

    def __init__(self, others: dict[int, Connection], end: Callable[..., None]) -> None:
        """`others` are the connections by process.

        `end(line, lost=None)` ends all processes of the group, from any thread: `line` has the
        reason, and `lost` is the number of a process that has died.
        """
        self._others, self._end = others, end
        self._lock, self._closing = threading.Lock(), False
        watching = [functools.partial(self._watch, *each) for each in others.items()]
        self._threads = [threading.Thread(target=each, daemon=True) for each in watching]
        for thread in self._threads:
            thread.start()

    def broadcast(self, message: bytes) -> None:
        """Sends a message to every follower; `_watch` notices those that have died."""
        with self._lock:
            for other in self._others.values():
                with contextlib.suppress(OSError):
                    other.send_bytes(message)

    def end(self, line: str, lost: int | None = None) -> None:
        """Ends all processes, because one of them failed; does nothing after `close`."""
        if not self._closing:
            self._end(line, lost)

    def close(self) -> None:
        """Sends the last message; returns after STUCK_S if a follower reads no more."""
        self._closing = True
        last = threading.Thread(target=self.broadcast, args=(END,), daemon=True)
        last.start()
        last.join(STUCK_S)

    def wait(self, seconds: float) -> None:
        """Waits until each follower has exited, at most `seconds` for each."""
        for thread in self._threads:
            thread.join(seconds)

    def _watch(self, process: int, other: Connection) -> None:
        with contextlib.suppress(OSError, EOFError):
            other.recv_bytes()  # followers send nothing: it returns when the process ends
        self.end(f"process {process} has died", process)


def receive(leader: Connection) -> bytes:
    """On a follower: the next message of process 0; raises LeaderDied if process 0 dies."""
    try:
        return leader.recv_bytes()
    except (EOFError, OSError) as error:
        raise LeaderDied("process 0 has died") from error


def gather(end: Callable[..., None]) -> Followers:
    """On process 0: waits until every other process has connected; `end` is that of Followers."""
    key, others = secrets.token_bytes(32), {}
    with rendezvous.listen("::", 0, backlog=multihost.count()) as listener:
        multihost.kv_set(KEY, [listener.getsockname()[1], key.hex()])
        for index, other in rendezvous.accept_all(listener, functools.partial(_greet, key)):
            others[index] = other
            if len(others) == multihost.count() - 1:
                break
    return Followers(others, end)


def join() -> Connection:
    """On a follower: connects to process 0."""
    port, key = multihost.kv_get(KEY)
    leader = Connection(socket.create_connection((multihost.host_of_first(), port)).detach())
    answer_challenge(leader, bytes.fromhex(key))
    deliver_challenge(leader, bytes.fromhex(key))
    leader.send_bytes(b"%d" % multihost.index())
    return leader


def _greet(key: bytes, caller: socket.socket) -> tuple[int, Connection]:
    """Authenticates a caller; returns the number of its process, and the connection."""
    _limit(caller, GREETING_TIMEOUT_S)
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
