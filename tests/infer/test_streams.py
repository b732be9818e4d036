"""The standard streams: what a descriptor refuses, or does not take at once."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import pytest

from infer.cli import streams


@pytest.fixture
def pipe():
    """The two ends of a pipe that is full and does not block."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"." * 4096):
            pass
    yield reader, writer
    for each in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(each)


def test_a_pipe_that_does_not_block_gets_all(pipe):
    reader, writer = pipe
    stream = streams.writer("stdout", sys.__stdout__, writer)
    thread = threading.Thread(target=lambda: print("whole", file=stream, flush=True))
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    found = b""
    while not found.endswith(b"whole\n"):
        found += os.read(reader, 1 << 16)
    thread.join(10)


def test_errors_name_stdout_and_only_a_closed_pipe_ends_stderr(pipe):
    reader, writer = pipe
    full = os.open("/dev/full", os.O_WRONLY)
    print("dropped", file=streams.writer("stderr", sys.__stderr__, full), flush=True)
    with pytest.raises(OSError, match="stdout"):
        print(
            "refused", file=(stream := streams.writer("stdout", sys.__stdout__, full)), flush=True
        )
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        print("gone", file=(other := streams.writer("stderr", sys.__stderr__, writer)), flush=True)
    for each in (stream, other):  # so that they do not fail again when they are collected
        os.dup2(os.open(os.devnull, os.O_WRONLY), each.fileno())
    os.close(full)
