"""Who has a slot, and who waits for one: first come, first served, up to a limit and a deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from infer.split.server.metrics import Metrics
from infer.split.server.sessions import Refused, Rules


class Places:
    """As many as there are slots; each is taken, then given back once."""

    def __init__(self, rules: Rules, metrics: Metrics, evict: Callable[[], bool]) -> None:
        """`evict` gives back the place of a session that lost its connection, if there is one."""
        self.closed = False
        self._rules, self._metrics, self._evict = rules, metrics, evict
        self._free = rules.num_slots
        self._queue: deque[asyncio.Future[None]] = deque()
        metrics.slots.set(rules.num_slots)

    @property
    def num_free(self) -> int:
        """Places that nobody has."""
        return self._free

    @property
    def num_waiting(self) -> int:
        """Those who wait for one."""
        return len(self._queue)

    def close(self) -> None:
        """Refuse places from now on, also to those who wait."""
        self.closed = True
        for waiter in self._queue:
            if not waiter.done():
                waiter.set_exception(_draining())

    async def take(self) -> None:
        """Wait for a place; raises Refused where none comes."""
        if self.closed:
            raise _draining()
        if self._free or (not self._queue and self._evict()):
            self._free -= 1
            self._gauge()
            return
        if len(self._queue) >= self._rules.max_queue:
            raise Refused("busy", "all slots are taken and the queue is full: try again later")
        place = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self._gauge()
        try:
            async with asyncio.timeout(self._rules.queue_seconds):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.give_back()  # a slot came just when the wait was over
            if isinstance(error, TimeoutError):
                raise Refused("busy", "no slot became free in time: try again later") from None
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._queue.remove(place)
            self._gauge()

    def give_back(self) -> None:
        """To the first who waits, if anybody does."""
        while self._queue:
            place = self._queue.popleft()
            if not place.done():
                place.set_result(None)
                break
        else:
            self._free += 1
        self._gauge()

    def _gauge(self) -> None:
        self._metrics.slots_used.set(self._rules.num_slots - self._free)
        self._metrics.queue.set(len(self._queue))


def _draining() -> Refused:
    return Refused("draining", "the server is going down: no new sessions, try another or later")
