"""A client of split decoding with a toy drafter, failing links, and a relay with faults."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import gc
import hashlib
import os
import random
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, serve

from infer.bench.network import PROFILES, Direction, Profile, Proxy, in_thread
from infer.split_client.answering import SplitClient
from infer.split_client.link import ServerAddress
from infer.split_client.state import AnswerEvent, ClientOptions, Counts
from infer.split_server.app import PATH, ConnectionLimits
from infer.split_server.sessions import ServerLimits
from moa_jax.config import DraftShape, Sampling
from moa_jax.split import protocol
from moa_jax.split.client_drafter import EXACT
from tests.meeting import PATIENCE, wait_for
from tests.split.split_server import PAIRING, SPECS, VOCAB, RunningSplit, next_token, rows_of

PROMPT = list(range(1, 21))
NEW = 60
CHAIN, TREE = ClientOptions(), ClientOptions(DraftShape(4, 2, 6))
OPTIONS = {
    "chain": CHAIN,
    "tree": TREE,
    "plain": ClientOptions(lengths=()),
    "stream": ClientOptions(lengths=(), stream=True),
    "no-ahead": ClientOptions(draft_ahead=False),
}
SECONDS = 60.0  # in which any answer ends, on a busy machine too


def guess(text: Sequence[int]) -> int:
    """Returns the toy drafter's token: the target's token, two times of three."""
    right = next_token(list(text))
    return (right + (hashlib.md5(repr(list(text)).encode()).digest()[0] % 3 == 0)) % VOCAB


def alone(text: Sequence[int], count: int) -> list[int]:
    """Returns the toy drafter's answer."""
    whole = list(text)
    for _ in range(count):
        whole.append(guess(whole))
    return whole[len(text) :]


