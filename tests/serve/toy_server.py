"""A server on a free port in a thread, over an engine without a model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from infer.cli.flags.pair import DEMO
from infer.openai.app import OpenAIServer, ServingLimits
from infer.openai.metrics import ServingMetrics
from infer.openai.model import Model
from moa_jax.config import DraftShape
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.logprobs import TokenLogprob
from moa_jax.engine import EngineStats, QueueFull, Request, RequestOutput
from tests.meeting import PATIENCE
from tests.server_thread import ServerThread

VOCAB, EOS, FIRST = 2048, 4, 6  # of the bundled tokenizer; ids below FIRST are special tokens
TOKENIZERS = TOKENIZER, TAGGED = [load_tokenizer(DEMO / "target") for _ in range(2)]
TAGGED.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"], special_tokens=True)


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello."}]
HELLO_IDS = tuple(TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"])
STATS = dict(prompt_tokens=90, prefix_tokens=30, drafted_tokens=15, accepted_tokens=4)
STATS |= dict(accepted_by_position=(3, 1), rounds_by_shape={DraftShape(1): 7, DraftShape(4): 2})
OnOutput = Callable[[RequestOutput], None]
LONG = {"prompt": [7, 8], "max_tokens": 400, "ignore_eos": True, "seed": 1}


def answer_of(request: Request) -> list[int]:
    """Returns the toy model's answer: hashes of recent tokens and settings; one in 40 ends it."""
    text, sampling = list(request.prompt_ids), request.sampling
    if not sampling.temperature:
        sampling = dataclasses.replace(sampling, seed=0)
    for length in range(len(text), len(text) + request.max_new_tokens):
        said = hashlib.sha256(repr((text[-2:], length, sampling)).encode()).digest()
        is_end = said[0] % 40 == 0
        text.append(EOS if is_end else FIRST + int.from_bytes(said[1:5]) % (VOCAB - FIRST))
        if text[-1] in request.stop_ids:
            break
    return text[len(request.prompt_ids) :]


def likely_of(token: int, top_logprobs: int) -> TokenLogprob:
    """Returns log-probabilities that identify their token."""
    top = [((token + rank) % VOCAB, -float(rank)) for rank in range(top_logprobs)]
    return TokenLogprob(-token / VOCAB, top)


class ToyEngine:
    """`Engine` with a hash as its model; it can pause and fail, and records its calls."""

    def __init__(self, max_tokens: int = 512, slots: int = 2, max_waiting: int = 4) -> None:
        self.max_tokens, self.slots, self.max_waiting = max_tokens, slots, max_waiting
        self.requests: list[Request] = []
        self.cancelled: list[int] = []
        self.ended: dict[int, str] = {}
        self.step = 3  # tokens of one output
        self.error, self.healthy = "", True
        self.go = threading.Event()  # while cleared, no output is sent
        self.go.set()
        self._tasks: dict[int, tuple[Request, OnOutput, list[int]]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="toy engine", daemon=True)
        self.start = self._thread.start

    def submit(self, request: Request, on_output: OnOutput, others: int = 0) -> int:
        with self._lock:
            if len(self._tasks) + others >= self.slots + self.max_waiting:
                raise QueueFull(f"{self.max_waiting} requests are waiting already; try again later")
            request_id = len(self.requests)
            self.requests.append(request)
            self._tasks[request_id] = (request, on_output, answer_of(request))
        return request_id

    def cancel(self, request_id: int) -> None:
        with self._lock:
            self.cancelled.append(request_id)

    def prepare_masks(self) -> None:
        pass

    def abandon(self, line: str) -> None:
        self.error = line

    def close(self) -> None:
        self._stop.set()
        self.go.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def stats(self) -> EngineStats:
        running = min(len(self._tasks), self.slots)
        found = dict.fromkeys(EngineStats._fields, 0) | STATS | {"slots": self.slots}
        return EngineStats(**found | {"running": running, "waiting": len(self._tasks) - running})

    def _run(self) -> None:
        scored: set[int] = set()  # requests whose prompt's log-probabilities were sent
        while not self._stop.is_set():
            self.go.wait()
            with self._lock:
                tasks = list(self._tasks.items())[: self.slots]
            for id, (request, on_output, rest) in tasks:
                if request.prompt_logprobs and id not in scored:
                    scored.add(id)
                    top = 20 if request.top_logprobs is None else request.top_logprobs
                    likely = [None, *(likely_of(token, top) for token in request.prompt_ids[1:])]
                    for begin in range(0, len(likely), self.step):  # a few at a time
                        part = likely[begin : begin + self.step]
                        on_output(RequestOutput([], prompt_logprobs=part))
                self._send(id, request, on_output, rest)
            time.sleep(0.0005)

    def _send(self, id: int, request: Request, on_output: Any, rest: list[int]) -> None:
        tokens, rest[:] = rest[: self.step], rest[self.step :]
        stops = tokens and tokens[-1] in request.stop_ids
        finish = "" if rest else "stop" if stops else "length"
        if id in self.cancelled or self.error:
            tokens, finish = [], "cancelled" if id in self.cancelled else "error"
        if finish:
            with self._lock:
                del self._tasks[id]
            self.ended[id] = finish
        k = request.top_logprobs
        likely = [] if k is None else [likely_of(token, k) for token in tokens]
        rest = {"num_cached": 1, "rounds": [(len(tokens), 5)] if tokens else []}  # each is a round
        on_output(RequestOutput(tokens, likely, finish, self.error, **rest))


class Running(ServerThread):
    """A server over a toy engine, and a client of it."""

    def __init__(
        self, engine: ToyEngine | None = None, keys: tuple[str, ...] = (), detail="none", **limits
    ) -> None:
        super().__init__()
        # A small buffer, so that a client that does not read is noticed soon.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)
        self.engine = engine or ToyEngine()
        most = self.engine.max_tokens
        model = Model("toy", TOKENIZER, VOCAB, (EOS,), most, most - 1, created=5)
        rest = (ServingMetrics("toy", self.engine), self.log, ServingLimits(**limits), keys, detail)
        self.server = OpenAIServer(self.engine, model, *rest)
        self.serve(self.server, ws="none")

    def __enter__(self) -> Running:
        self.engine.start()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        self.engine.close()
        super().__exit__(*exception)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Sends a body: bytes unchanged, other values as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | headers
        return self.client.post(path, content=content, headers=headers)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.client.get(path, headers=headers)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Returns the events of a streamed answer, the last of them "[DONE]"."""
        text = self.post(path, body | {"stream": True}).text
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    def socket(self, path: str, body: dict[str, Any], receive_bytes: int = 0) -> socket.socket:
        """Sends a request over a raw connection, and returns the connection."""
        made = socket.socket()
        if receive_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        made.settimeout(PATIENCE)
        made.connect(("127.0.0.1", self.port))
        made.sendall(raw_post(path, body))
        return made


def raw_post(path: str, body: dict[str, Any], **headers: str) -> bytes:
    """Returns the bytes of a request."""
    data = json.dumps(body).encode()
    headers |= {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(data))}
    lines = [f"POST {path} HTTP/1.1", *map(": ".join, headers.items()), "", ""]
    return "\r\n".join(lines).encode() + data


def text_of(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error
