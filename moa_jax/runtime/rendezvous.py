"""Connects the processes of a run before jax.distributed starts, which aborts if one is missing.

    process 1   {"process": 1, "processes": 3} --->   process 0   ---> {"problem": ""}
    process 2   {"process": 2, "processes": 3} --->               ---> {"problem": ""}

The sockets stay open: the kernel closes those of a process that dies, so its death is noticed at
once and not after a heartbeat timeout.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from moa_jax.errors import InputError, TemporaryError

T = TypeVar("T")

GREETING_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.05
MAX_LINE_BYTES = 4096
MAX_MISSING_SHOWN = 8
REJECTED = "rejected a connection that did not identify itself: %s"


class ProcessSpec(NamedTuple):
    """The first three arguments of `jax.distributed.initialize`."""

    coordinator_address: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int


SINGLE = ProcessSpec("", 1, 0)


def connect(spec: ProcessSpec, timeout_s: float) -> dict[int, socket.socket]:
    """Sockets by process id: process 0 gets one to each other process, the others one to process 0.

    Raises, in every connected process, TemporaryError if a process is missing after `timeout_s`,
    and InputError if two have the same id or disagree on the number of processes.
    """
    if spec.num_processes == 1:
        return {}
    return {0: _connect_to_first(spec, timeout_s)} if spec.process_id else _accept(spec, timeout_s)


def _accept(spec: ProcessSpec, timeout_s: float) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    problem, kind, count = "", InputError, spec.num_processes
    with _coordinator_listener(spec) as listener:
        for process, processes, peer in accept_all(listener, _read_introduction, timeout_s):
            if process in peers:
                problem = f"two processes have the id {process}; number them from 0"
            if processes != count:
                problem = f"--processes: {processes} for process {process}, {count} for process 0"
            peers[-1 if problem else process] = peer
            if problem or len(peers) == count - 1:
                break
    if not problem and (missing := sorted({*range(1, count)} - peers.keys())):
        kind, more = TemporaryError, " and more" * (len(missing) > MAX_MISSING_SHOWN)
        problem = (
            f"timed out after {timeout_s:g} s: processes {missing[:MAX_MISSING_SHOWN]}{more} of "
            f"{count} did not connect to {spec.coordinator_address}; check their logs"
        )
    for peer in peers.values():
        with contextlib.suppress(OSError):  # a process that has died is noticed later
            send_line(peer, problem=problem, may_pass=kind is TemporaryError)
        if problem:
            peer.close()
    if problem:
        raise kind(problem)
    return peers


def _read_introduction(caller: socket.socket) -> tuple[int, int, socket.socket]:
    caller.settimeout(GREETING_TIMEOUT_S)
    message = _receive_line(caller)
    process, count = message["process"], message["processes"]
    if not 0 < process < count:
        raise ValueError(f"process {process} of {count}")
    return process, count, caller


def _connect_to_first(spec: ProcessSpec, timeout_s: float) -> socket.socket:
    end = time.monotonic() + timeout_s
    while True:
        try:
            first, reply = _introduce(spec, timeout_s)
            break
        except (OSError, ValueError) as error:
            if time.monotonic() >= end:
                raise TemporaryError(
                    f"timed out after {timeout_s:g} s: process 0 did not answer at "
                    f"{spec.coordinator_address} ({error}); check its log"
                ) from error
        time.sleep(RETRY_INTERVAL_S)
    if problem := reply["problem"]:
        first.close()
        raise (TemporaryError if reply["may_pass"] else InputError)(f"process 0: {problem}")
    return first


def _introduce(spec: ProcessSpec, timeout_s: float) -> tuple[socket.socket, dict[str, Any]]:
    """The socket to process 0, and its reply after all have connected: a problem, if any."""
    with contextlib.ExitStack() as stack:
        address = _host_port(spec.coordinator_address)
        first = stack.enter_context(socket.create_connection(address, GREETING_TIMEOUT_S))
        send_line(first, process=spec.process_id, processes=spec.num_processes)
        first.settimeout(timeout_s + GREETING_TIMEOUT_S)  # process 0 waits for the others first
        reply = _receive_line(first)
        stack.pop_all()
    return first, reply


# ---- sockets ------------------------------------------------------------------------------


def accept_all(
    listener: socket.socket, greet: Callable[[socket.socket], T], timeout_s: float = math.inf
) -> Iterator[T]:
    """Yields `greet(socket)` for each caller until the timeout; logs callers that `greet` rejects.

    Each caller has its own thread, so a silent caller does not delay the others. Callers that were
    not yielded when the iteration ends are disconnected.
    """
    greeted: queue.SimpleQueue[tuple[socket.socket, T]] = queue.SimpleQueue()
    waiting: set[socket.socket] = set()

    def greet_one(caller: socket.socket) -> None:
        try:
            greeted.put((caller, greet(caller)))
        except Exception as error:  # a program that is not ours may send anything
            caller.close()
            logging.getLogger(__name__).warning(REJECTED, error)

    listener.settimeout(POLL_INTERVAL_S)
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                caller, _ = listener.accept()
                waiting.add(caller)
                threading.Thread(target=greet_one, args=(caller,), daemon=True).start()
            while not greeted.empty():
                caller, found = greeted.get()
                waiting.discard(caller)
                yield found
    finally:
        for caller in waiting:
            caller.close()


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket; `::` stands for all interfaces of both protocols. Raises OSError."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::"
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)


def _coordinator_listener(spec: ProcessSpec) -> socket.socket:
    """Listens at the port and interfaces that jax's coordination service takes afterwards."""
    port = spec.coordinator_address.rpartition(":")[2]
    host, number = _host_port(os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{port}"))
    try:
        return listen(host, number, spec.num_processes)
    except OSError as error:
        kind = TemporaryError if error.errno == errno.EADDRINUSE else InputError
        raise kind(
            f"cannot open port {number} for the other processes: {error.strerror}; end the "
            "program that uses it, or choose another port"
        ) from error


def send_line(peer: socket.socket, **message: Any) -> None:
    """Sends a message as one line of JSON. Raises OSError."""
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive_line(peer: socket.socket) -> Any:
    """The next message. Raises OSError, and ValueError for anything but JSON."""
    with peer.makefile("rb", buffering=0) as file:  # later lines stay in the socket
        line = file.readline(MAX_LINE_BYTES)
    if not line:
        raise ConnectionError("the connection was closed")
    return json.loads(line)


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
