"""Waiting for other threads and processes, and the ports at which they meet."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

PATIENCE = 30.0  # seconds for what comes at once, unless it never does


def wait_for(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Until something holds; fails the test if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def free_port() -> int:
    """A port at which nobody listens yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def loopback() -> str:
    """This machine in HOST:PORT, by the newer protocol where it has that."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return "127.0.0.1"
    return "[::1]"
