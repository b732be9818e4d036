"""One connection of a client: a Hello handshake, then messages, each with a deadline.

Two kinds of errors: after `ConnectionLost` (the network or the server failed, or the session is
gone) a retry may succeed; after `Refused` (the server answered and refuses this client) a retry
cannot succeed.
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
from moa_jax.split import protocol
from moa_jax.split.pairing import Pairing
from moa_jax.version import __version__

LARGEST_CHUNK = 4096  # most tokens whose rows one message may hold
MOST_BYTES = 256 << 20  # per message; a message holds the rows of a chunk
UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 401, 403, 404
LAST_WORDS = 0.2  # seconds to wait for the Fault of a closed connection


class ConnectionLost(Exception):
    """The connection failed or could not be opened."""


class ServerBusy(ConnectionLost):
    """The server has no free slot, or is shutting down."""


class Refused(InputError):
    """The server refuses this client for a permanent reason."""


class SessionExpired(ConnectionLost):
    """The server no longer has the session, or its state differs from the client's."""


@dataclasses.dataclass
class LinkTraffic:
    """Bytes of messages over all connections of a client."""

    bytes_up: int = 0
    bytes_down: int = 0
    round_trip_s: float | None = None  # from Hello to Welcome, which needs no computation


@dataclasses.dataclass(frozen=True)
class ServerAddress:
    """URL, credentials and encoding for a connection to a server."""

    url: str
    pairing: Pairing
    token: str | None = None
    tls: ssl.SSLContext | None = None
    codec: protocol.Codec = "bfloat16"
    compress: bool = False
    timeout: float = 5.0  # seconds in which the server must send a message or a pong


class Link:
    """An open connection that has completed the handshake (Hello, Welcome)."""

    def __init__(
        self,
        socket: ClientConnection,
        server: ServerAddress,
        limits: protocol.MessageLimits,
        traffic: LinkTraffic,
    ) -> None:
        self._socket, self._server, self._limits = socket, server, limits
        self._traffic = traffic
        self.welcome: protocol.Welcome

    @classmethod
    async def open(cls, server: ServerAddress, vocab_size: int, traffic: LinkTraffic) -> Link:
        """Connects and completes the handshake; raises ConnectionLost or Refused."""
        limits = protocol.MessageLimits(
            max_tokens=protocol.LARGEST,
            max_nodes=(1 << 16) - 1,
            max_rows=LARGEST_CHUNK,
            max_bytes=MOST_BYTES,
            vocab_size=vocab_size,
        )
        link = cls(await _socket(server), server, limits, traffic)
        try:
            hello = protocol.Hello(
                f"moa-jax {__version__}", server.pairing, server.codec, server.compress
            )
            begin = time.perf_counter()
            await link.send(hello)
            link.welcome = await link.receive(protocol.Welcome)
            traffic.round_trip_s = time.perf_counter() - begin
        except BaseException:  # also a cancellation: the caller may have given up
            link.abort()
            raise
        return link

    async def send(self, message: protocol.Up) -> None:
        """Sends one message; raises ConnectionLost if the server does not accept it in time.

        Raises ServerBusy, SessionExpired or Refused if the server sent a Fault and closed the
        connection.
        """
        data = protocol.encode(message)
        try:
            async with asyncio.timeout(self._server.timeout):
                await self._socket.send(data)
        except (websockets.ConnectionClosed, OSError, TimeoutError) as error:
            raise await self._why(error) from error
        self._traffic.bytes_up += len(data)

    async def receive(self, *kinds: type, patience: float = 0.0) -> Any:
        """The next message, which must be an instance of one of `kinds`.

        Raises ConnectionLost for a message of another kind, and if no message arrives within the
        server's `timeout`. A larger `patience` (s) extends the wait while the server answers pings.
        Raises ServerBusy, SessionExpired or Refused for a Fault.
        """
        try:
            async with asyncio.timeout(max(patience, self._server.timeout)):
                data = await self._next()
        except (websockets.ConnectionClosed, OSError, TimeoutError) as error:
            raise ConnectionLost(_as_line(error)) from error
        self._traffic.bytes_down += len(data)
        try:
            message = protocol.decode_down(data, self._limits)
        except protocol.BadMessage as error:
            is_first = self._traffic.round_trip_s is None  # no server has sent a Welcome yet
            if is_first and isinstance(error, protocol.WrongVersion):
                raise Refused(str(error)) from error
            raise ConnectionLost(f"the server sent a damaged message: {error}") from error
        if isinstance(message, protocol.Fault):
            raise _fault(message)
        if not isinstance(message, kinds):
            raise ConnectionLost(f"the server sent {type(message).__name__} out of turn")
        return message

    async def _next(self) -> bytes | str:
        """The next message; raises TimeoutError if neither a message nor a pong arrives in time."""
        receiving = asyncio.create_task(self._socket.recv())
        pong, half_time = None, self._server.timeout / 2
        try:
            while True:
                await asyncio.wait([receiving], timeout=half_time)
                if receiving.done():
                    return receiving.result()
                if pong is not None and not pong.done():
                    raise TimeoutError
                async with asyncio.timeout(half_time):
                    pong = await self._socket.ping()
        finally:
            await ended(receiving)

    async def _why(self, error: Exception) -> Exception:
        """The exception for the server's last Fault, or ConnectionLost if the server sent none."""
        try:
            async with asyncio.timeout(LAST_WORDS):
                while True:
                    await self.receive(object)
        except (Refused, SessionExpired, ServerBusy) as error:
            return error
        except (ConnectionLost, TimeoutError):
            return ConnectionLost(_as_line(error))

    def abort(self) -> None:
        """Closes the transport at once, without a close frame; the server may be unreachable."""
        self._socket.transport.abort()

    async def close(self) -> None:
        """Closes the connection with a closing handshake."""
        await self._socket.close()


