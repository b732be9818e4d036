"""Closes HTTP connections whose clients do not get on with a request."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0  # until a request's headers have come; uvicorn would wait for ever


class PatientHttp(H11Protocol):
    """uvicorn's HTTP/1.1, with a deadline for what it does not time itself.

    That is the first request of a connection, the rest of the headers of a later one that has
    begun, and the rest of a body that was answered before it had come.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is None and self._is_owed():
            self._watch()

    def _watch(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._look, self.scope)

    def _look(self, scope: object) -> None:
        """Gives up a client that owes the same as when the time began; `scope` is of a request."""
        self._deadline = None
        if self.transport.is_closing() or not self._is_owed():
            return
        if self.scope is scope:
            self.transport.abort()
        else:
            self._watch()

    def _is_owed(self) -> bool:
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            return self.scope is None or bool(self.conn.trailing_data[0])
        return theirs is h11.SEND_BODY and self.conn.our_state is h11.DONE
