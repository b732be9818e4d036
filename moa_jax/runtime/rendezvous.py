"""The processes of a run find each other, or say who is missing.

Where another one does not come, jax's own runtime aborts a process. So before it starts, process 0
waits at its port: each of the others says who it is, and hears whether all have come.

    process 1   who I am -->   all have come <--   ...   farewell <-> farewell
    process 2   who I am -->   all have come <--   ...   the line ends: somebody has died

The lines between them stay open, for the system closes those of a process that dies. So its death
is heard of at once, and before jax hears of it, which would abort all others if it is process 0's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from typing import Any, NamedTuple, TypeVar

from moa_jax.errors import InputError

T = TypeVar("T")

SECONDS_TO_GREET = 5.0  # in which who calls says who it is
SECONDS_BETWEEN_CALLS = 0.5
SECONDS_BETWEEN_LOOKS = 0.05
LONGEST_LINE = 4096  # bytes
SHOWN = 8  # processes that are missing
FAREWELL = b"."


class Meeting(NamedTuple):
    """Where the processes of a run meet, how many they are, and which of them this is."""

    address: str  # HOST:PORT of process 0
    count: int
    index: int


class Lines:
    """The connections of this process: process 0 has one to each other, and the others to it."""

    def __init__(self, lines: Mapping[int, socket.socket]) -> None:
        self._lines, self._parted = lines, False
        for line in lines.values():
            line.settimeout(None)

    def __len__(self) -> int:
        return len(self._lines)

    def watch(self, lost: Callable[[int], object]) -> None:
        """Calls `lost`, in a thread of its own, with each process that ends without a farewell."""
        for each in self._lines.items():
            threading.Thread(target=self._watch, args=(*each, lost), daemon=True).start()

    def part(self) -> None:
        """Says farewell: from now on it is no matter who ends first."""
        self._parted = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.sendall(FAREWELL)

    def close(self) -> None:
        """Closes the lines, as the end of the process does."""
        for line in self._lines.values():
            line.close()

    def _watch(self, process: int, line: socket.socket, lost: Callable[[int], object]) -> None:
        said = b""
        with contextlib.suppress(OSError):
            said = line.recv(1)
        if said != FAREWELL and not self._parted:
            lost(process)


def meet(place: Meeting, seconds: float) -> Lines:
    """Waits until every process is there; returns the lines between them.

    Raises InputError, in all that have come, where one does not come within `seconds`, where two
    say that they are the same one, and where they do not agree on how many they are.
    """
    if place.count == 1:
        return Lines({})
    return (_call if place.index else _wait)(place, seconds)


def greeted(
    listener: socket.socket, greet: Callable[[socket.socket], T], seconds: float = math.inf
) -> Iterator[T]:
    """What `greet` returns for each caller, for so long; who does not belong here is logged.

    Each is greeted in a thread of its own: one that says nothing keeps no other waiting.
    """
    found: queue.SimpleQueue[tuple[socket.socket, T]] = queue.SimpleQueue()
    over = threading.Event()

    def one(caller: socket.socket) -> None:
        try:
            found.put((caller, greet(caller)))
        except (AuthenticationError, OSError, EOFError, ValueError) as error:
            caller.close()
            logging.getLogger(__name__).warning("a stranger called: %s", error)
        if over.is_set():
            hang_up()

    def hang_up() -> None:
        """Closes the lines of those whom nobody will hear of."""
        with contextlib.suppress(queue.Empty):
            while True:
                found.get_nowait()[0].close()

    listener.settimeout(SECONDS_BETWEEN_LOOKS)
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                caller, _ = listener.accept()
                threading.Thread(target=one, args=(caller,), daemon=True).start()
            while not found.empty():
                yield found.get()[1]
    finally:
        over.set()
        hang_up()


# ---- process 0 ----------------------------------------------------------------------------


class Caller(NamedTuple):
    """Another process, as it says."""

    index: int
    count: int
    line: socket.socket  # that it hears


def _wait(place: Meeting, seconds: float) -> Lines:
    with contextlib.ExitStack() as lines:
        trouble, callers = "", list[Caller]()
        with _listener(place) as listener:
            for caller in greeted(listener, _introduced, seconds):
                lines.enter_context(caller.line)
                callers = _those_there(callers)
                trouble = _trouble(place, callers, caller)
                callers.append(caller)
                if trouble or len(callers) == place.count - 1:
                    break
        callers = _those_there(callers)
        trouble = trouble or _absence(place, callers, seconds)
        for each in callers:
            with contextlib.suppress(OSError):
                _say(each.line, trouble=trouble)
        if trouble:
            raise InputError(trouble)
        lines.pop_all()
    return Lines({each.index: each.line for each in callers})


def _introduced(caller: socket.socket) -> Caller:
    caller.settimeout(SECONDS_TO_GREET)
    index, count = _heard(caller, "process", "processes")
    if not (isinstance(index, int) and isinstance(count, int) and 0 < index < count):
        raise ValueError(f"it says that it is process {index} of {count}")
    return Caller(index, count, caller)


def _trouble(place: Meeting, callers: list[Caller], caller: Caller) -> str:
    """Why all have to end, now that this one has come; nothing if they need not."""
    if caller.count != place.count:
        return (
            f"process {caller.index} says that there are {caller.count} processes, and process 0 "
            f"that there are {place.count}: start all processes alike"
        )
    if caller.index in [each.index for each in callers]:
        return f"two processes say that they are process {caller.index}: number them from 0"
    return ""


def _absence(place: Meeting, callers: list[Caller], seconds: float) -> str:
    """Who has not come; nothing if all have."""
    missing = sorted({*range(1, place.count)} - {each.index for each in callers})
    if not missing:
        return ""
    named = ", ".join(map(str, missing[:SHOWN])) + " and more" * (len(missing) > SHOWN)
    return (
        f"of {place.count} processes these did not come to {place.address} within {seconds:g} s: "
        f"{named}: see that they run, and what they say"
    )


def _those_there(callers: list[Caller]) -> list[Caller]:
    """Those whose connections are open still; the others' are closed."""
    there = [each for each in callers if _is_there(each)]
    for each in callers:
        if each not in there:
            each.line.close()
    return there


