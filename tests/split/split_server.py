"""A server on a free port in a thread, over slots without a model, and a minimal client."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from typing import Any

import httpx
import numpy as np
from websockets.sync.client import ClientConnection, connect

from infer.split_server.app import PATH, ConnectionLimits, SplitServer
from infer.split_server.metrics import ServerMetrics
from infer.split_server.service import Service
from infer.split_server.sessions import ServerLimits
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from moa_jax.split import protocol, rows
from moa_jax.split.server_target import NODES, Reply, Slot
from tests.meeting import PATIENCE, wait_for
from tests.server_thread import ServerThread

VOCAB = 97
SPECS = [rows.LeafSpec((2, 4), np.float32), rows.LeafSpec((3,), np.float32)]
PAIRING = {"method": "toy", "vocab_size": VOCAB, "target_sha256": "ab" * 32}
LIMITS = protocol.MessageLimits(
    max_tokens=1 << 16, max_nodes=63, max_rows=1 << 12, max_bytes=1 << 26
)


def next_token(tokens: list[int]) -> int:
    """Returns the toy target's next token: a hash of the whole text."""
    return hashlib.sha256(repr(tokens).encode()).digest()[0] % VOCAB


def plain(prompt: list[int], count: int) -> list[int]:
    """Returns the toy target's answer."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


def rows_of(tokens: list[int], start: int, count: int, width: int = 1) -> list[np.ndarray]:
    """Returns rows that identify their token and its position."""
    values = np.array([tokens[i] + i / 1024 for i in range(start, start + count)], np.float32)
    shapes = [(spec.shape[0] * width, *spec.shape[1:]) for spec in SPECS]
    return [
        np.broadcast_to(values.reshape(-1, *[1] * len(shape)), (count, *shape)) for shape in shapes
    ]


class ToySlots:
    """`Slots` with a hash as the target; slow, failing and wide on demand; records its calls."""

    def __init__(self, num_slots: int = 4, chunk: int = 8, width: int = 1) -> None:
        self.slots: list[Slot | None] = [None] * num_slots
        self.chunk, self.width = chunk, width
        self.seconds = 0.0
        self.error: Exception | None = None
        self.hold = threading.Event()  # cleared: the worker waits
        self.hold.set()
        self.diary: list[tuple] = []
        self.threads: set[str] = set()

    def _work(self, *entry: object) -> None:
        self.diary.append(entry)
        self.threads.add(threading.current_thread().name)
        assert self.hold.wait(PATIENCE)
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error

    def open(self, sampling: Sampling, stop_ids: list[int], total: int, prompt_length: int) -> int:
        self.diary.append(("open",))
        index = self.slots.index(None)
        self.slots[index] = Slot(sampling, frozenset(stop_ids), total, prompt_length)
        return index

    def close(self, slot: int) -> None:
        assert self.slots[slot] is not None
        self.diary.append(("close", slot))
        self.slots[slot] = None

    def padded(self, num_nodes: int) -> int:
        return next(size for size in NODES if size >= num_nodes)

    def recover(self) -> bool:
        return False

    def read(self, slot: int, tokens: list[int], *, pick_root: bool) -> Reply:
        self._work("read", slot, len(tokens))
        session = self.slots[slot]
        text = [*session.tokens, *tokens]
        start, end = session.length, len(text) - (not pick_root)
        if len(text) + pick_root > session.total or end - start > self.chunk:
            raise InputError("too many tokens")
        made = rows_of(text, start, end - start, self.width)
        news = [*tokens, next_token(text)] if pick_root else list(tokens)
        session.tokens += news
        session.length = end
        return Reply(start, end - start, news, self._done(session), made)

    def verify(self, requests: list) -> list[Reply]:
        self._work("verify", *(request.slot for request in requests))
        return [self._verify(self.slots[r.slot], r.tokens, r.parents) for r in requests]

    def _verify(self, session: Slot, tokens: list[int], parents: list[int]) -> Reply:
        text, node, start = list(session.tokens), 0, session.length
        while len(text) < session.total:
            text.append(next_token(text))
            children = [i + 1 for i, parent in enumerate(parents) if parent == node]
            node = next((c for c in children if tokens[c - 1] == text[-1]), None)
            if node is None or text[-1] in session.stop_ids:
                break
        news = text[len(session.tokens) :]
        session.tokens, session.length = text, start + len(news)
        made = rows_of(text, start, len(news), self.width)
        return Reply(start, len(news), news, self._done(session), made)

    def _done(self, session: Slot) -> str:
        if session.tokens[-1] in session.stop_ids:
            return "stop"
        return "length" if len(session.tokens) >= session.total else ""


class RunningSplit(ServerThread):
    """A server of split decoding; its slots end their pauses when it stops."""

    wait = staticmethod(wait_for)

    def __init__(
        self,
        slots: ToySlots,
        server_limits: ServerLimits,
        limits: ConnectionLimits,
        pairing: dict[str, Any] = PAIRING,
        vocab_size: int = VOCAB,
    ) -> None:
        super().__init__()
        self.slots = slots
        self.service = Service(slots, server_limits, ServerMetrics(), self.log)
        self.server = SplitServer(self.service, pairing, vocab_size, limits, self.log)
        self.serve(
            self.server.app,
            ws="websockets-sansio",
            ws_max_size=self.server.limits.max_message_bytes,
            ws_per_message_deflate=False,
            lifespan="on",
        )

    def __exit__(self, *exception: object) -> None:
        self.slots.hold.set()
        super().__exit__(*exception)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers=headers)


def running(
    slots: ToySlots | None = None, limits: ConnectionLimits | None = None, **server_limits
) -> RunningSplit:
    """Returns a server for a `with` block."""
    slots = slots or ToySlots()
    given = {"num_slots": len(slots.slots), "chunk": slots.chunk, "max_tokens": 512} | server_limits
    return RunningSplit(slots, ServerLimits(**given), limits or ConnectionLimits())


class Client:
    """Sends Hello, then the messages of a test; closes its socket at the end of the block."""

    def __init__(self, server: RunningSplit, hello: bool = True, codec: str = "float32", **options):
        url = f"ws://127.0.0.1:{server.port}{PATH}"
        self._stack = contextlib.ExitStack()
        self.socket: ClientConnection = self._stack.enter_context(
            connect(url, compression=None, **options)
        )
        self.session = ""
        if hello:
            self.send(protocol.Hello("a test", PAIRING, codec, False))
            self.receive()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def drop(self) -> None:
        """Closes the link without a goodbye."""
        with contextlib.suppress(OSError):  # the server closed first
            self.socket.socket.shutdown(socket.SHUT_RDWR)
        self._stack.close()

    def send(self, message: object) -> None:
        self.socket.send(message if isinstance(message, (bytes, str)) else protocol.encode(message))

    def receive(self, seconds: float = PATIENCE):
        return protocol.decode_down(self.socket.recv(seconds), LIMITS)

    def reply(self) -> list[protocol.Committed]:
        """Returns all parts of one reply."""
        parts = [self.receive()]
        while isinstance(parts[-1], protocol.Committed) and parts[-1].more:
            parts.append(self.receive())
        return parts

    def open(self, tokens: list[int], total: int = 400, **changes) -> list[protocol.Committed]:
        self.send(opening(tokens, total, **changes))
        opened = self.receive()
        if not isinstance(opened, protocol.Opened):
            return [opened]
        self.session = opened.session
        return self.reply()

    def resume(self, *fields):
        """Returns the first answer to Resume."""
        self.send(protocol.Resume(*fields))
        return self.receive()

    def draft(self, seq: int, tokens: list[int] = (), parents: list[int] | None = None):
        chain = list(range(len(tokens)))
        self.send(protocol.Verify(seq, list(tokens), chain if parents is None else parents))
        (*_, verdict) = self.reply()  # rows of many bytes come in several parts
        return verdict


def opening(tokens: list[int], total: int = 400, **changes) -> protocol.Open:
    fields = dict(seq=0, tokens=tokens, prompt_length=len(tokens), root_given=False, known=0)
    fields |= dict(total=total, stop_ids=[], sampling=protocol.sampling_fields(Sampling()))
    return protocol.Open(**fields | changes)
