"""Nothing is lost: infer.serve on the bundled pair, and clients that stay, leave, and misbehave.

`tests/decode/test_engine_ends.py` has the same without HTTP: what failing passes and cancelled
requests do to an engine.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from moa_jax import Session, load_target
from moa_jax.config import Sampling
from moa_jax.decode.detokenize import before_stop
from moa_jax.decode.session import row_of
from tests.serve.test_clients import HELLO_IDS, KEY, start_program
from tests.serve.test_protocol_errors import assert_fields_were_checked, send_malformed
from tests.serve.toy_server import CHATS, COMPLETIONS, DEMO, TOKENIZER, VOCAB, wait_for

pytestmark = pytest.mark.slow
SOAK_SECONDS = float(os.environ.get("MOA_SOAK_SECONDS", "300"))
SLOTS, WAIT_S = 4, 120.0
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
LAWS = (
    Sampling(),
    Sampling(0.9),
    Sampling(0.8, top_k=20, top_p=0.9),
    Sampling(repetition_penalty=1.2, logit_bias=((5, 2.0), (70, -100.0))),
    Sampling(1.1, min_p=0.02, presence_penalty=0.5, frequency_penalty=0.8),
)
STOPS: tuple[tuple[str, ...], ...] = ((), ("e ",), (), ("ing", "ll", "."))


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request, and what its client does with the answer."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    stream: bool = True
    logprobs: int | None = None
    leaves_after: int | None = None  # events

    @property
    def body(self) -> dict[str, Any]:
        """As /v1/completions takes it."""
        settings = dataclasses.asdict(self.sampling)
        settings["logit_bias"] = {str(id): bias for id, bias in self.sampling.logit_bias}
        rest = {name: getattr(self, name) for name in ("max_tokens", "n", "ignore_eos", "stream")}
        prompt = {"prompt": self.prompt_ids, "stop": self.stops, "logprobs": self.logprobs}
        return settings | rest | prompt

    @property
    def wanted(self) -> list[tuple[str, str]]:
        """Of each choice its text and how it ends: what plain decoding says alone."""
        found = []
        for index in range(self.n):
            of_row = (self.prompt_ids, self.max_tokens, row_of(self.sampling, index))
            text, end = alone(*of_row, self.ignore_eos)
            shown = before_stop(text, self.stops)
            found.append((shown, "stop" if shown != text else end))
        return found


@functools.cache
def plain() -> Session:
    return Session(load_target(DEMO / "target"), cache_rows=256)


@functools.cache  # clients ask for the same again
def alone(
    prompt_ids: tuple[int, ...], max_tokens: int, sampling: Sampling, ignore_eos: bool
) -> tuple[str, str]:
    """What plain decoding says alone, and how it ends."""
    stop_ids = [] if ignore_eos else None
    (row,) = plain().generate([list(prompt_ids)], max_tokens, stop_ids, [sampling])
    return TOKENIZER.decode(row.token_ids, skip_special_tokens=True), row.finish_reason


def mixed(count: int, seed: int) -> list[Ask]:
    """Requests of mixed lengths, settings and seeds; every fourth client leaves in the middle."""
    draw, asks = random.Random(seed), []
    for index in range(count):
        ids = draw.choices(range(6, VOCAB), k=draw.randrange(1, 60)) + HELLO_IDS * (index % 2)
        ask = Ask(
            prompt_ids=tuple(ids),
            max_tokens=draw.randrange(1, 40),
            sampling=dataclasses.replace(LAWS[index % len(LAWS)], seed=draw.randrange(1000)),
            stops=STOPS[index // 2 % len(STOPS)],
            n=3 if index % 9 == 0 else 1,
            stream=index % 3 > 0,
            logprobs=2 if index % 11 == 0 else None,
        )
        if index % 4 == 0:
            more = {"max_tokens": 50, "stream": True, "ignore_eos": True, "stops": ()}
            ask = dataclasses.replace(ask, leaves_after=draw.randrange(4), **more)
        asks.append(ask)
    return asks


class ServedProgram(NamedTuple):
    """The program, and where its log is."""

    process: subprocess.Popen
    ready: dict
    log: Path

    @contextlib.contextmanager
    def client(self, receive_bytes: int = 1 << 18) -> Iterator[httpx.Client]:
        """One connection; who receives few bytes at a time holds the server's writing up."""
        few = [(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)]
        settings = {"base_url": f"http://127.0.0.1:{self.port}", "headers": HEADERS}
        with httpx.Client(
            **settings, timeout=WAIT_S, transport=httpx.HTTPTransport(socket_options=few)
        ) as client:
            yield client

    @property
    def port(self) -> int:
        return self.ready["port"]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0] == name)

    def is_idle(self) -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return not any(self.metric(name) for name in names)

    @property
    def memory(self) -> float:
        """Resident MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def num_files(self) -> int:
        """Files and connections that the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[ServedProgram]:
    folder = tmp_path_factory.mktemp("served")
    process, ready = start_program(folder, "--port", "0", "--slots", str(SLOTS))
    try:
        yield ServedProgram(process, ready, folder / "log")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def answer(client: httpx.Client, ask: Ask, pause: float = 0.0) -> list[tuple[str, str]]:
    """Of each choice the text and how it ended; nothing for one whose end was not waited for.

    A slow reader takes a `pause` of so many seconds after each event.
    """
    if not ask.stream:
        said = client.post(COMPLETIONS, json=ask.body)
        assert said.status_code == 200, said.text
        return [(choice["text"], choice["finish_reason"]) for choice in said.json()["choices"]]
    texts, ends = [""] * ask.n, [""] * ask.n
    with client.stream("POST", COMPLETIONS, json=ask.body) as said:
        assert said.status_code == 200, said.read()
        lines = (line.removeprefix("data: ") for line in said.iter_lines() if line)
        for line in itertools.islice(lines, ask.leaves_after):
            time.sleep(pause)
            if line == "[DONE]":
                assert all(ends)
                break
            (choice,) = json.loads(line)["choices"]
            assert not ends[choice["index"]], "something came after the end"
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] = choice["finish_reason"] or ""
        else:
            assert ask.leaves_after is not None, "the stream ended without [DONE]"
    return list(zip(texts, ends, strict=True))


