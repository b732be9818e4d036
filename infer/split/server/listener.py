"""HTTP connections that do not stay without asking for anything."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0  # uvicorn itself waits for a first request for ever


class PatientHttp(H11Protocol):
    """uvicorn's HTTP/1.1, which gives up on a client whose first request does not come."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.scope is None:
            self.transport.abort()
