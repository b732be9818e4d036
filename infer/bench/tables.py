"""Tables in Markdown, and the formatting of numbers in cells.

A missing value is shown as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# A key (shown with two digits), a pair (key, digits), or a function of the row.
TableColumn = str | tuple[str, int] | Callable[[Row], Any]


def table_of(rows: Sequence[Row], columns: Mapping[str, TableColumn] | None = None) -> str:
    """A Markdown table of rows; columns default to the rows' keys; "" for no rows."""
    if not rows:
        return ""
    columns = columns or {key: key for key in rows[0]}
    cells = [[_cell(row, column) for column in columns.values()] for row in rows]
    lines = [[*columns], ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row, column: TableColumn) -> str:
    if callable(column):
        return number(column(row))
    key, digits = (column, 2) if isinstance(column, str) else column
    return number(row.get(key), digits)


def cut_line(document: Row, things: str) -> str:
    """The line above the tables of a run that a signal cut; "" for a complete run."""
    cut = document.get("cut")
    return f"CUT by {cut['by']} after {cut['done']} of {cut['of']} {things}." if cut else ""


def precision(settings: Row) -> str:
    """The dtype and weight format: `float32`, `bfloat16 with int8 weights`."""
    weights = settings.get("weights")
    return settings["dtype"] + (f" with {weights} weights" if weights else "")


def number(value: Any, digits: int = 2, between: str = " ") -> str:
    """Formats floats, also those of a list, with `digits` decimals; None, NaN, infinity as `-`."""
    if isinstance(value, list | tuple):
        return between.join(number(each, digits) for each in value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.{digits}f}"
    return "-" if value is None or isinstance(value, float) else str(value)


def with_interval(value: float | None, bounds: Sequence[float] | None, digits: int = 2) -> str:
    """A number, and in brackets its interval, if any: `1.52 (1.44 to 1.61)`."""
    shown = number(value, digits)
    return shown if bounds is None else f"{shown} ({number(bounds, digits, ' to ')})"


def quartiled(key: str, digits: int = 2) -> Callable[[Row], str]:
    """A column of a median and its quartiles."""
    return lambda row: with_interval(row[key], row.get(f"{key}_quartiles"), digits)


def short(value: float | None) -> str:
    """A number with three significant digits, or without decimals from 100 on."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gib(size: int | None) -> str:
    """Bytes in GiB; a question mark for None."""
    return "?" if size is None else f"{size / 2**30:.3f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share from 0 to 1 in per cent; a dash for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:.{digits}f} %"