async def ended(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and waits until it is done; ignores its result or exception."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved, because asyncio logs unretrieved exceptions


def check_url(url: str) -> None:
    """Raises InputError for a URL that is not a WebSocket address."""
    try:
        parsed = parse_uri(url)
        parsed.host.encode("idna")  # as a name lookup does
    except (websockets.InvalidURI, ValueError) as error:
        raise InputError(f"--connect {url}; give ws://HOST:PORT/v1/split, or wss://") from error


async def _socket(server: ServerAddress) -> ClientConnection:
    headers = {"Authorization": f"Bearer {server.token}"} if server.token else {}
    try:
        return await connect(
            server.url,
            additional_headers=headers,
            ssl=server.tls,
            max_size=MOST_BYTES,
            open_timeout=server.timeout,
            close_timeout=1.0,
            ping_interval=None,  # `Link._next` pings
            compression=None,  # rows have their own codec
            proxy=None,
        )
    except websockets.InvalidStatus as error:
        raise _refusal(server, error.response.status_code) from error
    except ssl.SSLCertVerificationError as error:
        raise Refused(
            f"{server.url}: its certificate is not trusted ({error.verify_message}); see --tls-ca"
        ) from error
    # A redirect to an invalid address raises ValueError.
    except (websockets.WebSocketException, OSError, TimeoutError, ValueError) as error:
        raise ConnectionLost(_as_line(error)) from error


def _refusal(server: ServerAddress, status: int) -> Exception:
    """The exception for an HTTP status that the server sent instead of the upgrade."""
    if status == UNAUTHORIZED:
        return Refused("the server rejects this token; see --token-file")
    if status in (FORBIDDEN, NOT_FOUND):  # servers differ in the status for a wrong path
        line = f"{server.url}: nothing answers there: the path should be /v1/split"
        if status == FORBIDDEN:
            line += "; a gateway that adds an Origin header needs a server with a token"
        return Refused(line)
    return ServerBusy(f"the server answered with status {status}; try again later")


def _fault(message: protocol.Fault) -> Exception:
    """The exception for a Fault message."""
    if message.code in ("gone", "state"):
        return SessionExpired(message.text)
    if message.code in ("busy", "draining"):
        return ServerBusy(message.text)
    return Refused(f"the server refuses: {message.text}")


def _as_line(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)
