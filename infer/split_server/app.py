"""The server's HTTP side: WebSocket /v1/split, GET /health, GET /metrics.

A connection sends Hello, then opens or resumes one session at a time:

    Hello -> Welcome    Open -> Opened, Committed...      Verify, Read, Stream -> Committed...
                        Resume -> Resumed, Committed...   Close

The server answers an unexpected message with a Fault; a fatal Fault ends the connection, but not
the server. Per connection, one coroutine receives and at most one sends. A client that does not
accept messages loses its connection but keeps its slot, as after a lost link.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from infer.http.auth import is_bearer
from infer.http.log import Log, place_of
from infer.split_server.metrics import CONTENT_TYPE
from infer.split_server.service import Service
from infer.split_server.sessions import FATAL, Encoding, Refused, ReplyBuffer, SplitSession
from moa_jax.split import protocol
from moa_jax.split.pairing import Pairing, mismatch
from moa_jax.version import __version__

PATH = "/v1/split"
SOFTWARE = f"moa-jax {__version__}"
POLICY, GOING_AWAY, TRY_LATER = 1008, 1001, 1013  # close codes of WebSocket


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits and timeouts of one connection."""

    token: str | None = None  # required bearer token; None accepts every client
    max_clients: int = 64
    max_message_bytes: int = 1 << 20
    max_requests_per_second: float = 500.0  # further requests are delayed
    hello_seconds: float = 10.0
    idle_seconds: float = 300.0
    send_seconds: float = 10.0  # most seconds until a client accepts a message


