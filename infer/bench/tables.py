"""Tables in Markdown and in text columns, and the formatting of numbers in cells.

A missing value is shown as a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# A key (shown with two digits), a pair (key, digits), or a function of the row.
TableColumn = str | tuple[str, int] | Callable[[Row], Any]


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with these column heads."""
    lines = [columns, ["---"] * len(columns), *(map(number, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(rows: Sequence[Row], columns: Mapping[str, TableColumn] | None = None) -> str:
    """A Markdown table of rows; columns default to the rows' keys; "" for no rows."""
    if not rows:
        return ""
    columns = columns or {key: key for key in rows[0]}
    return table([*columns], [[_cell(row, column) for column in columns.values()] for row in rows])


def _cell(row: Row, column: TableColumn) -> str:
    if callable(column):
        return number(column(row))
    key, digits = (column, 2) if isinstance(column, str) else column
    return number(row.get(key), digits)


def columns(lines: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Lines in columns of these widths; the first is left-aligned, the others right-aligned."""
    first, *rest = widths
    return [
        f"{name:<{first}}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, rest, strict=True))
        for name, *cells in lines
    ]


def cut_line(document: Row, things: str) -> str:
    """The line above the tables of a run that a signal cut; "" for a complete run."""
    cut = document.get("cut")
    return f"CUT by {cut['by']} after {cut['done']} of {cut['of']} {things}." if cut else ""


def precision(settings: Row) -> str:
    """The dtype and weight format: `float32`, `bfloat16 with int8 weights`."""
    weights = settings.get("weights")
    return settings["dtype"] + (f" with {weights} weights" if weights else "")


def number(value: Any, digits: int = 2) -> str:
    """Formats a float or a list with `digits` decimals; other values by str, None as a dash."""
    if isinstance(value, list | tuple):
        return numbers(value, digits)
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return "-" if value is None else str(value)


def with_interval(value: float | None, bounds: Sequence[float] | None) -> str:
    """A number, and in brackets its interval, if any."""
    return number(value) + ("" if bounds is None else f" ({numbers(bounds, between=' to ')})")


def quartiled(key: str, digits: int = 2) -> Callable[[Row], str]:
    """A column of a median and its quartiles: `1.52 (1.44 to 1.61)`."""

    def cell(row: Row) -> str:
        bounds = row.get(f"{key}_quartiles")
        shown = number(row[key], digits)
        return shown if bounds is None else f"{shown} ({numbers(bounds, digits, ' to ')})"

    return cell


def short(value: float | None) -> str:
    """A number with three significant digits, or without decimals from 100 on."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def numbers(values: Sequence[float | None], digits: int = 2, between: str = " ") -> str:
    """Several numbers in one cell."""
    return between.join(number(value, digits) for value in values)


def gib(size: int | None) -> str:
    """Bytes in GiB; a question mark for None."""
    return "?" if size is None else f"{size / 2**30:.3f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share from 0 to 1 in per cent; a dash for None."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"
