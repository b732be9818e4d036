"""Network emulation by a TCP proxy that delays, paces, hangs and refuses; no privileges needed.

Profile    the delay, jitter, loss and rate of a named network
Lane       delivery times of the segments of one direction
Proxy      a link with a profile, and its faults
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Self

Direction = Literal["up", "down"]  # from client to server, and back
SEGMENT = 1448  # bytes of a TCP packet on Ethernet, the unit of loss and delay
QUEUED = 1024  # most segments in flight per connection and direction; then the sender waits
Segments = asyncio.Queue[tuple[float, bytes | None]]  # b"" is the end, None a reset


@dataclass(frozen=True)
class Profile:
    """A network with the same properties in both directions.

    Delay and jitter apply per direction, as in `tc netem`: a segment's delay has a normal
    distribution, clipped at 0, with the jitter as its standard deviation. `loss` is the probability
    that a segment is lost.
    """

    name: str
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    rate_mbit: float | None = None  # None: unlimited


# The paper's 4G, 5G and wired networks, and a bad network. For the wired network the paper gives a
# ping, which is a round trip, so the delay is half the ping. For the others the paper gives a mean
# and a deviation, taken here as those of one direction: 4G then has a typical ping of 42 ms.
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("loopback"),
        Profile("wired", 4.5, 0.0, 0.0, 50.0),
        Profile("5g", 10.0, 10.0, 0.001, 100.0),  # the paper gives no rate
        Profile("4g", 21.0, 19.0, 0.001, 20.0),
        Profile("far", 100.0, 0.0, 0.01, 20.0),
    )
}


class Lane:
    """One direction of a link; its segments share one queue and keep their order.

    TCP hides losses from a proxy, so a lost segment, and all segments after it, are held for two
    round trips, after which TCP would retransmit the segment (tail loss probe, RFC 8985).
    """

    def __init__(self, profile: Profile, seed: int, direction: Direction) -> None:
        self._profile = profile
        self._random = random.Random(f"{seed} {direction}")
        self._free_at = self._last_due = 0.0  # seconds, on the caller's clock

    def due(self, now: float, size: int) -> float:
        """The delivery time of a segment of `size` bytes that enters at time `now`.

        Both times are seconds on the caller's clock.
        """
        profile = self._profile
        lost = self._random.random() < profile.loss
        delay = max(0.0, self._random.gauss(profile.delay_ms, profile.jitter_ms))
        delay += 4 * profile.delay_ms * lost  # two round trips
        sending = 0.0 if profile.rate_mbit is None else size * 8e-6 / profile.rate_mbit
        self._free_at = max(self._free_at, now) + sending
        self._last_due = max(self._last_due, self._free_at + delay / 1e3)
        return self._last_due


class Proxy:
    """Connects clients of (host, port) to a target over an emulated link that can fail.

    All connections share the link. Start a proxy with `async with` or `in_thread`. Methods that
    start or end a fault may be called from any thread, and take effect before they return.
    """

    def __init__(
        self, host: str, port: int, profile: Profile = PROFILES["loopback"], seed: int = 0
    ) -> None:
        """`host` and `port` are the target's address."""
        self.host, self.port = "127.0.0.1", 0  # the port is set when the proxy starts
        self.carried: dict[Direction, int] = {"up": 0, "down": 0}  # bytes delivered
        self._target = host, port
        self._lanes = {way: Lane(profile, seed, way) for way in self.carried}
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def __aenter__(self) -> Self:
        self._thread, self._loop = threading.get_ident(), asyncio.get_running_loop()
        self._whole = asyncio.Event()  # not set while the link is cut
        self._heal()
        return self

    async def __aexit__(self, *exception: object) -> None:
        connections = set(self._connections)
        self._refuse()
        await asyncio.gather(*connections, return_exceptions=True)

    def cut(self) -> None:
        """Stops all traffic silently: old and new connections hang."""
        self._in_loop(self._whole.clear)

    def refuse(self) -> None:
        """Closes all connections and refuses new ones, like a machine without a server."""
        self._in_loop(self._refuse)

    def heal(self) -> None:
        """Ends all faults: delivers the data held by a cut, and accepts new connections."""
        self._in_loop(self._heal)

    def _in_loop(self, act: Callable[[], None]) -> None:
        """Calls `act` in the loop's thread and waits until it returns."""
        if threading.get_ident() == self._thread:
            return act()

        async def acting() -> None:
            act()

        asyncio.run_coroutine_threadsafe(acting(), self._loop).result()

    def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            connection.cancel()

    def _heal(self) -> None:
        self._whole.set()
        if self._listener is None:
            self._listener = socket.create_server((self.host, self.port))
            self._listener.setblocking(False)
            self.port = self._listener.getsockname()[1]
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client closed the connection
            return
        connection = self._loop.create_task(self._connect(client))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)
        connection.add_done_callback(lambda _: client.close())  # even if the task never ran

    async def _connect(self, client: socket.socket) -> None:
        """Forwards one connection until both directions end or one is reset."""
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
                    # With a linger time of 0, close() sends a reset.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async def _read(self, way: Direction, source: socket.socket, segments: Segments) -> None:
        data: bytes | None = b"more"
        while data:
            try:
                data = await self._loop.sock_recv(source, SEGMENT)
            except ConnectionResetError:
                data = None  # a reset is forwarded like data, not during a cut
            due = self._lanes[way].due(self._loop.time(), len(data or b""))
            await segments.put((due, data))

    async def _write(self, way: Direction, sink: socket.socket, segments: Segments) -> None:
        while True:
            due, data = await segments.get()
            await asyncio.sleep(due - self._loop.time())
            await self._whole.wait()
            if data is None:
                raise ConnectionResetError
            if not data:
                return sink.shutdown(socket.SHUT_WR)
            await self.send(way, sink, data)

    async def send(self, way: Direction, sink: socket.socket, data: bytes) -> None:
        """Sends a due segment to the receiver; a ConnectionResetError resets both ends."""
        await self._loop.sock_sendall(sink, data)
        self.carried[way] += len(data)


@contextlib.contextmanager
def in_thread(proxy: Proxy) -> Iterator[Proxy]:
    """Runs a proxy in its own thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="proxy", daemon=True)
    thread.start()
    call = lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    try:
        call(proxy.__aenter__())
        try:
            yield proxy
        finally:
            call(proxy.__aexit__())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
