"""Engines for tests, and the expected answers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from moa_jax import Session
from moa_jax.config import DraftShape, Sampling
from moa_jax.engine import Engine, Request, RequestOutput
from moa_jax.engine.program_cache import LOGPROBS, ProgramName
from tests.decode.test_chunks import drafter, target

NO_STOP: tuple[int, ...] = ()
CHAIN, TREE, LONG = DraftShape(3), DraftShape(3, 2, 4), DraftShape(5)
WAIT_S = 120.0
EVERY = Sampling(1.0, 9, 0.9, 0.1, 1.1, ((5, 1.0),), presence_penalty=0.5)  # all settings
LAWS = (
    Sampling(),
    Sampling(0.9, seed=4),
    Sampling(0.8, top_k=20, top_p=0.9, seed=3),
    Sampling(1.2, min_p=0.02, repetition_penalty=1.3, seed=9),
    Sampling(repetition_penalty=1.2, logit_bias=((5, 2.0), (7, float("-inf")))),
    Sampling(0.7, presence_penalty=0.5, frequency_penalty=0.8, seed=2),
)


class Listener:
    """Keeps the outputs of a request, in order.

    `at_first` is called at the first output, on the engine's thread: a command of `at_first` is
    executed before the answer ends, on a busy machine too. `at_end` is called at the last one.
    """

    def __init__(
        self,
        at_first: Callable[[], object] = lambda: None,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.all: list[RequestOutput] = []
        self._at_first, self._at_end = at_first, at_end
        self._end: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()

    def __call__(self, output: RequestOutput) -> None:
        self.all.append(output)
        try:
            if len(self.all) == 1:
                self._at_first()
        finally:
            if output.finish_reason:
                self._at_end()
                self._end.put(output)

    def wait(self) -> RequestOutput:
        return self._end.get(timeout=WAIT_S)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.all for token in output.token_ids]

    def assert_one_end(self) -> None:
        assert [bool(output.finish_reason) for output in self.all] == [False] * (
            len(self.all) - 1
        ) + [True]


@functools.cache
def plain() -> Session:
    return Session(target(), chunk=32, cache_rows=200)  # few programs serve all lengths


@functools.cache
def alone(request: Request) -> tuple[list[int], str]:
    """Returns the tokens of plain decoding, and their finish reason.

    Beside a row that uses all settings, so that one program serves all requests.
    """
    prompts, lengths = [list(request.prompt_ids), [5]], [request.max_new_tokens, 1]
    row, _ = plain().generate(prompts, lengths, list(request.stop_ids), [request.sampling, EVERY])
    return row.token_ids, row.finish_reason


def mixed(count: int, seed: int, longest: int = 90) -> list[Request]:
    """Returns requests of mixed lengths, settings and seeds; some of them end at a stop."""
    random, requests = np.random.default_rng(seed), []
    for index in range(count):
        prompt = tuple(random.integers(0, 61, random.integers(1, longest)).tolist())
        sampling = LAWS[index % len(LAWS)]
        stops = (11, 23) if index % 3 == 0 else ()
        requests.append(Request(prompt, int(random.integers(1, 40)), stops, sampling))
    return requests


FIRST: dict[Any, dict] = {}  # programs compiled before the start, for engines of the same programs


def engine_of(name: str | None, shape: DraftShape | None = CHAIN, **rest) -> Engine:
    settings = dict(num_slots=4, max_tokens=200, chunk=32) | rest
    found = Engine(target(), name and drafter(name), shape if name else None, **settings)
    key = (name, shape, *(settings.get(each) for each in ("num_slots", "chunk", "ways")))
    if name not in (None, "lookup"):  # no test asks these engines for log-probabilities
        first = [each for each in found.programs.first() if not scores(each)]
        found.programs.first = lambda: first
    found.programs.ready |= FIRST.get(key, {})
    found.prepare()
    FIRST[key] = dict(found.programs.ready)
    found._pacing.add_dummy_runs = lambda names: None  # most of a test is compiling
    found.programs.later = lambda: []
    return found


def scores(name: ProgramName) -> bool:
    """Whether a program returns log-probabilities."""
    return name.kind == "score" or name.rows == LOGPROBS


SERVING: dict[Any, Engine] = {}


def kept(key: Any, make: Callable[[], Engine]) -> Engine:
    """Returns an engine that runs until the end of a test file, because compiling is slow."""
    if key not in SERVING:
        engine = SERVING[key] = make()
        engine.session.background.submit = lambda *job, **rest: None  # it is used again
        engine.start()
    return SERVING[key]


def serving(name: str | None, shape: DraftShape | None = CHAIN) -> Engine:
    """Returns a cached engine with one draft shape."""
    return kept((name, shape), lambda: engine_of(name, shape))


def close_all() -> None:
    """Closes the cached engines."""
    for engine in SERVING.values():
        engine.close()
    SERVING.clear()


@contextlib.contextmanager
def at_once(engine: Engine) -> Iterator[None]:
    """Delays the engine until all requests of the block are submitted.

    Without the delay, one request may end before the next one arrives on a busy machine.
    """
    are_sent, execute = threading.Event(), engine._execute

    def held(command):
        are_sent.wait()
        execute(command)

    engine._execute = held
    try:
        yield
    finally:
        are_sent.set()
        engine._execute = execute


def answers(engine: Engine, requests: list[Request]) -> list[Listener]:
    """Submits all requests at once, and waits for all of them."""
    listeners = [Listener() for _ in requests]
    with at_once(engine):
        for request, listener in zip(requests, listeners, strict=True):
            engine.submit(request, listener)
    for listener in listeners:
        listener.wait()
    return listeners


def assert_as_alone(requests: list[Request], listeners: list[Listener]) -> None:
    for request, listener in zip(requests, listeners, strict=True):
        listener.assert_one_end()
        assert (listener.token_ids, listener.all[-1].finish_reason) == alone(request)


def failing(
    engine: Engine, monkeypatch, what: str, times: Collection[int], error: Exception | None = None
) -> None:
    """Makes the runs of the programs of this name fail at these indices, counted from 0."""
    run, count = engine.programs.run, itertools.count()

    def broken(name, *arrays):
        if name.kind == what and next(count) in times:
            raise error or RuntimeError("the device is on fire")
        return run(name, *arrays)

    monkeypatch.setattr(engine.programs, "run", broken)


def split(found: list[Listener]) -> tuple[list[int], list[int]]:
    """Returns the indices of requests that ended with an error, and of the others."""
    lost = [index for index, each in enumerate(found) if each.all[-1].finish_reason == "error"]
    for index in lost:
        assert "on fire" in found[index].all[-1].error
        found[index].assert_one_end()
    return lost, [index for index in range(len(found)) if index not in lost]