def assert_right(ask: Ask, found: list[tuple[str, str]]) -> None:
    """An answer is plain decoding's, and one that was left is a beginning of it."""
    for said, wanted in zip(found, ask.wanted, strict=True):
        assert said == wanted if said[1] else wanted[0].startswith(said[0]), ask


def answers_at_once(served: ServedProgram, asks: list[Ask], clients: int = 32) -> list[Any]:
    """What so many clients hear, who ask one thing after the other; all of it is right."""
    found: list[Any] = [None] * len(asks)

    def one(number: int) -> None:
        with served.client() as client:
            for index in range(number, len(asks), clients):
                found[index] = answer(client, asks[index])

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))
    for ask, each in zip(asks, found, strict=True):
        assert_right(ask, each)
    return found


def assert_left(asks: list[Ask], found: list[Any]) -> None:
    """Who stays hears an end; of those who leave few do, where all came in one event or two."""
    ended = {stays: [] for stays in (True, False)}
    for ask, each in zip(asks, found, strict=True):
        ended[ask.leaves_after is None].append(all(end for _, end in each))
    assert all(ended[True]) and sum(ended[False]) < len(ended[False]) / 2


def assert_nothing_is_held(served: ServedProgram) -> None:
    """Nobody sits or waits, every slot can be taken, and no pass or request has failed."""
    wait_for(served.is_idle, WAIT_S)
    ask = Ask(tuple(HELLO_IDS), 150, Sampling(1.0, seed=3), ignore_eos=True, stream=False)
    most = 0
    with ThreadPoolExecutor(3 * SLOTS) as pool, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(served.client()) for _ in range(3 * SLOTS)]
        answers = [pool.submit(answer, client, ask) for client in clients]
        while not all(each.done() for each in answers):
            most = max(most, served.metric("vllm:num_requests_running"))
        for each in answers:
            assert_right(ask, each.result())
    assert most >= SLOTS
    wait_for(served.is_idle, WAIT_S)
    assert served.metric("moa:engine_failures_total") == 0
    events = [json.loads(line) for line in served.log.read_text().splitlines() if line[0] == "{"]
    assert not [event for event in events if event["event"] == "error"]


def test_nothing_is_lost_over_http(served):
    """200 requests from 32 clients, a quarter of which close the connection in mid-stream."""
    asks = mixed(200, 1)
    found = answers_at_once(served, asks)
    assert_left(asks, found)
    ends = collections.Counter(end for each in found for _, end in each)
    assert ends["stop"] > 20 and ends["length"] > 20
    assert_nothing_is_held(served)


