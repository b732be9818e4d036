"""Connects the processes of a run before jax.distributed starts, which aborts if one is missing.

    process 1   {"process": 1, "processes": 3} --->   process 0   ---> {"problem": ""}
    process 2   {"process": 2, "processes": 3} --->               ---> {"problem": ""}

The sockets stay open: the kernel closes those of a process that dies, so its death is noticed at
once and not after a heartbeat timeout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from typing import Any, NamedTuple, TypeVar

from moa_jax.errors import InputError

T = TypeVar("T")

GREETING_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 0.5
POLL_INTERVAL_S = 0.05
MAX_LINE_BYTES = 4096
MAX_MISSING_SHOWN = 8


class ProcessSpec(NamedTuple):
    """The first three arguments of `jax.distributed.initialize`."""

    coordinator_address: str  # HOST:PORT of process 0
    num_processes: int
    process_id: int


SINGLE = ProcessSpec("", 1, 0)


def connect(spec: ProcessSpec, timeout_s: float) -> dict[int, socket.socket]:
    """Sockets by process id: process 0 gets one to each other process, the others one to process 0.

    Raises InputError, in every process that came, if one is missing after `timeout_s`, if two have
    the same id, or if they disagree on the number of processes.
    """
    if spec.num_processes == 1:
        return {}
    return {0: _connect_to_first(spec, timeout_s)} if spec.process_id else _accept(spec, timeout_s)


def _accept(spec: ProcessSpec, timeout_s: float) -> dict[int, socket.socket]:
    peers: list[tuple[int, socket.socket]] = []
    problem = ""
    with _coordinator_listener(spec) as listener:
        for process, count, peer in accept_all(listener, _read_introduction, timeout_s):
            peers = _still_open(peers)
            if count != spec.num_processes:
                problem = (
                    f"process {process} was started with --processes {count} and process 0 with "
                    f"--processes {spec.num_processes}; start all processes with the same number"
                )
            elif process in dict(peers):
                problem = f"two processes have the id {process}; number them from 0"
            peers.append((process, peer))
            if problem or len(peers) == spec.num_processes - 1:
                break
    peers = _still_open(peers)
    missing = sorted({*range(1, spec.num_processes)} - dict(peers).keys())
    if missing and not problem:
        more = " and more" * (len(missing) > MAX_MISSING_SHOWN)
        problem = (
            f"timed out after {timeout_s:g} s: processes {missing[:MAX_MISSING_SHOWN]}{more} of "
            f"{spec.num_processes} did not connect to {spec.coordinator_address}; check their logs"
        )
    for _, peer in peers:
        with contextlib.suppress(OSError):
            send_line(peer, problem=problem)
    if problem:
        for _, peer in peers:
            peer.close()
        raise InputError(problem)
    return dict(peers)


def _still_open(peers: list[tuple[int, socket.socket]]) -> list[tuple[int, socket.socket]]:
    """Without the processes that have left, whose sockets are readable at this point."""
    left = select.select([peer for _, peer in peers], [], [], 0)[0]
    for peer in left:
        peer.close()
    return [each for each in peers if each[1] not in left]


def _read_introduction(caller: socket.socket) -> tuple[int, int, socket.socket]:
    caller.settimeout(GREETING_TIMEOUT_S)
    process, count = _receive_line(caller, "process", "processes")
    if not (isinstance(process, int) and isinstance(count, int) and 0 < process < count):
        raise ValueError(f"process {process} of {count}")
    return process, count, caller


def _connect_to_first(spec: ProcessSpec, timeout_s: float) -> socket.socket:
    end = time.monotonic() + timeout_s
    while True:
        try:
            first, problem = _introduce(spec, timeout_s)
            break
        except (OSError, ValueError) as error:
            if time.monotonic() >= end:
                raise InputError(
                    f"timed out after {timeout_s:g} s: process 0 did not answer at "
                    f"{spec.coordinator_address} ({error}); check its log"
                ) from error
        time.sleep(RETRY_INTERVAL_S)
    if problem:
        first.close()
        raise InputError(f"process 0: {problem}")
    return first


def _introduce(spec: ProcessSpec, timeout_s: float) -> tuple[socket.socket, str]:
    """The socket to process 0 and the problem it reports once all have come, if any."""
    with contextlib.ExitStack() as stack:
        address = _host_port(spec.coordinator_address)
        first = stack.enter_context(socket.create_connection(address, GREETING_TIMEOUT_S))
        send_line(first, process=spec.process_id, processes=spec.num_processes)
        first.settimeout(timeout_s + GREETING_TIMEOUT_S)  # process 0 waits for the others first
        (problem,) = _receive_line(first, "problem")
        stack.pop_all()
    return first, problem


# ---- sockets ------------------------------------------------------------------------------


def accept_all(
    listener: socket.socket, greet: Callable[[socket.socket], T], timeout_s: float = math.inf
) -> Iterator[T]:
    """Yields `greet(socket)` for each caller until the timeout; logs callers that `greet` rejects.

    Each caller has a thread of its own, so a silent one does not delay the others. Once the
    iterator is closed, sockets that were not yielded are closed.
    """
    greeted: queue.SimpleQueue[tuple[socket.socket, T]] = queue.SimpleQueue()
    closed = threading.Event()

    def greet_one(caller: socket.socket) -> None:
        try:
            greeted.put((caller, greet(caller)))
        except (AuthenticationError, OSError, EOFError, ValueError) as error:
            caller.close()
            logging.getLogger(__name__).warning(
                "rejected a connection that did not identify itself: %s", error
            )
        if closed.is_set():
            hang_up()

    def hang_up() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                greeted.get_nowait()[0].close()

    listener.settimeout(POLL_INTERVAL_S)
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                caller, _ = listener.accept()
                threading.Thread(target=greet_one, args=(caller,), daemon=True).start()
            while not greeted.empty():
                yield greeted.get()[1]
    finally:
        closed.set()
        hang_up()


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
        raise InputError(
            f"cannot open port {number} for the other processes: {error.strerror}; end the "
            "program that uses it, or choose another port"
        ) from error


def send_line(peer: socket.socket, **message: Any) -> None:
    """Sends a message as one line of JSON. Raises OSError."""
    peer.sendall(json.dumps(message).encode() + b"\n")


def _receive_line(peer: socket.socket, *keys: str) -> list[Any]:
    """Values of a message by key. Raises OSError, and ValueError for anything but a message."""
    with peer.makefile("rb", buffering=0) as file:  # later lines stay in the socket
        line = file.readline(MAX_LINE_BYTES)
    if not line:
        raise ConnectionError("the connection was closed")
    try:
        message = json.loads(line)
        return [message[key] for key in keys]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("not a process of this run") from error


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
