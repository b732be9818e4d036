"""The HTTP side: paths, keys, bodies, errors, and what becomes of a request whose client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from infer.http.auth import is_bearer
from infer.http.log import Log, place_of
from infer.openai.errors import (
    BAD_METHOD,
    BAD_TYPE,
    FAULT,
    NO_SUCH,
    SLOW_BODY,
    TOO_LARGE,
    TOO_LONG,
    UNAUTHORIZED,
    UNAVAILABLE,
    APIError,
    as_json,
    stopping,
)
from infer.openai.metrics import CONTENT_TYPE, ServingMetrics
from infer.openai.model import Model
from infer.openai.requests import (
    GenerationRequest,
    chat_of,
    completion_of,
    object_of,
    text_of,
    tokens_of,
)
from infer.openai.responses import Replies, event
from infer.openai.streams import Delta, RequestStream
from infer.openai.tokens import TokenTexts
from moa_jax.decode.engine import Engine
from moa_jax.version import __version__

OPEN_PATHS = ("/health", "/ping")  # for those who only look whether the server lives
DISCARDED, DISCARD_SECONDS = 1 << 26, 5.0  # of a body that is too large, before it is refused
JSON = "application/json"
CLIENT_GONE = 499  # a status for the log: nobody receives it
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True)
class ServingLimits:
    """What one request may bring, and how long it may take."""

    max_body_bytes: int = 1 << 22
    body_seconds: float = 30.0  # until a body must have come
    request_seconds: float = 600.0  # from a request to the end of its answer
    send_seconds: float = 30.0  # that a client may take to accept what was written


class ClientLeft(Exception):
    """The client has left."""


class OpenAIServer:
    """The application, and what its requests share."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        metrics: ServingMetrics,
        log: Log,
        limits: ServingLimits | None = None,
        keys: tuple[str, ...] = (),
    ) -> None:
        """With `keys` clients must present one of them."""
        self.engine, self.model, self.metrics, self.log = engine, model, metrics, log
        self.limits, self.draining = limits or ServingLimits(), False
        self.answering: set[RequestStream] = set()
        self._keys, self._token_texts = keys, TokenTexts(model.tokenizer)
        # Texts are read one after the other beside the event loop, which long ones would block.
        self._reader = ThreadPoolExecutor(1, "reader")
        paths: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._chat),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name:path}", self._one_model),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/version", self._version),
            ("GET", "/ping", self._health),
            ("POST", "/ping", self._health),
            ("GET", "/health", self._health),
            ("GET", "/metrics", self._metrics),
        ]
        routes = [Route(path, self._guarded(do), methods=[verb]) for verb, path, do in paths]
        handlers = {HTTPException: self._no_such}
        self.app = Starlette(routes=routes, exception_handlers=handlers)
        self.app.router.redirect_slashes = False  # to http://, with the key, behind a proxy's TLS

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and gives those that are being answered this long."""
        self.log("drain", requests=len(self.answering))
        self.draining = True
        end = time.monotonic() + seconds
        while self.answering and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.stop()
        while self.answering and time.monotonic() < end + 1:
            await asyncio.sleep(0.02)

    def stop(self) -> None:
        """Refuses new requests, and tells those that are being answered that the server ends."""
        self.draining = True
        for answering in self.answering:
            answering.stop()

    # ---- requests ------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, completion_of)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat_of)

    async def _models(self, request: Request) -> Response:
        return reply({"object": "list", "data": [self.model.card()]})

    async def _one_model(self, request: Request) -> Response:
        self.model.check_name(request.path_params["name"])
        return reply(self.model.card())

    async def _tokenize(self, request: Request) -> Response:
        """Token ids of a `prompt`, or of `messages` in the chat template, as vLLM has it."""
        ids = await self._read(await self._body(request), tokens_of)
        most = self.model.max_tokens
        return reply({"count": len(ids), "max_model_len": most, "tokens": list(ids)})

    async def _detokenize(self, request: Request) -> Response:
        """The text of `tokens`, as vLLM has it."""
        return reply({"prompt": await self._read(await self._body(request), text_of)})

    async def _version(self, request: Request) -> Response:
        return reply({"version": __version__})

    async def _health(self, request: Request) -> Response:
        """Status 200 while the server takes requests; 503 while it drains or its engine fails."""
        state = "draining" if self.draining else "ok" if self.engine.healthy else "failing"
        return reply({"status": state}, 200 if state == "ok" else UNAVAILABLE)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    # ---- one answer ----------------------------------------------------------------------------

    async def _answer(
        self, request: Request, read: Callable[[dict[str, Any], Model], GenerationRequest]
    ) -> Response:
        """Answers a request with as many choices as it asks for."""
        began = time.monotonic()
        self._check_open()
        generation = await self._read(await self._body(request), read)
        self._check_open()  # the body may have taken a while
        answering = RequestStream(generation, self.engine, self.model, self.metrics, began)
        answering.submit()
        replies = Replies(answering, self._token_texts)
        if generation.ignored:
            self.log(
                "ignored", id=replies.id, fields=[name[:40] for name in generation.ignored[:8]]
            )
        self.answering.add(answering)
        if generation.fields.stream:
            return EventStream(self, answering, replies)
        try:
            parts = await unless_gone(request.receive, self._whole(answering))
            whole = await replies.whole(parts)
            return Response(whole, 200, {"x-request-id": replies.id}, JSON)
        finally:
            self.ended(answering, replies.id)

    async def _whole(self, answering: RequestStream) -> list[Delta]:
        try:
            async with asyncio.timeout(self.seconds_left(answering)):
                return await answering.whole()
        except TimeoutError:
            raise self.too_long() from None

    def seconds_left(self, answering: RequestStream) -> float:
        """How long an answer may still take."""
        return answering.began + self.limits.request_seconds - time.monotonic()

    def too_long(self) -> APIError:
        """What to say of a request that took too long."""
        seconds = self.limits.request_seconds
        return APIError(
            TOO_LONG,
            f"no answer within {seconds:g} s: ask for fewer tokens, or later",
            code="timeout",
            headers={"x-should-retry": "false"},  # openai's clients would ask twice more at once
        )

    def ended(self, answering: RequestStream, id: str) -> None:
        """Counts and logs an answer that has ended, however it did, and frees what it held."""
        finished = [(choice.finish, choice.num_tokens) for choice in answering.choices]
        answering.cancel()
        self.answering.discard(answering)
        seconds = time.monotonic() - answering.began
        reasons = [(reason, tokens) for reason, tokens in finished if reason in ("stop", "length")]
        if len(reasons) == len(finished):
            self.metrics.ended(seconds, answering.num_prompt_tokens, reasons)
        self.log(
            "answer",
            id=id,
            prompt_tokens=answering.num_prompt_tokens,
            tokens=answering.num_tokens,
            finish=sorted({reason or "cancelled" for reason, _ in finished}),
            seconds=round(seconds, 3),
        )

    # ---- bodies, keys and errors ---------------------------------------------------------------

    async def _read(self, body: bytes, read: Callable[[dict[str, Any], Model], T]) -> T:
        """The result of `read` for the object in a body."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, lambda: read(object_of(body), self.model))

    async def _body(self, request: Request) -> bytes:
        """The body; raises APIError for one that is no JSON, too large, or does not come."""
        kind = request.headers.get("content-type", "")
        # Pages of other sites may send anything else unasked, and bodies without a type, too.
        if kind.partition(";")[0].strip().lower() != JSON:
            message = f"content-type is {kind[:60] or 'missing'}: send {JSON}"
            raise APIError(BAD_TYPE, message, code="unsupported_media_type")
        most, parts, size, more = self.limits.max_body_bytes, [], 0, True
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more and size <= most:
                    part, more = await _next_part(request)
                    size += len(part)
                    parts.append(part)
        except TimeoutError:
            seconds = self.limits.body_seconds
            raise APIError(SLOW_BODY, f"the body did not come within {seconds:g} s") from None
        if size > most:
            parts.clear()
            with contextlib.suppress(TimeoutError):  # who is still sending would not see an answer
                async with asyncio.timeout(DISCARD_SECONDS):
                    while more and size < DISCARDED:
                        part, more = await _next_part(request)
                        size += len(part)
            message = f"the body has more than {most} bytes: send less at once"
            raise APIError(TOO_LARGE, message, code="request_too_large")
        return b"".join(parts)

    def _guarded(self, do: Handler) -> Handler:
        """A handler for clients with a key, whose errors have OpenAI's shape."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                response = await do(request)
            except ClientLeft:
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:
                response = self.refused(self.refusal_of(error))
            self.metrics.replied(response.status_code)
            return response

        return guarded

    def _check_open(self) -> None:
        if self.draining:
            raise stopping()

    def _check_key(self, request: Request) -> None:
        if not self._keys or request.scope["path"] in OPEN_PATHS:  # no header changes that
            return
        if not is_bearer(request.headers.get("authorization", ""), self._keys):
            raise APIError(
                UNAUTHORIZED,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _no_such(self, request: Request, error: Exception) -> Response:
        """The answer to a path or a method that is not there."""
        status = error.status_code if isinstance(error, HTTPException) else FAULT
        path = request.scope["path"][:100]
        message = f"{path}: nothing answers there: see /v1/models, /v1/completions"
        if status == BAD_METHOD:
            message = f"{path} does not answer to {request.method}: see the header Allow"
        headers = error.headers if isinstance(error, HTTPException) else None
        self.metrics.replied(status)
        code = "not_found" if status == NO_SUCH else None
        return self.refused(APIError(status, message, code=code, headers=headers))

    def refusal_of(self, error: Exception) -> APIError:
        """A refusal itself, or what a client is told of a fault of ours; the log says where."""
        if isinstance(error, APIError):
            return error
        self.log("error", what=place_of(error))
        return APIError(FAULT, "the server failed at this request")

    def refused(self, refusal: APIError) -> Response:
        """A refusal as a response; it is logged without what the user wrote."""
        self.log("refuse", status=refusal.status, param=refusal.param, code=refusal.code)
        return reply(refusal.content(), refusal.status, refusal.headers)


class EventStream(Response):
    """A streamed answer: events as they come, until the end or until the client leaves."""

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(self, server: OpenAIServer, answering: RequestStream, replies: Replies) -> None:
        self._server, self._answering, self._replies = server, answering, replies
        super().__init__(headers={"x-request-id": replies.id, "cache-control": "no-cache"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            await unless_gone(receive, self._write(send))
            await self._send(send, b"", more=False)
        except (ClientLeft, OSError):  # nobody is there who could be told
            pass
        finally:
            self._server.ended(self._answering, self._replies.id)

    async def _write(self, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events()) as events:
                async for data in events:
                    await self._send(send, data)
        except ClientLeft:
            raise
        except Exception as error:  # the status was sent long ago
            refusal = self._server.refusal_of(error)
            self._server.refused(refusal)
            await self._send(send, event(refusal.content()))

    async def _events(self) -> AsyncIterator[bytes]:
        parts = self._answering.parts()
        while True:
            try:
                async with asyncio.timeout(self._server.seconds_left(self._answering)):
                    choice, part = await anext(parts)
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise self._server.too_long() from None
            for data in self._replies.events(choice, part):
                yield data
        for data in self._replies.last_events():
            yield data

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        """Sends an event; raises ClientLeft if the client does not accept it in time."""
        try:
            async with asyncio.timeout(self._server.limits.send_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            self._server.log("slow", id=self._replies.id)
            raise ClientLeft from None
        except OSError as error:
            raise ClientLeft from error


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work that ends when the client leaves; raises ClientLeft then."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_leave(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next_part(request: Request) -> tuple[bytes, bool]:
    """The next part of a body, and whether more will come; raises ClientLeft if the client left."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientLeft
    return message.get("body", b""), message.get("more_body", False)


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON as a response."""
    return Response(as_json(content), status, headers, JSON)
