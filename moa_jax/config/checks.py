"""Checks that several configs share."""

from __future__ import annotations

from typing import Any

from moa_jax.errors import InputError


def at_least(low: int, config: Any, *names: str) -> None:
    """Raise InputError for the first of these fields that is no whole number of at least `low`."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < low:
            raise InputError(f"{name} is {value!r}: choose a whole number of at least {low}")
