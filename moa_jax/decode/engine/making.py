"""Has an engine's programs made in the background, one at a time, where there is room for them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

from moa_jax.decode.background import BackgroundWorker, can_compile_more
from moa_jax.decode.engine.shelf import Shelf
from moa_jax.decode.engine.wanted import Making, name_of

Done = Callable[[], None]


class Maker:
    """Has programs made; all methods belong to the engine's thread."""

    def __init__(
        self, shelf: Shelf, background: BackgroundWorker, order: Callable[[Done], None]
    ) -> None:
        self._shelf, self._background, self._order = shelf, background, order
        self._under_way = 0  # makings that were ordered and did not end
        self._has_room = True  # for more programs

    @property
    def is_busy(self) -> bool:
        """Whether something is made, for which a compiler takes cores that calls would have."""
        return self._under_way > 0

    def make(self, wanted: Iterator[Making]) -> None:
        """Has the first of these made that never was, unless something is being made."""
        if self._has_room and not self.is_busy:
            any(self._submit(making) for making in wanted)  # the first that is new ends it

    def _submit(self, making: Making) -> bool:
        """Has something made, once; False if it was ordered before."""

        def do() -> None:
            try:
                try:
                    making()
                except Exception:  # jax fails now and then where two threads trace: once more
                    making()
            finally:
                self._order(functools.partial(self._made, can_compile_more()))

        is_new = self._background.submit(name_of(making), do)
        self._under_way += bool(is_new)
        return is_new

    def _made(self, room: bool) -> None:
        self._under_way -= 1
        if self._has_room and not room:
            line = "%d programs are compiled and there is room for few more: no others are made"
            logging.getLogger(__name__).warning(line, len(self._shelf))
        self._has_room = room
