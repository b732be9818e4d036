"""Compiles an engine's programs in the background, one at a time."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable

from moa_jax.decode.background import BackgroundWorker, can_compile_more
from moa_jax.engine.program_cache import ProgramCache, ProgramName


class CompileQueue:
    """Compiles one program at a time; each call of `compile_next` has the present order."""

    def __init__(
        self, programs: ProgramCache, background: BackgroundWorker, on_done: Callable[[], None]
    ) -> None:
        self._programs, self._background, self._on_done = programs, background, on_done
        self.is_busy, self._is_full = False, False

    def compile_next(self, names: Iterable[ProgramName]) -> None:
        """Compiles the first missing program of `names`, unless another is being compiled."""
        if self.is_busy or self._is_full:
            return
        for name in names:
            if self._programs.has(name):
                continue
            self.is_busy = True
            if self._background.submit(name, functools.partial(self._compile, name)):
                return
            self.is_busy = False  # compiled or failed before

    def _compile(self, name: ProgramName) -> None:
        try:
            if can_compile_more():
                self._programs.compile(name)
            else:
                self._is_full = True
                line = "no more programs are compiled after %d: memory mappings are short"
                logging.getLogger(__name__).warning(line, len(self._programs))
        finally:
            self.is_busy = False
            self._on_done()
