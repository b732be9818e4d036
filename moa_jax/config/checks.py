"""Checks of settings, token ids and strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from moa_jax.errors import InputError


def at_least(low: int, config: Any, *names: str) -> None:
    """Raise InputError for the first of these fields that is not a whole number >= `low`.

    Replaces numbers of numpy, jax or torch by Python numbers.
    """
    for name in names:
        value = unboxed(getattr(config, name))
        object.__setattr__(config, name, value)
        if type(value) is not int or value < low:
            raise InputError(f"{name} is {value!r}; choose a whole number of at least {low}")


def unboxed(value: Any) -> Any:
    """Converts a scalar or array of numpy, jax or torch to Python numbers; returns others as is."""
    return value.tolist() if hasattr(value, "tolist") else value


def whole_numbers(name: str, values: Any) -> list[int]:
    """The Python ints of a 1-D list or array; raises InputError for anything else."""
    values = unboxed(values)
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InputError(f"{name} is {values!r:.40}; give a list or a 1-D array of whole numbers")
    found = list(map(unboxed, values))
    for value in found:
        if type(value) is not int:
            raise InputError(
                f"{name} holds {value!r:.40}; give a list or a 1-D array of whole numbers"
            )
    return found


def finite(config: Any, *names: str, above_zero: bool = False) -> None:
    """Raise InputError for the first of these fields that is not a finite number >= 0.

    With `above_zero`, 0 raises InputError, too.
    """
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < float("inf") or (above_zero and value == 0):
            words = "above 0" if above_zero else "from 0 on"
            raise InputError(f"{name} is {value}; choose a finite number {words}")


def is_id(token: Any, vocab_size: int) -> bool:
    """Whether `token` is a whole number from 0 to vocab_size - 1."""
    is_number = isinstance(token, int | np.integer) and not isinstance(token, bool)
    return is_number and 0 <= token < vocab_size


def is_utf8(text: str) -> bool:
    """Whether `text` can be encoded as UTF-8; surrogates, which stand for invalid bytes, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
