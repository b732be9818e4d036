"""Checks of settings, token ids and texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from moa_jax.errors import InputError


def at_least(low: int, config: Any, *names: str) -> None:
    """Raise InputError for the first of these fields that is no whole number of at least `low`."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < low:
            raise InputError(f"{name} is {value!r}: choose a whole number of at least {low}")


def is_id(token: Any, vocab_size: int) -> bool:
    """Whether this is a number that the vocabulary has."""
    is_number = isinstance(token, int | np.integer) and not isinstance(token, bool)
    return is_number and 0 <= token < vocab_size


def is_utf8(text: str) -> bool:
    """Whether a text has a form in UTF-8; surrogates, which stand for bytes without one, do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