def _is_there(caller: Caller) -> bool:
    """Whether its connection is open still: it says nothing more."""
    caller.line.setblocking(False)
    try:
        return caller.line.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        caller.line.settimeout(SECONDS_TO_GREET)


def _listener(place: Meeting) -> socket.socket:
    """At the port, and the interfaces, at which jax's service listens afterwards."""
    host, port = _host_port(
        os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", "[::]:" + place.address.rpartition(":")[2])
    )
    try:
        return listener_at(host, port, place.count)
    except OSError as error:
        raise InputError(
            f"port {port} cannot be opened for the other processes ({error.strerror}): end what "
            "uses it, or choose another port"
        ) from error


def listener_at(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there; `::` is all interfaces of both protocols. Raises OSError."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, backlog=backlog, dualstack_ipv6=host == "::"
    )


# ---- the others ---------------------------------------------------------------------------


def _call(place: Meeting, seconds: float) -> Lines:
    until = time.monotonic() + seconds
    while (first := _answered(place, seconds, until)) is None:
        time.sleep(SECONDS_BETWEEN_CALLS)
    return Lines({0: first})


def _answered(place: Meeting, seconds: float, until: float) -> socket.socket | None:
    """The line to process 0, once that has said that all have come; None if it is not there yet."""
    try:
        with contextlib.ExitStack() as lines:
            first = socket.create_connection(_host_port(place.address), SECONDS_TO_GREET)
            lines.enter_context(first)
            _say(first, process=place.index, processes=place.count)
            first.settimeout(seconds + SECONDS_TO_GREET)  # it has waited for a while already
            (trouble,) = _heard(first, "trouble")
            if not trouble:
                lines.pop_all()
                return first
    except (OSError, ValueError) as error:
        if time.monotonic() < until:
            return None
        raise InputError(
            f"process 0 was not found at {place.address} within {seconds:g} s ({error}): see that "
            "it runs there, and what it says"
        ) from error
    raise InputError(f"process 0: {trouble}")


# ---- lines --------------------------------------------------------------------------------


def _say(line: socket.socket, **facts: Any) -> None:
    line.sendall(json.dumps(facts).encode() + b"\n")


def _heard(line: socket.socket, *names: str) -> list[Any]:
    """Facts that the other end tells in a line. Raises ValueError for anything else."""
    with line.makefile("rb", buffering=0) as file:  # what follows is left to be heard
        told = file.readline(LONGEST_LINE)
    if not told:
        raise ConnectionError("the connection was closed")
    try:
        facts = json.loads(told)
        return [facts[name] for name in names]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("another program is there") from error


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
