"""A TCP proxy that is late, falls silent, refuses and resets; it needs no rights."""

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

SEGMENT = 1448  # bytes of a TCP packet on Ethernet: what is lost, delayed and paced as one
QUEUED = 1024  # segments under way on one connection, one way; then its sender has to wait

Segments = asyncio.Queue[tuple[float, bytes | None]]  # b"" is the end, None a reset


class Proxy:
    """Connections to (host, port) go on to a target, by a link that can be made to fail.

    A TCP proxy cannot lose a packet: what would be lost is held for two round trips, after which
    TCP would send it again (RFC 8985's tail probe), and what follows it waits. All connections
    share the link. Start it by `async with`, or by `in_thread`; every method that makes or mends
    a fault may be called from any thread, and has worked when it returns.
    """

    def __init__(
        self,
        target_host: str,
        target_port: int,
        profile: Profile = PROFILES["loopback"],
        seed: int = 0,
    ) -> None:
        self.host, self.port = "127.0.0.1", 0  # the port is known once it has started
        self.carried: dict[Direction, int] = {way: 0 for way in DIRECTIONS}  # bytes handed on
        self.accepted = 0
        self._target = target_host, target_port
        self._held = 2 * profile.round_trip_ms / 1e3
        self._lanes = {way: Lane(profile, seed, way) for way in DIRECTIONS}
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
        """Carry nothing more, and say nothing of it: connections hang, new ones too."""
        self._now(self._whole.clear)

    def refuse(self) -> None:
        """Close all connections and refuse new ones, as a machine without the server does."""
        self._now(self._refuse)

    def reset_after(self, n_bytes: int, way: Direction) -> None:
        """Carry n more bytes one way, all connections counted, and reset the one of the last.

        Both its ends are reset. It happens once; with 0 it is the connection of the next byte,
        which does not pass.
        """
        self._now(lambda: self._until_reset.update({way: n_bytes}))

    def heal(self) -> None:
        """End all faults: what was held by a cut is carried, new connections are taken."""
        self._now(self._heal)

    def _now(self, act: Callable[[], None]) -> None:
        """Act in the loop's thread, and return when it is done."""
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
        except (BlockingIOError, ConnectionAbortedError):  # the client has thought better of it
            return
        self.accepted += 1
        connection = self._loop.create_task(self._connect(client))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        connection.add_done_callback(lambda _: client.close())  # also if it never began

    async def _connect(self, client: socket.socket) -> None:
        """One connection, from its acceptance until both ways have ended or one is reset."""
        with socket.socket() as server:
            try:
                for end in (client, server):
                    end.setblocking(False)
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._whole.wait()
                await self._loop.sock_connect(server, self._target)
                async with asyncio.TaskGroup() as tasks:
                    for way, source, sink in (("up", client, server), ("down", server, client)):
                        segments = Segments(QUEUED)
                        tasks.create_task(self._read(way, source, segments))
                        tasks.create_task(self._write(way, sink, segments))
            except* OSError:
                for end in (client, server):
                    # Linger for 0 seconds: closing sends a reset.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _read(self, way: Direction, source: socket.socket, segments: Segments) -> None:
        lane, data = self._lanes[way], b"more"
        while data:
            try:
                data = await self._loop.sock_recv(source, SEGMENT)
            except ConnectionResetError:
                data = None  # it travels as data does, and not while the link is cut
            held = self._held if lane.loses() else 0.0
            await segments.put((lane.due(self._loop.time(), len(data or b""), held), data))

    async def _write(self, way: Direction, sink: socket.socket, segments: Segments) -> None:
        while True:
            due, data = await segments.get()
            await asyncio.sleep(due - self._loop.time())
            await self._whole.wait()
            if data is None:
                raise ConnectionResetError
            if not data:
                return sink.shutdown(socket.SHUT_WR)
            part, is_last = self._before_reset(way, data)
            await self._loop.sock_sendall(sink, part)
            self.carried[way] += len(part)
            if is_last:
                await _taken(sink)
                raise ConnectionResetError

    def _before_reset(self, way: Direction, data: bytes) -> tuple[bytes, bool]:
        """What of the data may pass, and whether its connection is reset then."""
        if way not in self._until_reset:
            return data, False
        left = self._until_reset.pop(way)
        if left > len(data):
            self._until_reset[way] = left - len(data)
        return data[:left], left <= len(data)


async def _taken(sink: socket.socket) -> None:
    """Wait until the peer's kernel has everything, for a reset throws away what it has not."""
    queued = bytearray(4)
    while True:
        fcntl.ioctl(sink, termios.TIOCOUTQ, queued)
        if not int.from_bytes(queued, sys.byteorder):
            return
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def in_thread(proxy: Proxy) -> Iterator[Proxy]:
    """Run a proxy in a thread of its own."""
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