class SplitServer:
    """The ASGI application and the state that its connections share."""

    def __init__(
        self,
        service: Service,
        pairing: Pairing,
        vocab_size: int,
        limits: ConnectionLimits,
        log: Log,
    ) -> None:
        self.service, self.pairing, self.limits, self.log = service, pairing, limits, log
        self.metrics = service.metrics
        self.connections: set[Connection] = set()
        self.metrics.clients.set_function(lambda: len(self.connections))
        offered = service.limits
        # Messages may hold prompts above --max-prompt; the service refuses those.
        self.message_limits = protocol.MessageLimits(
            max_tokens=max(offered.max_tokens, limits.max_message_bytes // 4),
            max_nodes=offered.max_nodes,
            max_rows=offered.chunk,
            max_bytes=limits.max_message_bytes,
            vocab_size=vocab_size,
        )
        welcome = (offered.max_nodes, offered.max_tokens, offered.max_prompt, offered.chunk)
        self.welcome = protocol.encode(protocol.Welcome(SOFTWARE, pairing, *welcome))
        routes = [
            WebSocketRoute(PATH, self._split),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self.service:
            yield

    async def drain(self, seconds: float) -> None:
        """Refuses new sessions, waits up to `seconds` for running ones, ends all connections."""
        self.log("drain", sessions=self.service.num_connected)
        self.service.drain()
        end = time.monotonic() + seconds
        while self.service.num_connected and time.monotonic() < end:
            await asyncio.sleep(0.05)
        for connection in list(self.connections):
            connection.end(Refused("draining", "the server is shutting down"))
        while self.connections and time.monotonic() < end + 1:
            await asyncio.sleep(0.05)

    async def _split(self, websocket: WebSocket) -> None:
        """Serves one connection, or refuses the upgrade."""
        refusal = self._refusal(websocket)
        if refusal is None:
            return await Connection(self, websocket).run()
        self.metrics.refused.labels(str(refusal.status_code)).inc()
        self.log("refuse", status=refusal.status_code)
        await websocket.send_denial_response(refusal)

    async def _health(self, request: Request) -> Response:
        """Status 200 while the server accepts sessions; 503 while it drains or its target fails."""
        service = self.service
        state = "draining" if service.draining else "ok" if service.healthy else "failing"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        if not self._knows_token(request):
            return _unauthorized()
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _refusal(self, websocket: WebSocket) -> Response | None:
        """The HTTP response that refuses an upgrade; None for an accepted connection."""
        if not self._knows_token(websocket):
            return _unauthorized()
        if self.limits.token is None and "origin" in websocket.headers:
            # A web page in a local browser could otherwise connect to this server.
            return PlainTextResponse("no web page is let in; use infer.client\n", 403)
        if len(self.connections) >= self.limits.max_clients:
            return PlainTextResponse("too many clients; try again later\n", 503)
        return None

    def _knows_token(self, connection: HTTPConnection) -> bool:
        if self.limits.token is None:
            return True
        return is_bearer(connection.headers.get("authorization", ""), [self.limits.token])


class Connection:
    """One client's WebSocket, after its upgrade."""

    def __init__(self, server: SplitServer, websocket: WebSocket) -> None:
        self._server, self._websocket, self._log = server, websocket, server.log
        self._service = server.service
        self._limits = server.limits
        self._session: SplitSession | None = None
        self._encoding: Encoding | None = None  # None before Hello
        self._opening: int | None = None  # seq of an Open that is waiting for a slot
        self._sending: asyncio.Task[None] | None = None  # at most one at a time
        self._reply: ReplyBuffer | None = None  # the reply that is being sent
        self._end: asyncio.Future[Refused | None] = asyncio.get_running_loop().create_future()
        self._seen = self._owed = 0.0  # time of the last message; seconds ahead of the rate limit
        self._counts = {"messages": 0, "bytes_up": 0, "bytes_down": 0}

    async def run(self) -> None:
        """Serves the connection until it ends; client errors never raise."""
        self._server.connections.add(self)
        client = self._websocket.client
        self._log("connect", client=client and client.host)
        reading = None
        try:
            await self._websocket.accept()
            reading = asyncio.create_task(self._read())
            await asyncio.wait([reading, self._end], return_when=asyncio.FIRST_COMPLETED)
            if not self._end.done():
                reading.result()  # raises the exception of `reading`, if any
        except (WebSocketDisconnect, OSError):
            pass
        except Exception as error:
            self._log("error", what=place_of(error))
            self._server.metrics.failures.inc()
        finally:
            await _cancelled(reading, self._sending)
            if self._session is not None and self._session.owner == self._lose:
                self._service.disconnect(self._session)  # the session waits for its client
            self.end(None)
            await self._say_goodbye()
            self._server.connections.discard(self)
            self._log("disconnect", **self._counts)

    def end(self, refused: Refused | None) -> None:
        """Ends the connection; sends `refused`, if given, as the last message."""
        if not self._end.done():
            self._end.set_result(refused)

    async def _say_goodbye(self) -> None:
        """Sends the last Fault and closes the WebSocket; ignores errors."""
        refused = self._end.result()
        with contextlib.suppress(Exception):  # the socket may be in any state
            if refused is not None:
                await self._send_fault(refused, fatal=True)
            code = GOING_AWAY if refused and refused.code == "draining" else POLICY
            async with asyncio.timeout(self._limits.send_seconds):
                await self._websocket.close(code if refused else TRY_LATER)

    def _lose(self, refused: Refused) -> None:
        """Callback for another connection that takes over the session."""
        self._session = None
        self.end(refused)

    # ---- receiving ------------------------------------------------------------------------

    async def _read(self) -> None:
        """Handles messages in order until the connection ends."""
        while not self._end.done():
            try:
                message = protocol.decode_up(await self._receive(), self._server.message_limits)
                await self._handle(message)
            except protocol.WrongVersion as error:
                self.end(Refused("version", str(error)))
            except protocol.BadMessage as error:
                self.end(Refused("message", str(error)))
            except Refused as refused:
                await self._refuse(refused)

    async def _receive(self) -> bytes:
        """The next message; enforces the idle timeout and delays messages above the rate limit."""
        limit = self._limits.idle_seconds if self._encoding else self._limits.hello_seconds
        while True:
            try:
                async with asyncio.timeout(limit):
                    event = await self._websocket.receive()
                break
            except TimeoutError:
                if self._sending is None or self._sending.done():
                    raise self._end_idle(limit) from None
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event.get("code") or 1005)
        data = event.get("bytes")
        self._counts["messages"] += 1
        self._counts["bytes_up"] += len(data or b"")
        self._server.metrics.bytes_up.inc(len(data or b""))
        now, each = time.monotonic(), 1 / self._limits.max_requests_per_second
        self._owed = max(self._owed - (now - self._seen), 0.0) + each
        self._seen = now
        if self._owed > 1:  # more than one second ahead of the rate limit
            await asyncio.sleep(each)
        return data if data is not None else event["text"]  # the decoder rejects str

    def _end_idle(self, seconds: float) -> Exception:
        """Ends the session of an idle client; returns the exception that ends `_read`."""
        if self._session is not None:
            self._service.close(self._session, "idle")
            self._session = None
        if self._encoding is None:
            return protocol.BadMessage(f"no Hello came within {seconds:g} s")
        self.end(Refused("gone", f"nothing came for {seconds:g} s: connect again"))
        return WebSocketDisconnect(POLICY)

    async def _handle(self, message: protocol.Up) -> None:
        """Executes a message; raises Refused if the message is not allowed now."""
        if isinstance(message, protocol.Hello):
            return await self._greet(message)
        name = type(message).__name__
        if self._encoding is None:
            raise Refused("state", f"{name} came before Hello")
        if isinstance(message, protocol.Open):
            return await self._open(message)
        if isinstance(message, protocol.Resume):
            return await self._resume(message)
        if self._session is None:
            raise Refused("state", f"{name} came without a session")
        if isinstance(message, protocol.Close):
            self._service.close(self._session, "done")
            self._session = None
            return await _cancelled(self._sending)
        await self._deliver(self._service.submit(self._session, message))

    async def _greet(self, hello: protocol.Hello) -> None:
        if self._encoding is not None:
            raise Refused("state", "Hello came twice")
        if difference := mismatch(self._server.pairing, hello.pairing):
            raise Refused("pairing", f"not the same pair: {difference}"[:1000])
        self._encoding = Encoding(hello.codec, hello.compress)
        other = hello.software if hello.software != SOFTWARE else None
        self._log("hello", codec=hello.codec, compress=hello.compress, other_software=other)
        await self._send(self._server.welcome)

    async def _open(self, request: protocol.Open) -> None:
        session = self._session
        if request.seq == self._opening:
            return  # a repeated Open; the session is being opened already
        if session and request.seq == session.reply.seq == session.request.seq:
            return await self._deliver(session.reply)
        if session is not None or self._opening is not None:
            raise Refused("state", "Open came while a session is open; close that first")
        await _cancelled(self._sending)
        self._opening = request.seq
        self._spawn(self._open_and_send(request))

    async def _open_and_send(self, request: protocol.Open) -> None:
        """Waits for a slot; `_read` runs meanwhile and detects a disconnect."""
        try:
            self._session = await self._service.open(request, self._encoding, self._lose)
        except Refused as refused:
            await self._refuse(refused)
        else:
            await self._send_reply(self._session.reply)
        finally:
            self._opening = None

    async def _resume(self, request: protocol.Resume) -> None:
        if self._session is not None or self._opening is not None:
            raise Refused("state", "Resume came while a session is open")
        self._session = self._service.resume(request, self._encoding, self._lose)
        reply = self._session.reply
        await self._send(protocol.encode(protocol.Resumed(reply.seq)))
        if request.seq < reply.seq:
            await self._deliver(reply)

    # ---- sending --------------------------------------------------------------------------

    async def _deliver(self, reply: ReplyBuffer) -> None:
        """Starts a task that sends the parts of a reply, while `_read` continues.

        Waits first until the previous reply is sent: the server stops reading from a client that
        sends requests without reading replies.
        """
        if reply is self._reply:
            return  # a repeated request; its reply is being sent already
        if self._sending is not None:
            await asyncio.wait([self._sending])
        self._reply = reply
        self._spawn(self._send_reply(reply))

    async def _send_reply(self, reply: ReplyBuffer) -> None:
        self._reply = reply
        try:
            async for part in reply.read():
                await self._send(part)
        except Refused as refused:
            self._session = None
            await self._refuse(refused)
        except (TimeoutError, WebSocketDisconnect, OSError):
            self.end(None)
        finally:
            self._reply = None

    def _spawn(self, sending: Coroutine[Any, Any, None]) -> None:
        """Runs `sending` as a task; an unexpected exception ends the connection."""
        self._sending = asyncio.create_task(sending)
        self._sending.add_done_callback(self._note_sent)

    def _note_sent(self, sending: asyncio.Task[None]) -> None:
        if not sending.cancelled() and (error := sending.exception()):
            self._log("error", what=place_of(error))
            self.end(None)

    async def _refuse(self, refused: Refused) -> None:
        if refused.code in FATAL:
            self.end(refused)
        else:
            await self._send_fault(refused, fatal=False)

    async def _send_fault(self, refused: Refused, fatal: bool) -> None:
        self._server.metrics.faults.labels(refused.code).inc()
        self._log("fault", code=refused.code, text=refused.text, fatal=fatal)
        text = "".join(c if c.isprintable() else " " for c in refused.text)[:1000]
        await self._send(protocol.encode(protocol.Fault(refused.code, text, fatal)))

    async def _send(self, data: bytes) -> None:
        """Sends a message; raises TimeoutError if the client does not accept it in time."""
        try:
            async with asyncio.timeout(self._limits.send_seconds):
                await self._websocket.send_bytes(data)
        except TimeoutError:
            self._log("slow", seconds=self._limits.send_seconds)
            self.end(None)
            raise
        self._counts["bytes_down"] += len(data)
        self._server.metrics.bytes_down.inc(len(data))


async def _cancelled(*tasks: asyncio.Task[None] | None) -> None:
    """Cancels tasks and waits until all are done."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _unauthorized() -> Response:
    headers = {"WWW-Authenticate": "Bearer"}
    return PlainTextResponse("the bearer token is missing or wrong\n", 401, headers)