def test_a_thousand_malformed_bodies_leave_the_engine_as_it_was(served):
    def some(seed: int) -> collections.Counter[int]:
        with served.client() as client:
            return send_malformed(client, random.Random(seed), 1000 // SLOTS)

    with ThreadPoolExecutor(SLOTS) as pool:
        statuses = sum(pool.map(some, range(SLOTS)), collections.Counter())
    assert_fields_were_checked(statuses)
    assert_nothing_is_held(served)


# ---- a soak -------------------------------------------------------------------------------


def vanish(served: ServedProgram, draw: random.Random) -> None:
    """Leaves before, in or after a request, now and then without a word."""
    path = draw.choice((COMPLETIONS, CHATS))
    fields = {"prompt": HELLO_IDS, "messages": [{"role": "user", "content": "Hello."}]}
    stream = draw.random() < 0.7
    data = json.dumps(fields | {"max_tokens": 100, "ignore_eos": True, "stream": stream}).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(data)}\r\n\r\n"
    whole = head.encode() + data
    with socket.create_connection(("127.0.0.1", served.port), WAIT_S) as made:
        if draw.random() < 0.5:  # a reset instead of an end
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if draw.random() < 0.3:
            made.sendall(whole[: draw.randrange(len(whole))])
            return
        made.sendall(whole)
        if stream:
            made.recv(draw.randrange(1, 4000))
        time.sleep(draw.uniform(0, 0.3))


def crowd(
    served: ServedProgram, asks: list[Ask], is_over: threading.Event
) -> list[Callable[[], int]]:
    """Clients that come until it is over, each a function that says how often it came."""

    def again(do: Callable[[int, httpx.Client], None], receive_bytes: int) -> int:
        with served.client(receive_bytes) as client:
            for count in itertools.count():
                if is_over.is_set():
                    return count
                do(count, client)

    def asking(number: int, pause: float, count: int, client: httpx.Client) -> None:
        ask = asks[(number * 7 + count) % len(asks)]
        if pause:
            ask = dataclasses.replace(ask, stream=True, leaves_after=None)
        assert_right(ask, answer(client, ask, pause))

    def other(do: Callable[..., Any], draw: random.Random, count: int, client: Any) -> None:
        do(client, draw)

    damage = lambda client, draw: send_malformed(client, draw, 1)
    leave = lambda client, draw: vanish(served, draw)
    part, usual, few = functools.partial, 1 << 18, 4096
    return [
        *(part(again, part(asking, number, 0.0), usual) for number in range(8)),
        *(part(again, part(asking, number, 0.02), few) for number in range(2)),
        *(part(again, part(other, damage, random.Random(i)), usual) for i in range(2)),
        *(part(again, part(other, leave, random.Random(i)), usual) for i in range(2)),
    ]


def memory_under(served: ServedProgram, running: list[Future[int]]) -> list[float]:
    """MiB, read while clients run for SOAK_SECONDS in which the server makes no program."""
    sizes, programs, begin = [], 0.0, time.monotonic()
    latest = begin + 3 * SOAK_SECONDS + 120
    while time.monotonic() < begin + SOAK_SECONDS and not any(each.done() for each in running):
        if (now := served.metric("moa:programs_total")) != programs:
            sizes, programs, begin = [], now, time.monotonic()
        assert time.monotonic() < latest, f"programs are still made after {programs:.0f}"
        sizes.append(served.memory)
        time.sleep(0.5)
    return sizes


def test_soak_of_clients_of_all_kinds(served):
    """For MOA_SOAK_SECONDS, five minutes by default: right answers, and memory is flat."""
    asks = mixed(40, 1)
    for ask in asks:
        assert ask.wanted  # so that no time of the soak is spent here
    assert_nothing_is_held(served)
    files, is_over = served.num_files, threading.Event()
    work = crowd(served, asks, is_over)
    with ThreadPoolExecutor(len(work)) as pool:
        running = [pool.submit(each) for each in work]
        try:
            sizes = memory_under(served, running)
        finally:
            is_over.set()
        counts = [client.result() for client in running]
    assert all(counts), counts
    assert_nothing_is_held(served)
    wait_for(lambda: served.num_files <= files + 2)
    # A pass needs memory for itself, so what stays between passes is seen in the least size.
    third = len(sizes) // 3
    before, after = sizes[third : 2 * third], sizes[2 * third :]
    assert min(after) < min(before) * 1.03 + 10, sizes
    assert served.process.poll() is None
