"""The HTTP application: paths, keys, bodies, errors, and cancellation on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
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
    bad,
    stopping,
)
from infer.openai.grammars import GrammarText
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
from infer.openai.responses import Replies, SpecMetrics, event
from infer.openai.streams import Delta, RequestStream
from infer.openai.tokens import TokenTexts
from moa_jax.engine import Engine
from moa_jax.errors import InputError, TemporaryError
from moa_jax.grammar.compile import GrammarCompiler
from moa_jax.grammar.masks import Grammar
from moa_jax.version import __version__

OPEN_PATHS = ("/health", "/ping")  # health checks, which need no key
DISCARDED, DISCARD_SECONDS = 1 << 26, 5.0  # read of an oversized body before the error
JSON = "application/json"
CLIENT_GONE = 499  # a status for /metrics only: the client is gone
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


@dataclasses.dataclass(frozen=True)
class ServingLimits:
    """Limits of the size and the time of a request."""

    max_body_bytes: int = 1 << 22
    body_seconds: float = 30.0  # for the client to send the body
    request_seconds: float = 600.0  # from arrival to the end of the answer
    send_seconds: float = 30.0  # for the client to accept a write


class ClientLeft(Exception):
    """The client has disconnected."""


class OpenAIServer:
    """The ASGI application, and the state that its requests share."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        metrics: ServingMetrics,
        log: Log,
        limits: ServingLimits | None = None,
        keys: tuple[str, ...] = (),
        spec_metrics: SpecMetrics = "none",
    ) -> None:
        """If `keys` are given, clients must send one of these keys.

        `spec_metrics` is the level of detail of the field `metrics` of replies.
        """
        self.engine, self.model, self.metrics, self.log = engine, model, metrics, log
        self.limits, self.draining = limits or ServingLimits(), False
        self.answering: set[RequestStream] = set()
        self._keys, self._token_texts = keys, TokenTexts(model.tokenizer)
        self._spec_metrics = spec_metrics
        # One thread parses all bodies and tokenizes their text, which would block the event loop.
        self._reader = ThreadPoolExecutor(1, "reader")
        # Another thread compiles grammars, which may take longer.
        self._compiler = ThreadPoolExecutor(1, "compiler")
        self._grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_ids)
        self._has_masks = False  # whether the engine is ready for grammars
        self._in_compiler = threading.Lock()  # held by the thread that compiles grammars
        self._compiling: set[asyncio.Future[Grammar]] = set()
        self._num_read = 0  # requests whose body has arrived, before the engine has them
        self._stopped = False  # whether running requests are ended, too
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
        self._routes = Starlette(routes=routes, exception_handlers=handlers)
        # Behind a TLS proxy a redirect would lead to http://, with the key.
        self._routes.router.redirect_slashes = False
        self.num_open = 0  # requests whose response is not sent to its end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request, and counts it until its response is sent."""
        counted = scope["type"] == "http"
        self.num_open += counted
        try:
            await self._routes(scope, receive, send)
        finally:
            self.num_open -= counted

    async def drain(self, seconds: float) -> None:
        """Rejects new requests, and gives running requests `seconds` to finish."""
        self.log("drain", requests=self.num_running)
        self.draining = True
        end = time.monotonic() + seconds
        while self.num_running and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.stop()
        while self.num_running and time.monotonic() < end + 1:
            await asyncio.sleep(0.02)

    @property
    def num_running(self) -> int:
        """Requests with a complete body that have no complete answer."""
        return self._num_read + len(self.answering)

    def stop(self) -> None:
        """Rejects new requests, and ends running requests with the error of a stopping server."""
        self.stop_compiling()
        for answering in self.answering:
            answering.stop()

    def stop_compiling(self) -> None:
        """Rejects new requests and those whose grammar is compiled; any thread may call this."""
        self.draining = self._stopped = True
        for compiling in list(self._compiling):
            compiling.get_loop().call_soon_threadsafe(compiling.cancel)

    @property
    def is_compiling(self) -> bool:
        """Whether a grammar, or the program that all grammars need, is being compiled."""
        return self._in_compiler.locked()

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
        """Token ids of a `prompt`, or of `messages` in the chat template, as in vLLM."""
        ids = await self._read(await self._body(request), tokens_of)
        most = self.model.max_tokens
        return reply({"count": len(ids), "max_model_len": most, "tokens": list(ids)})

    async def _detokenize(self, request: Request) -> Response:
        """The text of `tokens`, as in vLLM."""
        return reply({"prompt": await self._read(await self._body(request), text_of)})

    async def _version(self, request: Request) -> Response:
        return reply({"version": __version__})

    async def _health(self, request: Request) -> Response:
        """Status 200 while the server accepts requests; 503 while draining or the engine fails."""
        state = "draining" if self.draining else "ok" if self.engine.healthy else "failing"
        return reply({"status": state}, 200 if state == "ok" else UNAVAILABLE)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    # ---- one answer ----------------------------------------------------------------------------

    async def _answer(
        self, request: Request, read: Callable[[dict[str, Any], Model], GenerationRequest]
    ) -> Response:
        """Generates all choices of a request, as one response or as an event stream."""
        began = time.monotonic()
        self._check_open()
        body = await self._body(request)
        self._check_open()  # draining may begin while the body arrives
        self._num_read += 1
        try:
            generation, grammar = await self._read(body, read), None
            if (text := generation.grammar) is not None:
                grammar = await unless_gone(request.receive, self._compiled(text))
            if self._stopped:
                raise stopping()
            parts = generation, self.engine, self.model, self.metrics, began, grammar
            answering = RequestStream(*parts)
            answering.submit()
            self.answering.add(answering)
        finally:
            self._num_read -= 1
        replies = Replies(answering, self._token_texts, self._spec_metrics)
        if generation.ignored:
            self.log(
                "ignored", id=replies.id, fields=[name[:40] for name in generation.ignored[:8]]
            )
        if generation.fields.stream:
            return EventStream(self, answering, replies)
        try:
            parts = await unless_gone(request.receive, self._whole(answering))
            whole = await replies.whole(parts)
            return Response(whole, 200, {"x-request-id": replies.id}, JSON)
        finally:
            self.ended(answering, replies.id)

    async def _compiled(self, grammar: GrammarText) -> Grammar:
        """The compiled grammar of a request, once the engine can serve it; raises APIError."""

        def compiled() -> Grammar:
            with self._in_compiler:
                found = self._grammars.compile(grammar.text)
                self.engine.prepare_masks()
                self._has_masks = True
                return found

        try:
            known = self._grammars.known(grammar.text)
            if known is not None and self._has_masks:
                return known
            if self._stopped:  # while the body was read
                raise stopping()
            work = asyncio.get_running_loop().run_in_executor(self._compiler, compiled)
            self._compiling.add(work)
            try:
                await asyncio.wait({work}, timeout=self.limits.request_seconds)
                if work.cancelled():
                    raise stopping()
                if not work.done():  # other grammars are compiled first
                    raise self.too_long()
                return work.result()
            finally:
                work.cancel()
                self._compiling.discard(work)
        except TemporaryError as error:
            raise APIError(UNAVAILABLE, f"{grammar.field}: {error}") from error
        except InputError as error:
            raise bad(grammar.field, f"{grammar.field}: {error}") from error

    async def _whole(self, answering: RequestStream) -> list[Delta]:
        try:
            async with asyncio.timeout(self.seconds_left(answering)):
                return await answering.whole()
        except TimeoutError:
            raise self.too_long() from None

    def seconds_left(self, answering: RequestStream) -> float:
        """Seconds until the deadline of the request."""
        return answering.began + self.limits.request_seconds - time.monotonic()

    def too_long(self) -> APIError:
        """The error of a request that exceeds `request_seconds`."""
        seconds = self.limits.request_seconds
        return APIError(
            TOO_LONG,
            f"no answer within {seconds:g} s; ask for fewer tokens, or later",
            code="timeout",
            headers={"x-should-retry": "false"},  # openai's client would retry twice at once
        )

    def ended(self, answering: RequestStream, id: str) -> None:
        """Cancels unfinished choices; records the ended request in the metrics and the log."""
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
        """The result of `read` for the JSON object in a body, computed in the reader thread."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._reader, lambda: read(object_of(body), self.model)
            )
        except RecursionError as error:  # some levels before that of the JSON parser
            raise bad("body", "the body is nested too deeply; send a flatter object") from error

    async def _body(self, request: Request) -> bytes:
        """The body; raises APIError for another content type, a large body and a slow client."""
        kind = request.headers.get("content-type", "")
        # Browsers let pages of other sites send other content types, or none, without a preflight.
        if kind.partition(";")[0].strip().lower() != JSON:
            message = f"content-type is {kind[:60] or 'missing'}; send {JSON}"
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
            message = f"the body did not arrive within {seconds:g} s; send it again"
            raise APIError(SLOW_BODY, message) from None
        if size > most:
            parts.clear()
            with contextlib.suppress(TimeoutError):  # a client that sends reads no reply
                async with asyncio.timeout(DISCARD_SECONDS):
                    while more and size < DISCARDED:
                        part, more = await _next_part(request)
                        size += len(part)
            message = f"the body has more than {most} bytes; send less at once"
            raise APIError(TOO_LARGE, message, code="request_too_large")
        return b"".join(parts)

    def _guarded(self, do: Handler) -> Handler:
        """Wraps a handler: checks the key, and converts exceptions to OpenAI's error format."""

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
        if not self._keys or request.scope["path"] in OPEN_PATHS:  # no header changes the path
            return
        if not is_bearer(request.headers.get("authorization", ""), self._keys):
            raise APIError(
                UNAUTHORIZED,
                "the API key is missing or wrong; send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _no_such(self, request: Request, error: Exception) -> Response:
        """The response to an unknown path or method."""
        status = error.status_code if isinstance(error, HTTPException) else FAULT
        path = request.scope["path"][:100]
        message = f"{path}: nothing answers there; see /v1/models, /v1/completions"
        if status == BAD_METHOD:
            message = f"{path} does not answer to {request.method}; see the header Allow"
        headers = error.headers if isinstance(error, HTTPException) else None
        self.metrics.replied(status)
        code = "not_found" if status == NO_SUCH else None
        return self.refused(APIError(status, message, code=code, headers=headers))

    def refusal_of(self, error: Exception) -> APIError:
        """An APIError as is; any other exception as status 500, with its location in the log."""
        if isinstance(error, APIError):
            return error
        self.log("error", what=place_of(error))
        return APIError(FAULT, "the server failed at this request")

    def refused(self, refusal: APIError) -> Response:
        """The response for an APIError; the log entry contains no user text."""
        self.log("refuse", status=refusal.status, param=refusal.param, code=refusal.code)
        return reply(refusal.content(), refusal.status, refusal.headers)


class EventStream(Response):
    """A streamed response: sends events until the request ends or the client disconnects."""

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
        except (ClientLeft, OSError):  # the client has disconnected
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
        except Exception as error:  # the status is already sent
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
        """Sends an event; raises ClientLeft for a client that disconnects or does not read."""
        try:
            async with asyncio.timeout(self._server.limits.send_seconds):
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            self._server.log("slow", id=self._replies.id)
            raise ClientLeft from None
        except OSError as error:
            raise ClientLeft from error


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; on a disconnect, cancels `work` and raises ClientLeft."""
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
    """The next part of a body, and whether more parts follow; raises ClientLeft on a disconnect."""
    message = await request.receive()
    if message["type"] == "http.disconnect":
        raise ClientLeft
    return message.get("body", b""), message.get("more_body", False)


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(as_json(content), status, headers, JSON)
