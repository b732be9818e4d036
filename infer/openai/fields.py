"""Reads the fields of a body, with errors that name the field."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from infer.openai.errors import APIError, bad, shown
from moa_jax.config.checks import is_utf8

F = TypeVar("F", bound=msgspec.Struct)
Unsupported = dict[str, tuple[Any, ...]]  # names, and the values that have no effect

_fields_of = functools.cache(msgspec.structs.fields)  # resolves type hints, 80 us a call


def read_fields(kind: type[F], body: Mapping[str, Any], parent: str = "") -> F:
    """The fields of a body as an object of type `kind`; null counts as absent.

    `parent` is the prefix of names in errors, for example `stream_options.`. Raises APIError for
    an invalid field.
    """
    found = {}
    for field in _fields_of(kind):
        if (value := body.get(field.name)) is None:
            continue
        try:
            found[field.name] = msgspec.convert(value, field.type, str_keys=True)
        except msgspec.ValidationError as error:
            raise wrong(f"{parent}{field.name}", value, str(error).lower()) from error
        except UnicodeEncodeError as error:  # a lone surrogate in the key of an object
            raise wrong(f"{parent}{field.name}", value, "expected Unicode") from error
        if isinstance(value, str) and not is_utf8(value):
            raise wrong(f"{parent}{field.name}", value, "expected Unicode")
    return kind(**found)


def wrong(name: str, value: Any, expected: str, code: str | None = None) -> APIError:
    """The error for a field with an invalid value."""
    return bad(name, f"{name} is {shown(value)}: {expected}", code)


def reject_unsupported(body: Mapping[str, Any], table: Unsupported, parent: str = "") -> None:
    """Raises APIError for a field of `table` with a value that would have an effect."""
    for name, silent in table.items():
        value = body.get(name)
        if value in (None, [], {}, ""):
            continue
        if not any(type(value) is type(each) and value == each for each in silent):
            name = f"{parent}{name}"
            raise bad(name, f"{name} is not supported; leave it out", "unsupported_parameter")


def not_json(name: str) -> Any:
    """A `parse_constant` of json.loads: raises ValueError for NaN and Infinity."""
    raise ValueError(f"{name} is not a JSON number")
