"""infer.serve on the bundled pair as a process, and clients that stay or leave."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from infer.cli.flags import auto
from infer.info import ROOT
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, Sampling
from moa_jax.decode.detokenize import before_stop
from moa_jax.speculation.cost_table import save_costs
from tests.meeting import wait_for
from tests.serve.toy_server import COMPLETIONS, DEMO, TOKENIZER, VOCAB

HELLO = [{"role": "user", "content": "I need a cheap hotel."}]
HELLO_IDS = TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
KEY = "sk-of-a-test"
SLOTS, WAIT_S = 4, 120.0
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
LAWS = (
    Sampling(),
    Sampling(0.8, top_k=20, top_p=0.9),
    Sampling(1.1, min_p=0.02, repetition_penalty=1.2, logit_bias=((5, 2.0), (70, -100.0))),
)
EVERY = Sampling(1.1, 20, 0.9, 0.02, 1.2, ((5, 2.0),))  # one program for all of LAWS
STOPS: tuple[tuple[str, ...], ...] = ((), ("e ",), (), ("ing", "ll", "."))


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request, and the client's behavior while the answer arrives."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = True
    leaves_after: int | None = None  # events

    @property
    def body(self) -> dict[str, Any]:
        """Returns the body for /v1/completions."""
        settings = dataclasses.asdict(self.sampling)
        settings["logit_bias"] = {str(id): bias for id, bias in self.sampling.logit_bias}
        rest = {name: getattr(self, name) for name in ("max_tokens", "ignore_eos", "stream")}
        return settings | rest | {"prompt": self.prompt_ids, "stop": self.stops}

    @property
    def expected(self) -> tuple[str, str]:
        """Returns the text of plain decoding, and its finish reason."""
        text, end = alone(self.prompt_ids, self.max_tokens, self.sampling, self.ignore_eos)
        shown = before_stop(text, self.stops)
        return shown, "stop" if shown != text else end


@functools.cache
def plain() -> Session:
    return Session(load_target(DEMO / "target"), cache_rows=256)


@functools.cache  # clients repeat their requests
def alone(ids: tuple[int, ...], most: int, sampling: Sampling, ignore_eos: bool) -> tuple[str, str]:
    """Returns the text of plain decoding beside a row of all settings, and its finish reason."""
    prompts, stop_ids = [list(ids), [6]], [] if ignore_eos else None
    row, _ = plain().generate(prompts, [most, 1], stop_ids, [sampling, EVERY])
    return TOKENIZER.decode(row.token_ids, skip_special_tokens=True), row.finish_reason


def mixed(count: int, seed: int) -> list[Ask]:
    """Returns requests of mixed lengths, settings and seeds; every fourth client leaves early."""
    draw, asks = random.Random(seed), []
    for index in range(count):
        ids = draw.choices(range(6, VOCAB), k=draw.randrange(1, 60)) + HELLO_IDS * (index % 2)
        ask = Ask(
            prompt_ids=tuple(ids),
            max_tokens=draw.randrange(1, 40),
            sampling=dataclasses.replace(LAWS[index % len(LAWS)], seed=draw.randrange(1000)),
            stops=STOPS[index // 2 % len(STOPS)],
            stream=index % 3 > 0,
        )
        if index % 4 == 0:
            more = {"max_tokens": 50, "stream": True, "ignore_eos": True, "stops": ()}
            ask = dataclasses.replace(ask, leaves_after=draw.randrange(4), **more)
        asks.append(ask)
    return asks


class ServedProgram(NamedTuple):
    """The process, and the path of its log."""

    process: subprocess.Popen
    ready: dict
    log: Path

    def client(self, receive_bytes: int = 1 << 18) -> httpx.Client:
        """Returns one connection; with few `receive_bytes`, the server's writes block."""
        few = [(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)]
        url = self.ready["url"].removesuffix("/v1")
        transport = httpx.HTTPTransport(socket_options=few)
        return httpx.Client(base_url=url, headers=HEADERS, timeout=WAIT_S, transport=transport)

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0] == name)

    def is_idle(self) -> bool:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return not any(self.metric(name) for name in names)


