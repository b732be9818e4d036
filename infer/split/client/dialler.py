"""Who dials a server, and again when the link is lost: with growing pauses, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Any

from infer.split.link import Gone, Link, Lost, Server, Traffic

FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds between attempts to connect again


class Dialler:
    """The link to a server while there is one, and the patience for another."""

    def __init__(self, server: Server | None, vocab_size: int, reconnect_seconds: float) -> None:
        """Without a server there will be no link."""
        self.link: Link | None = None
        self.traffic = Traffic()
        self.has_server = server is not None
        self._server, self._vocab_size = server, vocab_size
        self._reconnect_seconds = reconnect_seconds
        self._random = random.Random()

    def begin(self) -> None:
        """Another answer, for which the server may be asked again; a link may be there."""
        self.is_denied = False  # there will be no other link for this answer
        self.moved()

    def moved(self) -> None:
        """The answer has grown: nobody need wait longer than at first."""
        self._wait, self._give_up = 0.0, None  # before dialling; when not to wait any more

    @property
    def can_dial(self) -> bool:
        """Whether it is of use."""
        return self.has_server and not self.is_denied

    async def dial(self) -> Link:
        """Another link, which is not yet that of the answer; raises Lost, Gone or Denied."""
        return await Link.open(self._server, self._vocab_size, self.traffic)

    async def connect(self) -> None:
        """Says Hello, if there is a server; raises Lost or Denied where it does not welcome us."""
        if self.has_server and self.link is None:
            try:
                self.link = await self.dial()
            except Gone as error:
                raise Lost(str(error)) from error

    async def close(self) -> None:
        """Ends the connection, if there is one."""
        if self.link is not None:
            with contextlib.suppress(Exception):
                await self.link.close()
            self.link = None

    def cut(self) -> None:
        """Ends the connection, if there is one, without a word."""
        if self.link is not None:
            self.link.abort()
        self.link = None

    async def pause(self) -> None:
        """Before an attempt: each one that failed lets the next one wait longer."""
        await asyncio.sleep(self._wait * self._random.uniform(0.5, 1.5))
        self._wait = min(max(FIRST_WAIT, 2 * self._wait), LONGEST_WAIT)

    async def wait_for(self, joining: asyncio.Task[Any] | None) -> Any:
        """What that task finds; None if an answer that is not moving is given up before."""
        if joining is None:
            return None
        while not joining.done():
            now = time.monotonic()
            if self._give_up is None:
                self._give_up = now + self._reconnect_seconds
            if now >= self._give_up:
                return None
            await asyncio.wait([joining], timeout=self._give_up - now)
        return joining.result()
