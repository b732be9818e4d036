"""Locust asks infer.serve the questions of a file, each user one after the other.

    pip install locust
    locust -f infer/peers/locustfile.py --host http://127.0.0.1:8000 --headless -u 16 -r 4 -t 60s

`API_KEY`, `QUESTIONS` (a JSONL file with `turns`, by default the bundled ones), `MAX_TOKENS` and
`TEMPERATURE` are read from the environment. Beside each whole answer a row counts its first token.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

from locust import HttpUser, between, task

BUNDLED = Path(__file__).parents[2] / "moa_jax" / "demo" / "questions"
FILES = [Path(name) for name in [os.environ.get("QUESTIONS")] if name]
FILES = FILES or sorted(BUNDLED.glob("*/question.jsonl"))
TEXTS = [json.loads(line)["turns"][0] for file in FILES for line in file.open(encoding="utf-8")]
PATH = "/v1/chat/completions"


class Asker(HttpUser):
    """Somebody who reads an answer as it comes, thinks for a moment, and asks again."""

    wait_time = between(0.5, 2.0)

    def on_start(self) -> None:
        """Presents the key, if there is one."""
        if key := os.environ.get("API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"

    @task
    def ask(self) -> None:
        """Asks a question; an answer without an end counts as a failure."""
        body = {
            "messages": [{"role": "user", "content": random.choice(TEXTS)}],
            "max_tokens": int(os.environ.get("MAX_TOKENS", "64")),
            "temperature": float(os.environ.get("TEMPERATURE", "0")),
            "stream": True,
        }
        began, first = time.perf_counter(), 0.0
        # Locust stops its clock at the headers, where a stream has only begun.
        with self.client.post(PATH, json=body, stream=True, catch_response=True) as response:
            ended, error = False, None
            for line in response.iter_lines():
                ended = ended or line == b"data: [DONE]"
                error = error or (line if line.startswith(b'data: {"error"') else None)
                if not first and b'"content":"' in line and b'"content":""' not in line:
                    first = time.perf_counter()
            if error or not ended or response.status_code != 200:
                response.failure(f"status {response.status_code}: {error or 'no end'}")
                return
        self._count("first token", (first or time.perf_counter()) - began)
        self._count("whole answer", time.perf_counter() - began)

    def _count(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=name,
            response_time=seconds * 1000,
            response_length=0,
            exception=None,
            context={},
        )
