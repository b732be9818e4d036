"""Streams of a process: invalid UTF-8, closed streams, and letters that stdout lacks."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time

import httpx
import pytest

from infer.info import ROOT
from tests.conftest import Done

PLAIN = ("--mode", "plain", "--max-new-tokens", "3", "--prompt", "Hello")
BYTE = 133  # the bundled tokenizer's token of the byte C3, which alone is no letter


def shell(command: str) -> Done:
    """Runs a line of bash; PY is the Python of the tests."""
    env = os.environ | {"PY": sys.executable}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True)
    return Done(done.returncode, *(each.decode() for each in (done.stdout, done.stderr)))


def test_letters_that_stdout_lacks_are_escaped(start):
    bias = f"{BYTE}:100"
    done = start("infer.generate", *PLAIN, "--logit-bias", bias, PYTHONIOENCODING="ascii")
    assert done.code == 0 and done.out == "\\ufffd" * 3 + "\n", done


@pytest.mark.parametrize("flag", ("--prompt", "--stop"))
def test_a_text_flag_that_is_not_utf8_is_refused(run, flag):
    line = run("infer.generate", "--prompt", "Hello", flag, "caf\udce9").refusal()
    assert f"{flag}: 'caf\\udce9' is not valid UTF-8" in line


def test_stdin_that_is_not_utf8_is_refused(start):
    variables = {"PYTHONIOENCODING": "utf-8:strict"}
    line = start("infer.generate", stdin=b"caf\xe9", **variables).refusal()
    assert "not valid utf-8: 'caf\\udce9'" in line


def test_streams_that_are_closed_or_full_do_not_end_work():
    done = shell(f"$PY -m infer.generate {' '.join(PLAIN)} <&- >&- 2>/dev/full")
    assert done == (0, "", "")
    done = shell("$PY -m infer.generate --help >/dev/full")
    assert "stdout: No space left on device" in done.refusal(75)
    assert done.err.count("\n") == 1


@pytest.mark.slow
def test_a_chat_continues_after_a_line_that_is_not_utf8():
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "infer.generate", "--mode", "plain", "--max-new-tokens", "3"]
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    pipes = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
        os.close(terminal)
        seen = b""
        for line in (b"caf\xe9\n", b"Goodbye\n", b"\n"):
            seen += _until(main, b"> ")
            os.write(main, line)
        with contextlib.suppress(OSError):  # the terminal is gone
            while part := os.read(main, 4096):
                seen += part
        assert process.wait() == 0, seen
    os.close(main)
    assert b"not valid UTF-8" in seen and b"Traceback" not in seen
    assert seen.count(b" tokens, ") == 1  # a line of figures: one answer


def _until(terminal: int, end: bytes) -> bytes:
    seen = b""
    while not seen.endswith(end):
        seen += os.read(terminal, 4096)
    return seen


# ---- servers -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_continues_after_the_reader_of_its_log_left(served, tmp_path):
    """Halves of surrogate pairs are refused as well, and the server continues."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    first = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    flags = ("--slots", 1, "--max-tokens", 64, "--mode", "plain")
    with served("infer.serve", *flags, streams=f"<&- >&- 2>{fifo}") as (url, process):
        usual = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}

        def ask(**fields: object) -> int:
            body, kind = json.dumps(usual | fields), {"content-type": "application/json"}
            chat = f"{url}/v1/chat/completions"
            return httpx.post(chat, content=body, headers=kind, timeout=60).status_code

        os.close(first)
        assert ask() == 200  # its line is lost
        half = "\ud800"
        assert ask(messages=[{"role": "user", "content": half}]) == 400
        assert ask(stop=[half]) == ask(model=half) == ask(logit_bias={half: 1}) == 400
        second = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        assert ask() == ask() == 200
        time.sleep(0.5)
        lines = [json.loads(line) for line in os.read(second, 1 << 16).splitlines()]
        assert [line["event"] for line in lines][-1] == "answer"
        assert sum(line.get("lost_events", 0) for line in lines) >= 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        os.close(second)