@functools.cache
def store_costs(mesh: str) -> None:
    """Stores costs of rounds on a mesh; servers on few cores would take minutes to measure them."""
    target = plain().target
    drafter = load_drafter(DEMO / "draft", target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "mesh_of", lambda params: mesh)
        patch.setattr(auto, "name_of", lambda mesh: mesh)
        costs = auto.costs_of(target, drafter, None, None, "engine")
    ways = auto.ways_of(DraftShape(drafter.depth), drafter)
    for batch, way, length in itertools.product((1, 2, 4), ways, (1, 160)):
        costs.put(batch, way, length, 100.0 + 20.0 * way.num_drafted)
    save_costs(auto.folder(), costs)


def start_program(folder: Path, *flags: str) -> tuple[subprocess.Popen, dict]:
    """Starts infer.serve on the bundled pair, and waits until the server is ready."""
    if "--mesh" in flags:
        store_costs(flags[flags.index("--mesh") + 1])
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    (folder / "keys").write_text(f"# of tests\n{KEY}\n")
    command = [sys.executable, "-m", "infer.serve", "--ready-file", str(ready), "--slots", "4"]
    command += ["--api-key-file", str(folder / "keys"), "--max-tokens", "192", *flags]
    with (folder / "log").open("w") as log:
        program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log)
    try:
        wait_for(lambda: ready.exists() or program.poll() is not None, 600)
        assert program.poll() is None, (folder / "log").read_text()
    except AssertionError:
        program.kill()
        program.wait()
        raise
    return program, json.loads(ready.read_text())


@contextlib.contextmanager
def program(folder: Path, *flags: str, port: int = 0) -> Iterator[ServedProgram]:
    """Runs infer.serve for the block; SIGTERM ends the process with code 0."""
    process, ready = start_program(folder, "--port", str(port), *flags)
    try:
        yield ServedProgram(process, ready, folder / "log")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def answer(client: httpx.Client, ask: Ask, pause: float = 0.0) -> tuple[str, str]:
    """Returns the text and its finish reason, or "" if the client left before the end.

    A slow reader waits `pause` seconds after each event.
    """
    if not ask.stream:
        said = client.post(COMPLETIONS, json=ask.body)
        assert said.status_code == 200, said.text
        (choice,) = said.json()["choices"]
        return choice["text"], choice["finish_reason"]
    text, end = "", ""
    with client.stream("POST", COMPLETIONS, json=ask.body) as said:
        assert said.status_code == 200, said.read()
        lines = (line.removeprefix("data: ") for line in said.iter_lines() if line)
        for line in itertools.islice(lines, ask.leaves_after):
            time.sleep(pause)
            if line == "[DONE]":
                return text, end
            assert not end, "something came after the end"
            (choice,) = json.loads(line)["choices"]
            text, end = text + choice["text"], choice["finish_reason"] or ""
    assert ask.leaves_after is not None, "the stream ended without [DONE]"
    return text, end


def assert_right(ask: Ask, found: tuple[str, str]) -> None:
    """Asserts that an answer is plain decoding's, or a prefix of that if the client left."""
    assert found == ask.expected if found[1] else ask.expected[0].startswith(found[0]), ask


def answers_at_once(served: ServedProgram, asks: list[Ask], clients: int = 32) -> list[Any]:
    """Sends requests from `clients` clients, one after the other each; asserts all answers."""
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
    """Asserts that clients that stay get a finish reason, and most clients that leave do not."""
    ended = {stays: [] for stays in (True, False)}
    for ask, each in zip(asks, found, strict=True):
        ended[ask.leaves_after is None].append(bool(each[1]))
    assert all(ended[True]) and sum(ended[False]) < len(ended[False]) / 2


def assert_nothing_is_held(served: ServedProgram) -> None:
    """Asserts that no request runs or waits, all slots are usable, and nothing has failed."""
    wait_for(served.is_idle, WAIT_S)
    ask = Ask(tuple(HELLO_IDS), 150, Sampling(1.0, seed=3), ignore_eos=True, stream=False)
    most = 0
    with ThreadPoolExecutor(2 * SLOTS) as pool, served.client() as client:
        answers = [pool.submit(answer, client, ask) for _ in range(2 * SLOTS)]
        while not all(each.done() for each in answers):
            most = max(most, served.metric("vllm:num_requests_running"))
        for each in answers:
            assert_right(ask, each.result())
    assert most >= SLOTS
    wait_for(served.is_idle, WAIT_S)
    assert served.metric("moa:engine_failures_total") == 0
    events = [json.loads(line) for line in served.log.read_text().splitlines() if line[0] == "{"]
    assert not [event for event in events if event["event"] == "error"]
