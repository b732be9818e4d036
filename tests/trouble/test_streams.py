"""Streams of a process: invalid UTF-8, closed streams, and letters that stdout lacks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from infer.info import ROOT
from tests.conftest import Done
from tests.meeting import wait_for
from tests.trouble.test_tokenizers import CHATML, VOCAB, WORDS, write_tokenizer

PLAIN = ("--mode", "plain", "--max-new-tokens", "3")


@pytest.fixture
def run_into(run, monkeypatch):
    """Runs a program in this process whose standard output is a file with an encoding."""

    def run_into(path: Path, encoding: str, *command: object) -> Done:
        with path.open("w", encoding=encoding) as file, monkeypatch.context() as patch:
            for name in ("stdout", "__stdout__"):
                patch.setattr(sys, name, file)
            done = run(*command)
            sys.stdout.flush()  # the program has opened the null device in place of a full one
        return done

    return run_into


def test_letters_that_stdout_lacks_are_escaped(run_into, pair, tmp_path):
    write_tokenizer(pair / "target", ["w0", *(f"é{index}" for index in range(1, VOCAB))])
    flags = ("--target", pair / "target", "--prompt-ids", "5,17,3", *PLAIN)
    done = run_into(tmp_path / "out", "ascii", "infer.generate", *flags)
    assert done.code == 0 and "\\xe9" in (tmp_path / "out").read_text("ascii"), done


def test_a_full_stdout_is_one_line(run_into):
    done = run_into(Path("/dev/full"), "utf-8", "infer.generate", "--help")
    assert "stdout: No space left on device" in done.refusal(75) and done.err.count("\n") == 1


@pytest.mark.parametrize("flag", ("--prompt", "--stop"))
def test_a_text_flag_that_is_not_utf8_is_refused(run, flag):
    line = run("infer.generate", "--prompt", "Hello", flag, "caf\udce9").refusal()
    assert f"{flag}: 'caf\\udce9' is not valid UTF-8" in line


def test_stdin_that_is_not_utf8_is_refused(run, pair, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    line = run("infer.generate", "--target", pair / "target").refusal()
    assert "not valid utf-8: 'caf\\udce9'" in line


@pytest.fixture
def target(pair) -> Path:
    write_tokenizer(pair / "target", WORDS, chat_template=CHATML)
    return pair / "target"


@pytest.mark.slow
def test_streams_that_are_closed_or_full_do_not_end_work(target):
    command = f"{sys.executable} -m infer.generate {' '.join(PLAIN)} --target {target} --prompt w7"
    done = subprocess.run(["bash", "-c", f"{command} <&- >&- 2>/dev/full"], cwd=ROOT)
    assert done.returncode == 0


# ---- servers -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_continues_after_the_reader_of_its_log_left(served, target, tmp_path):
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    first = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    flags = ("--target", target, "--slots", 1, "--max-tokens", 64, "--mode", "plain")
    with served("infer.serve", *flags, streams=f"<&- >&- 2>{fifo}") as (url, process):
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}

        def ask() -> int:
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code

        os.close(first)
        assert ask() == ask() == ask() == 200  # a line is written after its answer is sent
        second = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        lines = []

        def is_counted() -> bool:
            assert ask() == 200
            with contextlib.suppress(BlockingIOError):
                lines.extend(json.loads(each) for each in os.read(second, 1 << 16).splitlines())
            return any(line.get("lost_events", 0) for line in lines)

        wait_for(is_counted)
        assert "answer" in {line["event"] for line in lines}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        os.close(second)
