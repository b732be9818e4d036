"""One connection of a client: Hello at its start, messages with a deadline after it.

What goes wrong is one of two things. `Lost`: the network or the server failed, and trying again may
help. `Denied`: the server answered and will not have this client, and trying again will not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from typing import Any

import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.uri import parse_uri

from moa_jax.errors import InputError, first_line
from moa_jax.split import wire
from moa_jax.split.pairing import Pairing
from moa_jax.version import __version__

LARGEST_CHUNK = 4096  # tokens whose rows one message may bring
MOST_BYTES = 256 << 20  # of one message, which holds the rows of a chunk
UNAUTHORIZED, NO_SUCH_PATH = 401, (403, 404)
LAST_WORDS = 0.2  # seconds to hear why a connection was closed


class Lost(Exception):
    """The connection is gone, or never came about."""


class Busy(Lost):
    """The server is there and has no room, or is about to go."""


class Denied(InputError):
    """The server refuses this client, for a reason that will stay."""

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        super().__init__(text)


class Gone(Exception):
    """The server has no such session any more, or not as this client knows it."""


@dataclasses.dataclass
class Traffic:
    """Bytes of all of a client's connections."""

    bytes_up: int = 0
    bytes_down: int = 0
    round_trip_s: float | None = None  # Hello to Welcome, for which a server computes nothing


@dataclasses.dataclass(frozen=True)
class Server:
    """Where a server is, and how a client speaks to it."""

    url: str
    pairing: Pairing
    token: str | None = None
    tls: ssl.SSLContext | None = None
    codec: wire.Codec = "bfloat16"
    compress: bool = False
    timeout: float = 5.0  # seconds in which the other side shows that it lives


class Link:
    """A connection that has been welcomed."""

    def __init__(
        self, socket: ClientConnection, server: Server, limits: wire.Limits, traffic: Traffic
    ) -> None:
        self._socket, self._server, self._limits = socket, server, limits
        self._traffic = traffic
        self.welcome: wire.Welcome

    @classmethod
    async def open(cls, server: Server, vocab_size: int, traffic: Traffic) -> Link:
        """Connects and says Hello; raises Lost, Gone or Denied."""
        limits = wire.Limits(
            max_tokens=wire.LARGEST,
            max_nodes=(1 << 16) - 1,
            max_rows=LARGEST_CHUNK,
            max_bytes=MOST_BYTES,
            vocab_size=vocab_size,
        )
        link = cls(await _socket(server), server, limits, traffic)
        try:
            hello = wire.Hello(
                f"moa-jax {__version__}", server.pairing, server.codec, server.compress
            )
            begin = time.perf_counter()
            await link.send(hello)
            link.welcome = await link.receive(wire.Welcome)
            traffic.round_trip_s = time.perf_counter() - begin
        except BaseException:  # who waited for it may have given up
            link.abort()
            raise
        return link

    async def send(self, message: wire.Up) -> None:
        """Sends one message; raises Lost where the other side does not take it in time."""
        data = wire.encode(message)
        try:
            async with asyncio.timeout(self._server.timeout):
                await self._socket.send(data)
        except (websockets.ConnectionClosed, OSError, TimeoutError) as error:
            raise await self._why(error) from error
        self._traffic.bytes_up += len(data)

    async def receive(self, *kinds: type, patience: float = 0.0) -> Any:
        """The next message, which must be of these kinds.

        Raises Lost where another one comes, or none: in the server's `timeout`, or in `patience`
        if that is longer and pongs come meanwhile. Raises Busy, Gone and Denied for Faults.
        """
        try:
            async with asyncio.timeout(max(patience, self._server.timeout)):
                data = await self._next()
        except (websockets.ConnectionClosed, OSError, TimeoutError) as error:
            raise Lost(_as_line(error)) from error
        self._traffic.bytes_down += len(data)
        try:
            message = wire.decode_down(data, self._limits)
        except wire.WrongVersion as error:
            if self._traffic.round_trip_s is None:  # nobody has welcomed this client yet
                raise Denied("version", str(error)) from error
            raise Lost(f"the server sent a damaged message: {error}") from error
        except wire.BadMessage as error:
            raise Lost(f"the server sent {error}") from error
        if isinstance(message, wire.Fault):
            raise _fault(message)
        if not isinstance(message, kinds):
            raise Lost(f"the server sent {type(message).__name__} out of turn")
        return message

    async def _next(self) -> bytes | str:
        """The next message; TimeoutError once neither it nor a pong came in time."""
        receiving = asyncio.create_task(self._socket.recv())
        pong, time_of_each = None, self._server.timeout / 2
        try:
            while True:
                await asyncio.wait([receiving], timeout=time_of_each)
                if receiving.done():
                    return receiving.result()
                if pong is not None and not pong.done():
                    raise TimeoutError
                async with asyncio.timeout(time_of_each):
                    pong = await self._socket.ping()
        finally:
            await ended(receiving)

    async def _why(self, error: Exception) -> Exception:
        """What the server said last before it closed the connection, else that it is closed."""
        try:
            async with asyncio.timeout(LAST_WORDS):
                while True:
                    await self.receive(object)
        except (Denied, Gone, Busy) as said:
            return said
        except (Lost, TimeoutError):
            return Lost(_as_line(error))

    def abort(self) -> None:
        """Ends the connection without a word to the other side, which may not be there."""
        self._socket.transport.abort()

    async def close(self) -> None:
        """Ends the connection in order."""
        await self._socket.close()


async def ended(task: asyncio.Task[Any] | None) -> None:
    """Ends a task, whatever it was doing or has found."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen, so that nobody complains of it


def check_url(url: str) -> None:
    """Raise InputError for what is no address of a server."""
    try:
        parsed = parse_uri(url)
        parsed.host.encode("idna")  # as looking it up will
    except (websockets.InvalidURI, ValueError) as error:
        raise InputError(f"--connect {url}: give ws://HOST:PORT/v1/split, or wss://") from error


async def _socket(server: Server) -> ClientConnection:
    headers = {"Authorization": f"Bearer {server.token}"} if server.token else {}
    try:
        return await connect(
            server.url,
            additional_headers=headers,
            ssl=server.tls,
            max_size=MOST_BYTES,
            open_timeout=server.timeout,
            close_timeout=1.0,
            ping_interval=None,  # `Link.receive` looks whether the other side lives
            compression=None,  # rows are compressed, if they are, by their own codec
            proxy=None,
        )
    except websockets.InvalidStatus as error:
        raise _refusal(server, error.response.status_code) from error
    except ssl.SSLCertVerificationError as error:
        raise Denied(
            "certificate",
            f"{server.url}: its certificate is not trusted ({error.verify_message}): see --tls-ca",
        ) from error
    # A ValueError is a redirection to what is no address.
    except (websockets.WebSocketException, OSError, TimeoutError, ValueError) as error:
        raise Lost(_as_line(error)) from error


def _refusal(server: Server, status: int) -> Exception:
    """What was answered instead of an upgrade."""
    if status == UNAUTHORIZED:
        return Denied("token", "the server does not know this token: see --token-file")
    if status in NO_SUCH_PATH:
        return Denied("path", f"{server.url}: nothing answers there: the path should be /v1/split")
    return Busy(f"the server answered with status {status}: try again later")


def _fault(message: wire.Fault) -> Exception:
    if message.code in ("gone", "state"):
        return Gone(message.text)
    if message.code in ("busy", "draining"):
        return Busy(message.text)
    return Denied(message.code, f"the server refuses: {message.text}")


def _as_line(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
