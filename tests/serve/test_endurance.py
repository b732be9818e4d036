"""A soak: infer.serve on the bundled pair, and clients that stay, leave, or send faults."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.meeting import wait_for
from tests.serve import served_program
from tests.serve.served_program import Ask, ServedProgram, answer, assert_nothing_is_held
from tests.serve.toy_server import CHATS, raw_post

pytestmark = pytest.mark.slow
SOAK_SECONDS = float(os.environ.get("MOA_SOAK_SECONDS", "300"))
MODE = ("--mode", "chain") if SOAK_SECONDS < 60 else ()  # auto has minutes of compiling


def disconnect(served: ServedProgram, draw: random.Random) -> None:
    """Disconnects before, in or after a request, now and then with a reset."""
    fields = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 100}
    fields |= {"ignore_eos": True, "stream": draw.random() < 0.7}
    whole = raw_post(CHATS, fields, Authorization=f"Bearer {served_program.KEY}")
    address = ("127.0.0.1", served.ready["port"])
    with socket.create_connection(address, served_program.WAIT_S) as made:
        if draw.random() < 0.5:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        made.sendall(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
        time.sleep(draw.uniform(0, 0.3))


def endless_clients(
    served: ServedProgram, asks: list[Ask], is_over: threading.Event
) -> list[Callable[[], int]]:
    """Returns clients that send requests until `is_over`; each returns its number of requests."""

    def again(do: Callable[[httpx.Client], None], receive_bytes: int = 1 << 18) -> int:
        with served.client(receive_bytes) as client:
            for count in itertools.count():
                if is_over.is_set():
                    return count
                do(client)

    def ask(client: httpx.Client) -> None:
        found = draw.choice(asks)
        served_program.assert_right(found, answer(client, found))

    def read_slowly(client: httpx.Client) -> None:
        found = dataclasses.replace(draw.choice(asks), stream=True, leaves_after=None)
        served_program.assert_right(found, answer(client, found, pause=0.02))

    draw = random.Random(1)
    doing = [ask] * 8 + [lambda _: disconnect(served, draw)] * 3
    slow = [functools.partial(again, read_slowly, 4096)] * 2
    return [*(functools.partial(again, each) for each in doing), *slow]


def memory_under(served: ServedProgram, running: list[Future[int]]) -> list[float]:
    """Returns MiB, read while clients run for SOAK_SECONDS without a compile in the server."""
    sizes, programs, begin = [], 0.0, time.monotonic()
    latest = begin + 3 * SOAK_SECONDS + 240
    while time.monotonic() < begin + SOAK_SECONDS and not any(each.done() for each in running):
        if (now := served.metric("moa:programs_total")) != programs:
            sizes, programs, begin = [], now, time.monotonic()
        assert time.monotonic() < latest, f"programs are still made after {programs:.0f}"
        pages = int(Path(f"/proc/{served.process.pid}/statm").read_text().split()[1])
        sizes.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        time.sleep(0.5)
    return sizes


def test_soak_of_clients_of_all_kinds(tmp_path):
    """Runs MOA_SOAK_SECONDS, by default five minutes: answers are right, and memory is flat."""
    asks = served_program.mixed(16, 1)
    assert all(ask.expected for ask in asks)  # computed now, not during the soak
    with served_program.program(tmp_path, *MODE) as served:
        opened = lambda: len(os.listdir(f"/proc/{served.process.pid}/fd"))
        assert_nothing_is_held(served)
        files, is_over = opened(), threading.Event()
        work = endless_clients(served, asks, is_over)
        with ThreadPoolExecutor(len(work)) as pool:
            running = [pool.submit(each) for each in work]
            try:
                sizes = memory_under(served, running)
            finally:
                is_over.set()
            counts = [client.result() for client in running]
        assert all(counts), counts
        assert_nothing_is_held(served)
        wait_for(lambda: opened() <= files + 2)
    # A pass allocates memory, so the least size shows memory that stays between passes.
    third = len(sizes) // 3
    before, after = sizes[third : 2 * third], sizes[2 * third :]
    assert min(after) < min(before) * 1.03 + 10, sizes
