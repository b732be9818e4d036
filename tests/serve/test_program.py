"""The program infer.serve: refused flags, and an early SIGTERM."""

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

REFUSED = {  # flags, and a part of the error
    "--host 0.0.0.0": "lets other machines in; give --api-key-file, or --open",
    "--api-key-file TMP/absent": "no such file",
    "--api-key-file TMP/empty": "it holds no keys; write one a line",
    "--api-key-file TMP/words": "each one word of printable ASCII",
    "--port 70000": "not a port from 0 to 65535",
    "--request-seconds 0": "not a number above 0",
    "--port 0 --mode plain --max-prompt 5000": "--max-prompt 5000: prompts of at most 1023 tokens",
    "--port 0 --mode plain --max-tokens 1": "max_tokens is 1; choose from 2 to 1024",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_flags_are_refused_with_one_line(line, tmp_path, run):
    for name, text in {"empty": "# none\n", "words": "two words"}.items():
        (tmp_path / name).write_text(text)
    flags = line.replace("TMP", str(tmp_path)).split()
    assert REFUSED[line] in run("infer.serve", *flags).refusal()


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
