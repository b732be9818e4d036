"""What must fit: a prompt and its answer in a target's positions, with a draft in a cache's rows.

positions     prompt | answer
cache rows    prompt | answer | draft          if the cache has a fixed number of rows
              bucket of the prompt | draft     because prefill writes a whole bucket
"""

from __future__ import annotations

from typing import NamedTuple

from moa_jax.decode.programs import bucket
from moa_jax.errors import InputError


class Room(NamedTuple):
    """How much a target can hold, and a cache of fixed size."""

    positions: int  # of the target
    cache_rows: int | None = None  # None: as many as are asked for
    draft_rows: int = 0  # of the cache, for one draft

    def behind(self, prompt_length: int) -> int:
        """How many new tokens fit behind a prompt of this length."""
        room = self.positions - prompt_length
        if self.cache_rows is not None:
            rows = self.cache_rows - self.draft_rows
            room = min(room, rows - prompt_length) if bucket(prompt_length) <= rows else 0
        return max(room, 0)

    def check(self, index: int, prompt_length: int, wanted: int) -> None:
        """Raise InputError unless `wanted` new tokens fit behind the prompt of this index."""
        if prompt_length + wanted > self.positions:
            raise InputError(
                f"prompt {index} has {prompt_length} tokens and {wanted} are to follow, but the "
                f"target has {self.positions} positions: shorten one of the two"
            )
        needed = max(prompt_length + wanted, bucket(prompt_length)) + self.draft_rows
        if self.cache_rows is not None and needed > self.cache_rows:
            raise InputError(
                f"a cache of {self.cache_rows} rows is too small: prompt {index} needs {needed}, "
                f"{self.draft_rows} of them for the draft: make it larger"
            )
