"""An OpenAI-compatible server without a model; tests choose its faults."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from moa_jax.data.tokenizer import load_tokenizer

Fault = Callable[["Handler"], bool]  # True if it has replied itself


def scripted_answer(
    tokenizer: Any, prompt_ids: list[int], max_tokens: int, ignore_stop: bool
) -> tuple[list[int], bool]:
    """Returns tokens that depend on the prompt alone, and whether a stop ends them."""
    number = sum(prompt_ids) % 97
    ids = tokenizer(f" I heard {number}.", add_special_tokens=False).input_ids
    if ignore_stop or number % 7 == 0:
        return (ids * max_tokens)[:max_tokens], False
    return [*ids, tokenizer.eos_token_id], True


class FakeEndpoint:
    """The server's models and key, its faults, and the received requests."""

    def __init__(self, folder: Any, **options: Any) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.models = [{"id": "scripted", "max_model_len": 4096}]
        self.key = None
        self.probe_status = 200  # of the first request, for one token
        self.fault: Fault | None = None  # of all requests for completions
        self.posts: list[dict[str, Any]] = []  # that were answered
        self.times: list[float] = []  # of all requests for completions
        self.lock = threading.Lock()
        vars(self).update(options)

    def prompts(self) -> list[tuple[int, ...]]:
        """Returns the answered prompts."""
        return [tuple(post["prompt"]) for post in self.posts]

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, ignores_stop = body["prompt"], body.get("ignore_eos", False)
        ids, stops = scripted_answer(self.tokenizer, prompt, body["max_tokens"], ignores_stop)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        choice = {"text": text, "finish_reason": "stop" if stops else "length", "token_ids": ids}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"model": "scripted", "choices": [choice | {"index": 0}], "usage": usage}


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body of each reply waits 40 ms after its head
    endpoint: FakeEndpoint

    def do_GET(self) -> None:
        if self.check_key():
            self.reply(200, {"object": "list", "data": self.endpoint.models})

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.check_key():
            return
        if self.body["max_tokens"] == 1:  # the client's first
            self.reply(self.endpoint.probe_status, self.endpoint.completion(self.body))
            return
        with self.endpoint.lock:
            self.endpoint.times.append(time.monotonic())
        if self.endpoint.fault is not None and self.endpoint.fault(self):
            return
        with self.endpoint.lock:
            self.endpoint.posts.append(self.body)
        self.reply(200, self.endpoint.completion(self.body))

    def check_key(self) -> bool:
        key = self.endpoint.key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self.reply(401, {"error": {"message": "no such key"}})
        return False

    def reply(self, status: int, content: Any, **headers: str) -> bool:
        return self.reply_bytes(status, json.dumps(content).encode(), **headers)

    def reply_bytes(self, status: int, data: bytes, **headers: str) -> bool:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)
        return True

    def cut(self, data: bytes = b"") -> bool:
        """Ends the connection after part of a reply."""
        if data:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + data)
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
        return True

    def wait_for_its_end(self) -> bool:
        """Sends nothing until the client has closed the connection."""
        self.rfile.read(1)
        self.close_connection = True
        return True

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def served(endpoint: Any, kind: type[Handler] = Handler) -> Iterator[str]:
    """Yields the URL of a server while it runs."""
    handler = type("Handler", (kind,), {"endpoint": endpoint})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
