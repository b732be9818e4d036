"""Length limits of a sequence, set by the target's positions and by the rows of the caches.

positions     prompt | answer
cache rows    prompt | answer | draft

The loop of rounds is compiled for one number of rows. Growing caches therefore double each time,
so that a chat soon stops compiling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moa_jax.config.checks import whole_numbers
from moa_jax.decode.programs import ROWS_OF_A_TILE, bucket, cache_rows_for
from moa_jax.errors import InputError
from moa_jax.speculation.controller import ROUNDS

MOST_STOPS = 64  # stop ids per answer


def rows_ahead(draft_rows: int, levels: int, chunk: int) -> int:
    """Returns the rows that calls may have written after the tokens of a sequence that a host has.

    A pass writes a draft of `draft_rows` or a chunk; a call in flight commits tokens before that.
    """
    return max(draft_rows, chunk) + ROUNDS * levels


class CacheLimits(NamedTuple):
    """Positions of a target, and rows of its caches."""

    positions: int  # of the target
    cache_rows: int | None = None  # fixed number of rows; None: the caches grow
    draft_rows: int = 0  # cache rows that one draft needs
    least_rows: int = ROWS_OF_A_TILE  # smallest number of rows of a growing cache

    def rows_for(self, num_tokens: int) -> int:
        """Returns the cache rows for a batch whose longest sequence has `num_tokens` tokens."""
        if self.cache_rows is not None:
            return self.cache_rows
        rows = max(self.least_rows, bucket(num_tokens + self.draft_rows))
        return cache_rows_for(min(rows, self.positions + self.draft_rows))

    def max_new_tokens(self, prompt_length: int) -> int:
        """Returns the number of new tokens that fit after a prompt of this length."""
        room = self.positions
        if self.cache_rows is not None:
            room = min(room, self.cache_rows - self.draft_rows)
        return max(room - prompt_length, 0)

    def check(self, index: int, prompt_length: int, wanted: int) -> None:
        """Raises InputError unless `wanted` new tokens fit after the prompt with this index."""
        if prompt_length + wanted > self.positions:
            raise InputError(
                f"prompt {index} has {prompt_length} tokens and {wanted} are to follow, but the "
                f"target has {self.positions} positions; shorten one of the two"
            )
        needed = prompt_length + wanted + self.draft_rows
        if self.cache_rows is not None and needed > self.cache_rows:
            raise InputError(
                f"a cache of {self.cache_rows} rows is too small: prompt {index} needs {needed}, "
                f"{self.draft_rows} of them for drafts; make it larger, or draft less at a time"
            )


def prompt_ids_of(index: int, prompt: Any, vocab_size: int) -> list[int]:
    """Converts the prompt with this index, a list or an array of any library, to a list of ids.

    Raises InputError for an empty prompt, and for a prompt that is not a 1-D list or array of
    the vocabulary's ids.
    """
    token_ids = whole_numbers(f"prompt {index}", prompt)
    if not token_ids:
        raise InputError(f"prompt {index} is empty; give it at least one token")
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InputError(
                f"prompt {index} has the id {token}, outside the vocabulary of {vocab_size}; use "
                "the target's own tokenizer"
            )
    return token_ids


def check_stops(stop_ids: Sequence[int]) -> None:
    """Raises InputError for more than MOST_STOPS stop ids."""
    if len(stop_ids) > MOST_STOPS:
        raise InputError(f"{len(stop_ids)} stop ids; give at most {MOST_STOPS} for one answer")
