"""Helpers that wait for other threads and processes, and the ports at which these connect."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

PATIENCE = 30.0  # seconds for an event that is fast unless it never happens


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Waits until a condition holds; fails the test if it does not hold in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def free_port() -> int:
    """Returns a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def loopback() -> str:
    """Returns the loopback host for HOST:PORT, by IPv6 if the machine has it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1"
    return "[::1]"
