"""The program infer.serve: an early SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
from argparse import Namespace
from typing import Any

import httpx
import pytest

from infer.http.address import bind
from infer.http.run import serve_until_signal


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_requests_are_answered_at_a_hasty_end(numbers, capsys):
    asked, stopped = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.set()
            await stopped.wait()
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b"ends"})

    async def serve_one() -> tuple[int, int]:
        args = Namespace(host="127.0.0.1", port=0, tls_cert=None, tls_key=None, ready_file=None)
        with bind("127.0.0.1", 0) as listener:
            listener.listen()  # so that a client may connect before the server is ready
            rest = (("http", "/"), asyncio.Event().wait)  # a drain without an end
            serving = serve_until_signal(args, listener, app, *rest, stop=stopped.set)
            code = asyncio.create_task(serving)
            async with httpx.AsyncClient() as client:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                response = asyncio.create_task(client.get(url))
                await asked.wait()
                for number in numbers:
                    os.kill(os.getpid(), number)
                    await asyncio.sleep(0.05)
                return (await response).status_code, await code

    found = asyncio.run(asyncio.wait_for(serve_one(), 30))
    assert found == (503, 130 if signal.SIGINT in numbers else 0)
