"""A TCP proxy that delays, hangs, refuses and resets connections; it needs no rights."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Self

from infer.split.network.profiles import DIRECTIONS, PROFILES, Direction, Lane, Profile

SEGMENT = 1448  # bytes of a TCP packet on Ethernet, which is lost or delayed as one
QUEUED = 1024  # segments under way in one direction of a connection; beyond that its sender waits

Segments = asyncio.Queue[tuple[float, bytes | None]]  # b"" is the end, None a reset


class Proxy:
    """Connects clients of (host, port) to a target over an emulated link that can fail.

    A TCP proxy cannot lose a packet. Instead it holds a lost packet, and those after it, for two
    round trips, after which TCP would send it again (tail loss probe, RFC 8985). All connections
    share the link. Start it with `async with` or `in_thread`. Methods that make or end a fault may
    be called from any thread, and take effect before they return.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        profile: Profile = PROFILES["loopback"],
        seed: int = 0,
    ) -> None:
        self.host, self.port = "127.0.0.1", 0  # the port is known once it has started
        self.carried: dict[Direction, int] = dict.fromkeys(DIRECTIONS, 0)  # bytes delivered
        self.accepted = 0
        self._target = target_host, target_port
        self._held = 2 * profile.round_trip_ms / 1e3
        self._lanes = {direction: Lane(profile, seed, direction) for direction in DIRECTIONS}
        self._until_reset: dict[Direction, int] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        self._thread, self._loop = threading.get_ident(), asyncio.get_running_loop()
        self._whole = asyncio.Event()  # not set while the link is cut
        self._whole.set()
        self._listen()
        return self

    async def __aexit__(self, *exception: object) -> None:
        connections = set(self._connections)
        self._refuse()
        await asyncio.gather(*connections, return_exceptions=True)

    def cut(self) -> None:
        """Stops all traffic silently: connections hang, new ones too."""
        self._now(self._whole.clear)

    def refuse(self) -> None:
        """Closes all connections and refuses new ones, like a machine without a server."""
        self._now(self._refuse)

    def reset_after(self, n_bytes: int, direction: Direction) -> None:
        """Resets one connection, at both ends, after so many bytes in one direction.

        Bytes of all connections count, and the one that carries the last byte is reset. With 0 it
        is the connection of the next byte, which does not pass. This happens once.
        """
        self._now(lambda: self._until_reset.update({direction: n_bytes}))

    def heal(self) -> None:
        """Ends all faults: delivers what a cut held back, and accepts new connections."""
        self._now(self._heal)

    def _now(self, act: Callable[[], None]) -> None:
        """Calls `act` in the loop's thread, and returns when it has ended."""
        if threading.get_ident() == self._thread:
            return act()

        async def acting() -> None:
            act()

        asyncio.run_coroutine_threadsafe(acting(), self._loop).result()

    def _listen(self) -> None:
        self._listener = socket.create_server((self.host, self.port))
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            connection.cancel()

    def _heal(self) -> None:
        self._until_reset.clear()
        self._whole.set()
        if self._listener is None:
            self._listen()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has given up
            return
        self.accepted += 1
        connection = self._loop.create_task(self._connect(client))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        connection.add_done_callback(lambda _: client.close())  # even if the task never ran

    async def _connect(self, client: socket.socket) -> None:
        """Carries one connection until both directions have ended or one is reset."""
        with socket.socket() as server:
            try:
                for end in (client, server):
                    end.setblocking(False)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._whole.wait()
                await self._loop.sock_connect(server, self._target)
                async with asyncio.TaskGroup() as tasks:
                    for direction, source, sink in (
                        ("up", client, server),
                        ("down", server, client),
                    ):
                        segments = Segments(QUEUED)
                        tasks.create_task(self._read(direction, source, segments))
                        tasks.create_task(self._write(direction, sink, segments))
            except* OSError:
                for end in (client, server):
                    # With a linger time of 0, closing sends a reset.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _read(self, direction: Direction, source: socket.socket, segments: Segments) -> None:
        lane, data = self._lanes[direction], b"more"
        while data:
            try:
                data = await self._loop.sock_recv(source, SEGMENT)
            except ConnectionResetError:
                data = None  # a reset is carried like data, and not while the link is cut
            held = self._held if lane.loses() else 0.0
            await segments.put((lane.due(self._loop.time(), len(data or b""), held), data))

    async def _write(self, direction: Direction, sink: socket.socket, segments: Segments) -> None:
        while True:
            due, data = await segments.get()
            await asyncio.sleep(due - self._loop.time())
            await self._whole.wait()
            if data is None:
                raise ConnectionResetError
            if not data:
                return sink.shutdown(socket.SHUT_WR)
            part, is_last = self._before_reset(direction, data)
            await self._loop.sock_sendall(sink, part)
            self.carried[direction] += len(part)
            if is_last:
                await _taken(sink)
                raise ConnectionResetError

    def _before_reset(self, direction: Direction, data: bytes) -> tuple[bytes, bool]:
        """The data that may pass, and whether its connection is reset after it."""
        if direction not in self._until_reset:
            return data, False
        left = self._until_reset.pop(direction)
        if left > len(data):
            self._until_reset[direction] = left - len(data)
        return data[:left], left <= len(data)


async def _taken(sink: socket.socket) -> None:
    """Waits until the peer's kernel has all data, because a reset discards the rest."""
    queued = bytearray(4)
    while True:
        fcntl.ioctl(sink, termios.TIOCOUTQ, queued)
        if not int.from_bytes(queued, sys.byteorder):
            return
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def in_thread(proxy: Proxy) -> Iterator[Proxy]:
    """Runs a proxy in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result()
        try:
            yield proxy
        finally:
            asyncio.run_coroutine_threadsafe(proxy.__aexit__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
