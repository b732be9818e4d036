"""A proxy that also resets connections, at any byte."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from typing import Any

from infer.bench.network import Direction, Proxy


class ResettingProxy(Proxy):
    """`Proxy` with one more fault."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._until_reset: dict[Direction, int] = {}

    def reset_after(self, n_bytes: int, direction: Direction) -> None:
        """Resets one connection, at both ends, after `n_bytes` in one direction; happens once.

        Bytes of all connections count, and the connection that carries the last byte is reset.
        With 0 the connection of the next byte is reset, and that byte does not pass.
        """
        self._in_loop(lambda: self._until_reset.update({direction: n_bytes}))

    def _heal(self) -> None:
        self._until_reset.clear()
        super()._heal()

    async def send(self, way: Direction, sink: socket.socket, data: bytes) -> None:
        left = self._until_reset.pop(way, None)
        if left is not None and left > len(data):
            self._until_reset[way] = left - len(data)
            left = None
        await super().send(way, sink, data[:left])
        if left is not None:
            await _taken(sink)
            raise ConnectionResetError


async def _taken(sink: socket.socket) -> None:
    """Waits until the peer's kernel has all data, because a reset discards the rest."""
    queued = bytearray(4)
    while True:
        fcntl.ioctl(sink, termios.TIOCOUTQ, queued)
        if not int.from_bytes(queued, sys.byteorder):
            return
        await asyncio.sleep(0.001)
