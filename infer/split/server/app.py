"""The server's HTTP side: WebSocket /v1/split, GET /health, GET /metrics.

A connection says Hello, then opens or resumes one session at a time:

    Hello -> Welcome    Open -> Opened, Verdict...    Draft, Read -> Verdict...    Close
                        Resume -> Resumed, the reply that was missed

What does not belong there ends in a Fault, the connection too if it is fatal; the server goes on.
One coroutine reads a connection, one at a time sends to it, and a client that does not take what
is sent loses its connection and keeps its slot, as one whose link died.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from infer.split.server.events import Log, place_of
from infer.split.server.metrics import CONTENT_TYPE
from infer.split.server.scheduler import Scheduler
from infer.split.server.sessions import Answer, Encoding, Refused, Session
from moa_jax.split import wire
from moa_jax.split.pairing import Pairing, mismatch
from moa_jax.version import __version__

PATH = "/v1/split"
SOFTWARE = f"moa-jax {__version__}"
POLICY, GOING_AWAY, TRY_LATER = 1008, 1001, 1013  # close codes of WebSocket


@dataclasses.dataclass(frozen=True)
class Manners:
    """What one connection may do, and how long it may take."""

    token: str | None = None  # that clients must show; None lets anyone in
    max_clients: int = 64
    max_message_bytes: int = 1 << 20
    max_requests_per_second: float = 500.0  # faster ones wait
    hello_seconds: float = 10.0
    idle_seconds: float = 300.0
    send_seconds: float = 10.0  # that a client may take to make room for the next message


class Server:
    """The application and what its connections share."""

    def __init__(
        self,
        scheduler: Scheduler,
        pairing: Pairing,
        vocab_size: int,
        manners: Manners,
        log: Log,
    ) -> None:
        self.scheduler, self.pairing, self.manners, self.log = scheduler, pairing, manners, log
        self.metrics = scheduler.metrics
        self.connections: set[Connection] = set()
        rules = scheduler.rules
        # Prompts beyond --max-prompt are read, so that the scheduler can say what is too long.
        self.limits = wire.Limits(
            max_tokens=max(rules.max_tokens, manners.max_message_bytes // 4),
            max_nodes=rules.max_nodes,
            max_rows=rules.chunk,
            max_bytes=manners.max_message_bytes,
            vocab_size=vocab_size,
        )
        welcome = (rules.max_nodes, rules.max_tokens, rules.max_prompt, rules.chunk)
        self.welcome = wire.encode(wire.Welcome(SOFTWARE, pairing, *welcome))
        routes = [
            WebSocketRoute(PATH, self._split),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self.scheduler:
            yield

    async def drain(self, seconds: float) -> None:
        """Refuse new sessions, give running ones this long, then end all connections."""
        self.log("drain", sessions=self.scheduler.num_connected)
        self.scheduler.drain()
        end = time.monotonic() + seconds
        while self.scheduler.num_connected and time.monotonic() < end:
            await asyncio.sleep(0.05)
        for connection in list(self.connections):
            connection.end(Refused("draining", "the server is going down"))
        while self.connections and time.monotonic() < end + 1:
            await asyncio.sleep(0.05)

    async def _split(self, websocket: WebSocket) -> None:
        """One connection, from before its upgrade to its end."""
        refusal = self._refusal(websocket)
        if refusal is not None:
            self.metrics.refused.labels(str(refusal.status_code)).inc()
            self.log("refuse", status=refusal.status_code)
            await websocket.send_denial_response(refusal)
            return
        await Connection(self, websocket).run()

    async def _health(self, request: Request) -> Response:
        """200 while the server takes sessions; 503 while it drains or its target fails."""
        scheduler = self.scheduler
        state = "draining" if scheduler.draining else "ok" if scheduler.healthy else "failing"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    async def _metrics(self, request: Request) -> Response:
        if not self._knows_token(request):
            return _unauthorized()
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    def _refusal(self, websocket: WebSocket) -> Response | None:
        """What is answered instead of an upgrade, if anything."""
        if not self._knows_token(websocket):
            return _unauthorized()
        if len(self.connections) >= self.manners.max_clients:
            return PlainTextResponse("too many clients: try again later\n", 503)
        return None

    def _knows_token(self, connection: HTTPConnection) -> bool:
        if self.manners.token is None:
            return True
        shown = connection.headers.get("authorization", "").encode()
        return hmac.compare_digest(shown, f"Bearer {self.manners.token}".encode())


class Connection:
    """One client's WebSocket, after its upgrade."""

    def __init__(self, server: Server, websocket: WebSocket) -> None:
        self._server, self._websocket, self._log = server, websocket, server.log
        self._scheduler = server.scheduler
        self._manners = server.manners
        self._session: Session | None = None
        self._encoding: Encoding | None = None  # None until Hello
        self._opening: int | None = None  # seq of an Open that waits for its slot
        self._sending: asyncio.Task[None] | None = None  # there is never more than one
        self._answer: Answer | None = None  # the one that is being sent
        self._end: asyncio.Future[Refused | None] = asyncio.get_running_loop().create_future()
        self._seen = self._owed = 0.0  # time of the last message; seconds of rate used up
        self._counts = {"messages": 0, "bytes_up": 0, "bytes_down": 0}

    async def run(self) -> None:
        """Serve it to its end; never raises for what a client does."""
        self._server.connections.add(self)
        self._server.metrics.clients.set(len(self._server.connections))
        client = self._websocket.client
        self._log("connect", client=client and client.host)
        reading = None
        try:
            await self._websocket.accept()
            reading = asyncio.create_task(self._read())
            await asyncio.wait([reading, self._end], return_when=asyncio.FIRST_COMPLETED)
            if not self._end.done():
                reading.result()  # its exception, if it has one
        except (WebSocketDisconnect, OSError):
            pass
        except Exception as error:
            self._log("error", what=place_of(error))
            self._server.metrics.failures.inc()
        finally:
            await _cancelled(reading, self._sending)
            self._leave()
            await self._say_goodbye()
            self._server.connections.discard(self)
            self._server.metrics.clients.set(len(self._server.connections))
            self._log("disconnect", **self._counts)

    def end(self, refused: Refused | None) -> None:
        """End the connection, with this as its last word."""
        if not self._end.done():
            self._end.set_result(refused)

    def _leave(self) -> None:
        """Let go of the session, which waits for its client to come back."""
        if self._session is not None and self._session.owner == self._lose:
            self._scheduler.disconnect(self._session)
        self.end(None)

    async def _say_goodbye(self) -> None:
        """The last Fault and the end of the WebSocket, if the client still takes them."""
        refused = self._end.result()
        with contextlib.suppress(Exception):  # of a socket in any state
            if refused is not None:
                await self._send_fault(refused, fatal=True)
            code = GOING_AWAY if refused and refused.code == "draining" else POLICY
            async with asyncio.timeout(self._manners.send_seconds):
                await self._websocket.close(code if refused else TRY_LATER)

    def _lose(self, refused: Refused) -> None:
        """Another connection has the session now."""
        self._session = None
        self.end(refused)

    # What comes in

    async def _read(self) -> None:
        """Take messages one by one until the connection ends."""
        while not self._end.done():
            try:
                message = wire.decode_up(await self._receive(), self._server.limits)
                await self._take(message)
            except wire.WrongVersion as error:
                self.end(Refused("version", str(error)))
            except wire.BadMessage as error:
                self.end(Refused("message", str(error)))
            except Refused as refused:
                await self._refuse(refused)

    async def _receive(self) -> bytes:
        """The next message, if it comes in time; frequent ones are read slowly."""
        limit = self._manners.idle_seconds if self._encoding else self._manners.hello_seconds
        while True:
            try:
                async with asyncio.timeout(limit):
                    event = await self._websocket.receive()
                break
            except TimeoutError:
                if self._sending is None or self._sending.done():
                    raise self._idle(limit) from None
        if event["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(event.get("code") or 1005)
        data = event.get("bytes")
        self._counts["messages"] += 1
        self._counts["bytes_up"] += len(data or b"")
        self._server.metrics.bytes_up.inc(len(data or b""))
        await self._slow_down()
        return data if data is not None else event["text"]  # which the decoder refuses

    def _idle(self, seconds: float) -> Exception:
        """End a session that nobody uses, and say so."""
        if self._session is not None:
            self._scheduler.close(self._session, "idle")
            self._session = None
        if self._encoding is None:
            return wire.BadMessage(f"no Hello came within {seconds:g} s")
        self.end(Refused("gone", f"nothing came for {seconds:g} s: connect again"))
        return WebSocketDisconnect(POLICY)

    async def _slow_down(self) -> None:
        """Wait where messages come faster than they may, a second's worth at once apart."""
        now, each = time.monotonic(), 1 / self._manners.max_requests_per_second
        self._owed = max(self._owed - (now - self._seen), 0.0) + each
        self._seen = now
        if self._owed > 1:
            await asyncio.sleep(each)

    async def _take(self, message: wire.Up) -> None:
        """Do what a message asks; raises Refused where it cannot be done."""
        if isinstance(message, wire.Hello):
            return await self._greet(message)
        if self._encoding is None:
            raise Refused("state", f"{_name(message)} came before Hello")
        if isinstance(message, wire.Open):
            return await self._open(message)
        if isinstance(message, wire.Resume):
            return await self._resume(message)
        if self._session is None:
            raise Refused("state", f"{_name(message)} came without a session")
        if isinstance(message, wire.Close):
            self._scheduler.close(self._session, "done")
            self._session = None
            return await _cancelled(self._sending)
        await self._deliver(self._scheduler.submit(self._session, message))

    async def _greet(self, hello: wire.Hello) -> None:
        if self._encoding is not None:
            raise Refused("state", "Hello came twice")
        if difference := mismatch(self._server.pairing, hello.pairing):
            raise Refused("pairing", f"not the same pair: {difference}"[:1000])
        self._encoding = Encoding(hello.codec, hello.compress)
        other = hello.software if hello.software != SOFTWARE else None
        self._log("hello", codec=hello.codec, compress=hello.compress, other_software=other)
        await self._send(self._server.welcome)

    async def _open(self, ask: wire.Open) -> None:
        session = self._session
        if ask.seq == self._opening or (
            session and ask.seq == session.answer.seq == session.ask.seq
        ):
            return await self._repeat()
        if session is not None or self._opening is not None:
            raise Refused("state", "Open came while a session is open: close that first")
        await _cancelled(self._sending)
        self._opening = ask.seq
        self._spawn(self._open_and_send(ask))

    async def _open_and_send(self, ask: wire.Open) -> None:
        """Wait for a slot beside the reading of messages, which shows when the client leaves."""
        try:
            self._session = await self._scheduler.open(ask, self._encoding, self._lose)
        except Refused as refused:
            await self._refuse(refused)
        else:
            await self._send_answer(self._session.answer)
        finally:
            self._opening = None

    async def _resume(self, ask: wire.Resume) -> None:
        if self._session is not None or self._opening is not None:
            raise Refused("state", "Resume came while a session is open")
        self._session = self._scheduler.resume(ask, self._encoding, self._lose)
        answer = self._session.answer
        await self._send(wire.encode(wire.Resumed(answer.seq)))
        if ask.seq < answer.seq:
            await self._deliver(answer)

    async def _repeat(self) -> None:
        """The answer to Open once more, unless it is on its way."""
        if self._opening is None:
            await self._deliver(self._session.answer)

    # What goes out

    async def _deliver(self, answer: Answer) -> None:
        """Send an answer as its parts come, beside the reading of further messages.

        Waits for the one before: who asks without reading is not read any more either.
        """
        if answer is self._answer:
            return  # a duplicate of a request whose answer is on its way
        if self._sending is not None:
            await asyncio.wait([self._sending])
        self._answer = answer
        self._spawn(self._send_answer(answer))

    async def _send_answer(self, answer: Answer) -> None:
        self._answer = answer
        try:
            async for part in answer.read():
                await self._send(part)
        except Refused as refused:
            self._session = None
            await self._refuse(refused)
        except (TimeoutError, WebSocketDisconnect, OSError):
            self.end(None)
        finally:
            if self._answer is answer:
                self._answer = None

    def _spawn(self, sending: Coroutine[Any, Any, None]) -> None:
        """Send beside the reading of messages; an exception of ours ends the connection."""
        self._sending = asyncio.create_task(sending)
        self._sending.add_done_callback(self._note_sent)

    def _note_sent(self, sending: asyncio.Task[None]) -> None:
        if not sending.cancelled() and (error := sending.exception()):
            self._log("error", what=place_of(error))
            self.end(None)

    async def _refuse(self, refused: Refused) -> None:
        if refused.fatal:
            self.end(refused)
        else:
            await self._send_fault(refused, fatal=False)

    async def _send_fault(self, refused: Refused, fatal: bool) -> None:
        self._server.metrics.faults.labels(refused.code).inc()
        self._log("fault", code=refused.code, text=refused.text, fatal=fatal)
        text = "".join(c if c.isprintable() else " " for c in refused.text)[:1000]
        await self._send(wire.encode(wire.Fault(refused.code, text, fatal)))

    async def _send(self, data: bytes) -> None:
        """Send a message once the client has taken the one before; TimeoutError if it does not."""
        try:
            async with asyncio.timeout(self._manners.send_seconds):
                await self._websocket.send_bytes(data)
        except TimeoutError:
            self._log("slow", seconds=self._manners.send_seconds)
            self.end(None)
            raise
        self._counts["bytes_down"] += len(data)
        self._server.metrics.bytes_down.inc(len(data))


async def _cancelled(*tasks: asyncio.Task[None] | None) -> None:
    """Stop tasks and wait until they have stopped."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def _name(message: wire.Up) -> str:
    return type(message).__name__


def _unauthorized() -> Response:
    headers = {"WWW-Authenticate": "Bearer"}
    return PlainTextResponse("the bearer token is missing or wrong\n", 401, headers)
