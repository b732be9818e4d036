"""Closes HTTP connections that send no request."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0  # until the first request; uvicorn itself would wait for ever


class PatientHttp(H11Protocol):
    """uvicorn's HTTP/1.1, with a deadline for the first request of a connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.scope is None:
            self.transport.abort()
