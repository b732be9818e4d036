"""Servers that listen in a thread of a test, with their events and metrics."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any, Self

import uvicorn

from infer.http.address import bind
from infer.http.timeouts import TimedHttp
from tests.meeting import PATIENCE, wait_for


class ServerThread:
    """Listens on a free port during a `with` block; a subclass makes `server` and calls `serve`."""

    server: Any  # has `drain` and `metrics`

    def __init__(self) -> None:
        self.listener = bind("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.events: list[tuple[str, dict[str, Any]]] = []

    def log(self, event: str, **facts: Any) -> None:
        self.events.append((event, facts))

    def serve(self, app: Any, **settings: Any) -> None:
        """Prepares the thread in which uvicorn serves `app`."""
        settings |= {"http": TimedHttp, "log_config": None, "timeout_graceful_shutdown": 1}
        self._listening = uvicorn.Server(uvicorn.Config(app, **settings))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self._listening.serve(sockets=[self.listener])

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: self._listening.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def drain(self, seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(self.server.drain(seconds), self.loop)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in list(self.events) if name == event]

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels, 0 for a metric without a value."""
        lines = self.server.metrics.text().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(f"{name}[ {{]", line))
