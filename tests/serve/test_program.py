"""The program infer.serve: what it refuses at once, and how it listens."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from infer import serve
from infer.cli.program import run
from infer.http.address import bind
from infer.http.auth import is_bearer, read_keys
from infer.http.run import serve_until_signal
from moa_jax.errors import InputError


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Files that flags name, most of them bad."""
    texts = {"keys": "# two\nfirst\n\nsecond\n", "empty": "# none\n", "words": "two words"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in (*texts, "absent")}


REFUSED = {  # flags, and what the one line says
    "--host 0.0.0.0": "lets other machines in; give --api-key-file, or --open",
    "--api-key-file {absent}": "no such file",
    "--api-key-file {empty}": "it holds no keys; write one a line",
    "--api-key-file {words}": "each one word of printable ASCII",
    "--tls-cert {keys}": "no certificate with its key",
    "--tls-key {keys}": "--tls-key without --tls-cert",
    "--port 70000": "not a port from 0 to 65535",
    "--slots 0": "at least 1",
    "--prefix-bytes -1": "not a whole number of at least 0",
    "--request-seconds 0": "not a number above 0",
    "--ready-file {absent}/x.json": "no file can be written there; choose another path",
    "--port 0 --target {absent} --draft {absent}": "absent is not a folder",
    "--port 0 --target {absent} --method eagle": "--method eagle describes a drafter; name it",
    "--port 0 --mode tree --sampled-drafts": "noise",
    "--port 0 --mode plain --max-prompt 5000": "--max-prompt 5000: prompts of at most 1023 tokens",
    "--port 0 --mode plain --max-tokens 1": "max_tokens is 1; choose from 2 to 1024",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_flags_are_refused_with_one_line(line, files, capsys):
    with pytest.raises(SystemExit) as exit:
        run(serve.main, line.format(**files).split())
    shown = capsys.readouterr()
    assert (exit.value.code, shown.out) == (2, "")
    *notices, last = shown.err.splitlines()
    assert REFUSED[line] in last and all("Traceback" not in notice for notice in notices)


def test_a_port_in_use_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit):
            run(serve.main, ["--port", str(port)])
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err


def test_small_answers_are_sent_at_once():
    async def is_at_once() -> bool:
        with bind("127.0.0.1", 0) as listener:
            accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
            server = await asyncio.start_server(
                lambda _, writer: accepted.put_nowait(writer), sock=listener
            )
            async with server:
                _, client = await asyncio.open_connection(*listener.getsockname())
                writer = await accepted.get()
                made = writer.get_extra_info("socket")
                found = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                for each in (client, writer):
                    each.close()
                    await each.wait_closed()
                return bool(found)

    assert asyncio.run(is_at_once())


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]])
def test_who_is_answered_hears_of_a_hasty_end(numbers, capsys):
    asked, told = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            asked.set()
            await told.wait()
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b"ends"})

    async def serve_one() -> tuple[bytes, int]:
        args = Namespace(host="127.0.0.1", port=0, tls_cert=None, tls_key=None, ready_file=None)
        with bind("127.0.0.1", 0) as listener:
            forever = asyncio.Event().wait
            serving = asyncio.create_task(
                serve_until_signal(args, listener, app, ("http", "/"), forever, stop=told.set)
            )
            while "listening" not in capsys.readouterr().out:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asked.wait()
            for number in numbers:
                os.kill(os.getpid(), number)
                await asyncio.sleep(0.05)
            said = await reader.read()
            writer.close()
            return said, await serving

    said, code = asyncio.run(asyncio.wait_for(serve_one(), 30))
    assert said.startswith(b"HTTP/1.1 503 ") and b"ends" in said
    assert code == (130 if signal.SIGINT in numbers else 0)


def test_keys_are_read_and_compared(files):
    keys = read_keys(files["keys"])
    assert keys == ("first", "second")
    assert is_bearer("Bearer first", keys) and is_bearer("bearer second", keys)
    for header in ("", "first", "Bearer", "Bearer ", "Bearer firs", "Bearer first ", "Basic first"):
        assert not is_bearer(header, keys)
    assert not is_bearer("Bearer é", keys)
    Path(files["keys"]).write_bytes(b"\xef\xbb\xbffirst\r\n\r\nsecond\r\n")  # as Windows has it
    assert read_keys(files["keys"]) == keys
    with pytest.raises(InputError, match="no keys"):
        read_keys(files["empty"])


@pytest.mark.parametrize("target, name", [(None, "moa-jax-demo"), ("org/Some-7B", "org/Some-7B")])
def test_a_model_has_the_name_of_its_target(target, name, tmp_path):
    assert serve._name_of(target) == name
    (tmp_path / "mine").mkdir()
    assert serve._name_of(f"{tmp_path}/mine/") == "mine"
