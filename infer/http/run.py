"""Runs an application until a signal: SIGTERM drains it, Ctrl-C does not."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from infer.cli.program import INTERRUPTED
from infer.http.address import announce, unusable
from infer.http.timeouts import TimedHttp


async def serve_until_signal(
    args: argparse.Namespace,
    listener: socket.socket,
    app: Any,
    url: tuple[str, str],
    drain: Callable[[], Awaitable[None]],
    *,
    stop: Callable[[], object] | None = None,
    background: Callable[[], Awaitable[None]] | None = None,
    **settings: Any,
) -> int:
    """Serves an application on a bound socket until a signal; returns the exit code.

    `args` has the flags of `add_address_flags`, and `url` is the scheme and the path. SIGTERM
    awaits `drain`; a second signal ends the drain. `stop` ends the remaining requests, also after
    Ctrl-C. `background` runs concurrently until the first signal. `settings` are uvicorn's.
    """
    config = uvicorn.Config(
        app,
        http=TimedHttp,
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
        **settings,
    )
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.ready(serving)
    except OSError as error:  # another server bound this port too, and listened first
        raise unusable(args.host, args.port, error) from error
    announce(args, listener, *url)
    beside = asyncio.create_task(background()) if background else None
    number = await signals.get()
    if beside:
        beside.cancel()
    if number == signal.SIGTERM:
        draining = asyncio.create_task(drain())
        again = asyncio.create_task(signals.get())  # a second signal ends the server at once
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
    if stop:
        stop()
    server.should_exit = True
    await serving
    return INTERRUPTED if number == signal.SIGINT else 0


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def ready(self, serving: asyncio.Task[None]) -> None:
        """Waits until connections are accepted; raises the error of a server that ends first."""
        while not self.started:
            if serving.done():
                serving.result()
                raise RuntimeError("the server ended before it listened")
            await asyncio.sleep(0.01)
