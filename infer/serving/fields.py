"""Reads the fields of a request's JSON, and says of a wrong one what would be right."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from infer.serving.errors import Refusal, bad, shown
from moa_jax.config.checks import is_utf8


def object_of(data: bytes) -> dict[str, Any]:
    """The JSON object in a body; raises Refusal for anything else."""
    try:
        found = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise bad("body", f"the body is no UTF-8 at byte {error.start}: send JSON") from error
    except RecursionError as error:
        raise bad("body", "the body is nested too deeply: send flat JSON") from error
    except ValueError as error:
        raise bad("body", f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise bad("body", "the body is no JSON object: send {...} with the fields of the request")
    return found


class Fields:
    """A request's fields; null counts as absent. Each method raises Refusal for a wrong value."""

    def __init__(self, body: Mapping[str, Any], place: str = "") -> None:
        """`place` is what stands before a field's name in errors, such as `stream_options.`."""
        self._body, self._place = body, place
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """The value of a field as it came; None if there is none."""
        self._read.add(name)
        return self._body.get(name)

    def wrong(self, name: str, wanted: str) -> Refusal:
        """What to raise for a field whose value is not what is wanted."""
        name, value = f"{self._place}{name}", self._body.get(name)
        return bad(name, f"{name} is {shown(value)}: give {wanted}")

    def whole(self, name: str, default: Any, low: int, high: int) -> Any:
        """A whole number from `low` to `high`."""
        value = self.value(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.value(name)
        if value is None:
            return default
        if not is_number(value):
            raise self.wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.value(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, "true or false")
        return default if value is None else value

    def text(self, name: str) -> str | None:
        """A text; None if there is none."""
        value = self.value(name)
        if value is not None and not is_text(value):
            raise self.wrong(name, "a text of Unicode characters")
        return value

    def within(self, name: str) -> Fields:
        """The fields of an object, none of them if it is absent."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value or {}, f"{self._place}{name}.")

    def refuse(self, table: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises Refusal for a field of `table` whose value is none of those that ask nothing."""
        for name, silent in table.items():
            value = self.value(name)
            if value is None or value in ([], {}, ""):
                continue
            if not any(type(value) is type(each) and value == each for each in silent):
                raise bad(
                    f"{self._place}{name}",
                    f"{self._place}{name} is not supported: leave it out",
                    "unsupported_parameter",
                )

    def unread(self) -> list[str]:
        """Names of fields with a value that nobody asked for."""
        known = (name for name, value in self._body.items() if value is None or name in self._read)
        return [f"{self._place}{name}" for name in sorted(self._body.keys() - known)]


def is_text(value: Any) -> bool:
    """Whether a value is a text that has a form in UTF-8; halves of surrogate pairs have none."""
    return isinstance(value, str) and is_utf8(value)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    if type(value) is int:
        return abs(value) < 1 << 1000
    return type(value) is float and math.isfinite(value)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
