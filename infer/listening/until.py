"""Runs an application until a signal comes: SIGTERM lets it drain, Ctrl-C does not."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from infer.listening.address import announce, unusable
from infer.listening.patience import PatientHttp
from infer.program import INTERRUPTED


async def serve_until_signal(
    args: argparse.Namespace,
    listener: socket.socket,
    app: Any,
    url: tuple[str, str],
    drain: Callable[[], Awaitable[None]],
    *,
    stop: Callable[[], object] | None = None,
    behind: Callable[[], Awaitable[None]] | None = None,
    **settings: Any,
) -> int:
    """Serves an application on a bound socket until a signal comes; returns the exit code.

    `args` has the flags of `add_address_flags`, and `url` what `announce` takes: scheme and path.
    After SIGTERM `drain` is awaited, unless a second signal ends the server at once. Then, and
    after Ctrl-C, `stop` tells those who are still being answered. `behind` runs while the server
    serves, and is cancelled at the first signal. `settings` are uvicorn's.
    """
    config = uvicorn.Config(
        app,
        http=PatientHttp,
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
    asked: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, number)
    listening = _Listening(config)
    serving = asyncio.create_task(listening.serve(sockets=[listener]))
    try:
        await listening.ready(serving)
    except OSError as error:  # another server bound this port, too, and listened first
        raise unusable(args.host, args.port, error) from error
    announce(args, listener, *url)
    beside = asyncio.create_task(behind()) if behind else None
    number = await asked.get()
    if beside:
        beside.cancel()
    if number == signal.SIGTERM:
        draining = asyncio.create_task(drain())
        again = asyncio.create_task(asked.get())  # a second signal ends the server at once
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
    if stop:
        stop()
    listening.should_exit = True
    await serving
    return INTERRUPTED if number == signal.SIGINT else 0


class _Listening(uvicorn.Server):
    """uvicorn's server without its handling of signals."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def ready(self, serving: asyncio.Task[None]) -> None:
        """Returns once connections are accepted; raises what went wrong otherwise."""
        while not self.started:
            if serving.done():
                serving.result()
                raise RuntimeError("the server ended before it listened")
            await asyncio.sleep(0.01)
