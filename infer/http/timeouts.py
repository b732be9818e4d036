"""A deadline for incoming requests, which uvicorn does not have.

uvicorn's `timeout_keep_alive` covers idle connections between two requests, and a middleware runs
only after all headers have arrived. So a connection that sends nothing, or one byte at a time,
would stay open forever. `TimedHttp` uses attributes of H11Protocol that uvicorn does not document,
so pyproject.toml bounds uvicorn to the minor versions that are tested.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0  # for the headers of a request, or the rest of an unread body


class TimedHttp(H11Protocol):
    """uvicorn's HTTP/1.1 with a deadline for incomplete requests.

    The deadline covers the first request of a connection, the headers of a later request that has
    begun, and the rest of a body after its response was sent.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is None and self._is_incomplete():
            self._start_deadline()

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._expire, self.scope)

    def _expire(self, scope: object) -> None:
        """Aborts the connection if the request of the deadline, that of `scope`, is incomplete."""
        self._deadline = None
        if self.transport.is_closing() or not self._is_incomplete():
            return
        if self.scope is scope:
            self.transport.abort()
        else:
            self._start_deadline()

    def _is_incomplete(self) -> bool:
        state = self.conn.their_state
        if state is h11.IDLE:
            return self.scope is None or bool(self.conn.trailing_data[0])
        return state is h11.SEND_BODY and self.conn.our_state is h11.DONE
