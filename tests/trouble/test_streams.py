"""Streams of a process: what is no UTF-8, what is closed, what a terminal cannot write."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.info import ROOT
from tests.conftest import Done

PLAIN = ("--mode", "plain", "--max-new-tokens", "3", "--prompt", "Hello")
BYTE = 133  # the bundled tokenizer's token of the byte C3, which alone is no letter


def shell(command: str, **variables: str) -> Done:
    """Runs a line of bash in which PY is our Python."""
    env = os.environ | {"PY": sys.executable} | variables
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True)
    return Done(done.returncode, *(each.decode() for each in (done.stdout, done.stderr)))


def test_a_bad_flag_is_one_line(run, start):
    for program in (run, start):
        line = program("infer.generate", "--max-new-tokens", "0").refusal()
        assert "'0' is not a whole number of at least 1" in line


def test_letters_that_stdout_lacks_are_escaped(start):
    bias = f"{BYTE}:100"
    done = start("infer.generate", *PLAIN, "--logit-bias", bias, PYTHONIOENCODING="ascii")
    assert done.code == 0 and done.out == "\\ufffd" * 3 + "\n", done


@pytest.mark.parametrize("flag", ("--prompt", "--stop"))
def test_a_text_flag_that_is_not_utf8_is_refused(run, flag):
    arguments = {"--prompt": "Hello"} | {flag: "caf\udce9"}
    line = run("infer.generate", *(each for pair in arguments.items() for each in pair)).refusal()
    assert f"{flag}: 'caf\\udce9' is not valid UTF-8" in line
    assert "--served-model-name" in run("infer.serve", "--served-model-name", "\udce9").refusal()


def test_stdin_that_is_not_utf8_is_refused(start):
    variables = {"PYTHONIOENCODING": "utf-8:strict"}
    line = start("infer.generate", stdin=b"caf\xe9", **variables).refusal()
    assert "not valid utf-8: 'caf\\udce9'" in line


def test_a_mark_of_byte_order_is_no_part_of_a_prompt(run, monkeypatch, tmp_path):
    def prompt_ids(text: str) -> list[int]:
        path = tmp_path / "stdin"
        path.write_text(text, encoding="utf-8")
        with path.open(encoding="utf-8") as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            done = run("infer.generate", "--mode", "plain", "--max-new-tokens", 1, "--json")
        return json.loads(done.out)["results"][0]["prompt_ids"]

    assert prompt_ids("\ufeffHello") == prompt_ids("Hello")


def test_streams_that_are_closed_or_full_do_not_end_work():
    done = shell(f"$PY -m infer.generate {' '.join(PLAIN)} <&- >&- 2>/dev/full")
    assert done == (0, "", "")
    done = shell("$PY -m infer.generate --help >/dev/full")
    assert "stdout: No space left on device" in done.refusal()
    assert done.err.count("\n") == 1


def test_a_run_whose_checkpoints_have_no_place_is_refused_at_the_start(run, tmp_path):
    flags = ("--run.directory", tmp_path / "caf\udce9", "--output", tmp_path / "final")
    line = run("train.distill", "--config", "configs/tiny.py", *flags).refusal()
    assert "run.directory" in line and "not valid UTF-8" in line


@pytest.mark.slow
def test_other_closed_streams():
    for redirected, says in {
        f"infer.generate {' '.join(PLAIN)} --json >/dev/full": "stdout: No space left on device",
        "infer.generate --version 1</dev/null": "cannot open stdout: bad file descriptor",
        "infer.generate <&-": "the prompt is empty",
    }.items():
        done = shell(f"$PY -m {redirected}")
        assert says in done.refusal() and done.err.count("\n") == 1, done
    assert shell("$PY -m train.plan --version >&- 2>&-") == (0, "", "")


@pytest.mark.slow
def test_a_chat_goes_on_after_a_line_that_is_not_utf8():
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "infer.generate", "--mode", "plain", "--max-new-tokens", "3"]
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    pipes = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as process:
        os.close(terminal)
        seen = b""
        for line in (b"Hello\n", b"caf\xe9\n", b"Goodbye\n", b"\n"):
            seen += _until(main, b"> ")
            os.write(main, line)
        with contextlib.suppress(OSError):  # the terminal is gone
            while part := os.read(main, 4096):
                seen += part
        assert process.wait() == 0, seen
    os.close(main)
    assert b"not valid UTF-8" in seen and b"Traceback" not in seen
    assert seen.count(b" tokens, ") == 2  # lines of figures: two answers


def _until(terminal: int, end: bytes) -> bytes:
    seen = b""
    while not seen.endswith(end):
        seen += os.read(terminal, 4096)
    return seen


@pytest.mark.slow
def test_folders_whose_names_are_not_utf8(start, tmp_path):
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    prompts.write_bytes(b'\xef\xbb\xbf{"prompt": "Hello"}\n')
    cache = {"XDG_CACHE_HOME": str(folder), "JAX_COMPILATION_CACHE_DIR": str(folder / "jax")}
    done = start("infer.generate", *PLAIN[:-2], "--prompts", prompts, **cache)
    assert done.code == 0 and done.out.strip(), done


# ---- servers -------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(name: str, redirections: str, folder: Path) -> Iterator[tuple[int, subprocess.Popen]]:
    """The port of a server that is ready, and its process."""
    ready = folder / f"{name}.json"
    command = f"exec $PY -m {name} --port 0 --ready-file {ready} --slots 1 --max-tokens 64"
    env = os.environ | {"PY": sys.executable}
    process = subprocess.Popen(["bash", "-c", f"{command} {redirections}"], cwd=ROOT, env=env)
    try:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield json.loads(ready.read_text())["port"], process
    finally:
        process.kill()
        process.wait()


def ask(port: int, path: str, body: object = None) -> int:
    """The status of a request; a body is sent as JSON."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def end(process: subprocess.Popen) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(30)


@pytest.mark.slow
def test_a_server_of_sessions_works_without_streams(tmp_path):
    with server("infer.server", "<&- >&- 2>&-", tmp_path) as (port, process):
        assert ask(port, "/health") == 200
        assert end(process) == 0


@pytest.mark.slow
def test_a_log_goes_on_after_its_reader_left(tmp_path):
    """Also: halves of surrogate pairs are refused, and the server goes on."""
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    first = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with server("infer.serve", f"<&- >&- 2>{fifo} --mode plain", tmp_path) as (port, process):
        os.close(first)
        chat = "/v1/chat/completions"
        usual = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert ask(port, chat, usual) == 200  # its line is lost
        half = "\ud800"
        for field, value in {
            "messages": [{"role": "user", "content": half}],
            "stop": [half],
            "model": half,
            "logit_bias": {half: 1},
        }.items():
            assert ask(port, chat, usual | {field: value}) == 400, field
        assert ask(port, chat, usual | {half: half}) == 200
        assert ask(port, "/tokenize", {"prompt": half}) == 400
        second = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        for _ in range(2):
            assert ask(port, chat, usual) == 200
        time.sleep(0.5)
        lines = [json.loads(line) for line in os.read(second, 1 << 16).splitlines()]
        assert [line["event"] for line in lines][-1] == "answer"
        assert sum(line.get("lost_events", 0) for line in lines) >= 1
        assert end(process) == 0
        os.close(second)