class ToyDrafter:
    """`ClientDrafter` with a hash as its model; checks that its caches would hold the text."""

    def __init__(self, can_go_on: bool = True) -> None:
        self.leaves, self.cfg = SPECS, SimpleNamespace(vocab_size=VOCAB)
        self.functions = SimpleNamespace(draft_one=guess if can_go_on else None)
        self.reset(Sampling())

    def reset(self, sampling: Sampling, prompt_length: int = 0) -> None:
        self.rows: list[tuple[str, int]] = []  # source, and token

    def warm(self, counts: Sequence[int], shapes: Sequence[DraftShape] = ()) -> None:
        """Compiles nothing."""

    def _put(self, start: int, source: str, tokens: Sequence[int]) -> None:
        assert start <= len(self.rows), "a gap in the caches"
        self.rows[start : start + len(tokens)] = [(source, token) for token in tokens]

    def absorb(self, start: int, tokens: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        whole = [0] * start + list(tokens)
        for ours, theirs in zip(rows, rows_of(whole, start, len(tokens)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        if len(tokens) > EXACT:
            del self.rows[start:]
        self._put(start, "target", tokens)

    def absorb_nothing(self, tokens: Sequence[int], known: int = 0) -> None:
        self._put(known, "nothing", tokens[known:])

    def chain(self, text: Sequence[int], known: int, steps: int) -> list[int]:
        sources, tokens = zip(*self.rows[: len(text) - 1], strict=True) if text[1:] else ((), ())
        assert list(tokens) == list(text[:-1]), "the caches hold another text"
        assert "drafter" not in sources[:known] and "target" not in sources[known:]
        found = alone(text, steps)
        self._put(len(text) - 1, "drafter", [text[-1], *found[:-1]])
        return found

    def tree(self, text: Sequence[int], shape: DraftShape) -> tuple[list[int], list[int]]:
        """Returns a chain with a sibling of each node."""
        tokens, parents, at = [], [], 0
        for token in alone(text, shape.depth - 1):
            tokens += [token, (token + 1) % VOCAB]
            parents += [at, at]
            at = len(tokens) - 1
        return tokens[: shape.total_tokens], parents[: shape.total_tokens]


class ResettingProxy(Proxy):
    """A proxy that also resets connections, at any byte."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._until_reset: dict[Direction, int] = {}

    def reset_after(self, n_bytes: int, direction: Direction) -> None:
        """Resets one connection, at both ends, after `n_bytes` in one direction; happens once.

        Bytes of all connections count, and the connection that carries the last byte is reset. With
        0, the connection of the next byte is reset, and that byte is not forwarded.
        """
        self._in_loop(lambda: self._until_reset.update({direction: n_bytes}))

    def _heal(self) -> None:
        self._until_reset.clear()
        super()._heal()

    async def send(self, way: Direction, sink: socket.socket, data: bytes) -> None:
        left = self._until_reset.pop(way, None)
        if left is not None and left > len(data):
            self._until_reset[way] = left - len(data)
            left = None
        await super().send(way, sink, data[:left])
        if left is not None:
            await _taken(sink)
            raise ConnectionResetError


async def _taken(sink: socket.socket) -> None:
    """Waits until the peer's kernel has all data, because a reset discards the rest."""
    queued = bytearray(4)
    while True:
        fcntl.ioctl(sink, termios.TIOCOUTQ, queued)
        if not int.from_bytes(queued, sys.byteorder):
            return
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def linked(port: int, profile: Profile = PROFILES["loopback"]) -> Iterator[ResettingProxy]:
    """Runs a proxy before a server; waits at the end for timers that heal the proxy."""
    with in_thread(ResettingProxy("127.0.0.1", port, profile)) as proxy:
        try:
            yield proxy
        finally:
            for thread in threading.enumerate():
                if isinstance(thread, threading.Timer):
                    thread.join()


@dataclasses.dataclass
class AnswerSeen:
    """The result of one answer."""

    prompt: list[int]
    new: int  # requested
    tokens: list[int]
    done: str
    kept: list[bool]  # for each token
    counts: Counts
    events: list[AnswerEvent]
    shown: list[list[int]]  # the answer at each of them

    def check(self, policy: str = "verify", done: str = "length") -> None:
        """Asserts that each token is the target's next token, or a kept token of the drafter.

        With the policy verify, the answer is the target's.
        """
        assert self.done == done and (done != "length" or len(self.tokens) == self.new)
        for index, (token, kept) in enumerate(zip(self.tokens, self.kept, strict=True)):
            text = self.prompt + self.tokens[:index]
            assert token == (guess if kept else next_token)(text), f"token {index} {kept=}"
        assert policy == "keep" or not any(self.kept)
        settled: list[int] = []
        for event, shown in zip(self.events, self.shown, strict=True):
            assert shown[: len(settled)] == settled, "what was settled is rewritten"
            assert len(settled) <= event.verified <= len(shown)
            settled = shown[: event.verified]
        assert shown == self.tokens


def server_at(port: int, **changes: Any) -> ServerAddress:
    """Returns the address of a server for toy clients."""
    given = {"codec": "float32", "timeout": 5.0} | changes
    return ServerAddress(f"ws://127.0.0.1:{port}{PATH}", PAIRING, **given)


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if threads or open files remain; warnings of sockets fail by themselves."""
    before = _held()
    gc.freeze()  # later searches skip objects that exist before the test
    yield
    # A server closes its own sockets later.
    wait_for(lambda: all(now <= then for now, then in zip(_held(), before, strict=True)))


def _held() -> tuple[int, int]:
    """Counts threads, except a server's, and open files."""
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    own = [name for name in names if not name.startswith(("target", "encoder"))]
    return len(own), len(os.listdir("/proc/self/fd"))


async def answered(
    answering: SplitClient,
    prompt: Sequence[int],
    new: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling | None = None,
    act: Callable[[int, SplitClient], Any] = lambda index, answering: None,
    seconds: float = SECONDS,
) -> AnswerSeen:
    """Returns one answer; `act` is called after each event."""
    events: list[AnswerEvent] = []
    shown: list[list[int]] = []
    total = len(prompt) + new
    async with asyncio.timeout(seconds):
        async for event in answering.answer(prompt, total, stop_ids, sampling or Sampling()):
            events.append(event)
            shown.append(answering.text.answer)
            await asyncio.to_thread(act, len(events), answering)
    text = answering.text
    kept, done, counts = text.kept[len(prompt) :], answering.done, answering.counts
    return AnswerSeen(list(prompt), new, text.answer, done, kept, counts, events, shown)


async def left_alone() -> None:
    """Fails if tasks of a client run after its end."""
    end = time.monotonic() + PATIENCE
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        assert time.monotonic() < end, f"left behind: {others}"
        await asyncio.sleep(0.02)


def is_linked(answering: SplitClient) -> bool:
    """Returns whether an answer has a link now."""
    return answering.session.link is not None


def hurry(server: ServerAddress, options: ClientOptions, seconds: float = 0.5) -> None:
    """Lowers the time limit of messages for a client that runs."""
    object.__setattr__(server, "timeout", seconds)
    object.__setattr__(options, "patience", seconds)


def run_client(
    server: ServerAddress | None,
    options: ClientOptions,
    work: Callable[[SplitClient], Any],
    drafter: Any = None,
) -> Any:
    """Returns the result of `work` with a new client, and checks that the client leaves nothing."""

    async def working() -> Any:
        with ThreadPoolExecutor(1) as worker:
            answering = SplitClient(drafter or ToyDrafter(), server, options, worker)
            try:
                found = await work(answering)
            finally:
                await answering.session.close()
            await left_alone()
            return found

    return asyncio.run(working())


def ask(
    server: ServerAddress | None,
    options: ClientOptions,
    prompt: Sequence[int],
    new: int,
    drafter: Any = None,
    act: Callable[[int, SplitClient], Any] = lambda index, answering: None,
    haste: float | None = None,
    **given,
) -> AnswerSeen:
    """Returns one answer of a new client; `haste` limits its waits after the first event.

    The start may take longer: no second server exists, and the machine may be busy.
    """
    if haste is not None:
        server, options = dataclasses.replace(server), dataclasses.replace(options)

    def acting(index: int, answering: SplitClient) -> None:
        if haste is not None:
            hurry(server, options, haste)
        act(index, answering)

    work = lambda answering: answered(answering, prompt, new, act=acting, **given)
    return run_client(server, options, work, drafter)


def failing(proxy: ResettingProxy, seed: int, share: float) -> Callable[[int, SplitClient], None]:
    """Returns an `act` for `answered`: it cuts or resets the link after a share of the events."""
    chance = random.Random(seed)

    def act(index: int, answering: SplitClient) -> None:
        if chance.random() >= share:
            return
        kind = chance.choice(["cut", "refuse", "up", "down", "down", "down"])
        if kind in ("cut", "refuse"):
            getattr(proxy, kind)()
            threading.Timer(chance.uniform(0.0, 0.3), proxy.heal).start()
        else:
            proxy.reset_after(chance.choice([0, 1, 5, 40, 200, 1000, 3000]), kind)

    return act


# Maps one message to the messages that are forwarded instead; the second argument has all messages.
Spoil = Callable[[bytes, list[bytes]], list[Any]]
CLOSE, HANG = object(), object()
PASSING = ["busy", "draining", "gone", "state"]  # codes of faults after which a client tries again


def spoiler(seed: int, chances: int, share: float = 0.3) -> Spoil:
    """Returns a function that changes messages now and then, `chances` times in all."""
    chance, left = random.Random(seed), [chances]
    held: list[bytes] = []

    def spoil(message: bytes, seen: list[bytes]) -> list[Any]:
        ready = [message, *held]
        held.clear()
        if left[0] and len(seen) > 2 and chance.random() < share:  # the client has a server
            left[0] -= 1
            kind = chance.choice(["twice", "late", "never", "old", "text", "cut", "close", "fault"])
            if kind == "late":
                held.append(message)
                return []
            return {
                "twice": [message, message],
                "never": [],
                "old": [chance.choice(seen), message],
                "text": ["a text", message],
                "cut": [message[: chance.randrange(len(message))], message],
                "close": [CLOSE],
                "fault": [
                    protocol.encode(protocol.Fault(chance.choice(PASSING), "said so", False))
                ],
            }[kind]
        return ready

    return spoil


class Relay:
    """A server that forwards messages to and from the server at `port`; `spoil` changes replies.

    `spoil` gets a message and all before it, and returns what to send: bytes, text, CLOSE, HANG.
    """

    def __init__(self, port: int, spoil: Spoil, token: str = "") -> None:
        self._url = f"ws://127.0.0.1:{port}{PATH}"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._spoil = spoil
        self._seen: list[bytes] = []

    async def __aenter__(self) -> None:
        given = {"compression": None, "close_timeout": 0.5}
        self._listening = await serve(self._handle, "127.0.0.1", 0, **given)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def __aexit__(self, *exception: object) -> None:
        self._listening.close()
        await self._listening.wait_closed()

    async def _handle(self, client: ServerConnection) -> None:
        # Unread data delays the close frame.
        given = {"max_size": None, "proxy": None, "close_timeout": 0.5}
        with contextlib.suppress(websockets.WebSocketException, OSError):
            async with connect(self._url, additional_headers=self._headers, **given) as honest:
                ways = (self._up(client, honest), self._down(client, honest))
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _up(self, client: ServerConnection, honest: ClientConnection) -> None:
        async for message in client:
            await honest.send(message)

    async def _down(self, client: ServerConnection, honest: ClientConnection) -> None:
        async for message in honest:
            self._seen.append(message)
            for part in self._spoil(message, self._seen):
                if part is HANG:
                    await asyncio.sleep(SECONDS)
                if part is CLOSE:
                    return
                await client.send(part)


@contextlib.contextmanager
def relayed(port: int, spoil: Spoil, **given: Any) -> Iterator[int]:
    """Returns the port of a `Relay` in its own thread."""
    with in_thread(Relay(port, spoil, **given)) as relay:
        yield relay.port


@contextlib.contextmanager
def serving(slots: Any, pairing: dict[str, Any], vocab_size: int, **limits: Any) -> Iterator[Any]:
    """Runs a server over the slots of a real pair; asserts at the end that all slots are free."""
    slots.hold = threading.Event()
    sizes = dict(num_slots=len(slots._slots), max_nodes=slots.max_nodes - 1, chunk=slots.chunk)
    sizes |= dict(max_tokens=slots.max_tokens, max_prompt=slots.max_tokens // 2)
    server_limits, connection_limits = ServerLimits(**sizes), ConnectionLimits(**limits)
    with RunningSplit(slots, server_limits, connection_limits, pairing, vocab_size) as found:
        yield found
        assert found.metric("split_failures_total") == 0
