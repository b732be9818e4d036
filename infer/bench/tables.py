"""Tables in Markdown and in columns of text, and numbers as their cells show them.

A dash stands for what is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# The key of a figure with two digits, a key with its digits, or a function of the row.
TableColumn = str | tuple[str, int] | Callable[[Row], Any]


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with these column heads."""
    lines = [columns, ["---"] * len(columns), *(map(number, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_of(rows: Sequence[Row], columns: Mapping[str, TableColumn] | None = None) -> str:
    """A table of rows in these columns, else in those of the rows' own keys; "" for no rows."""
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
    """Lines in columns of these widths: the first stands to the left, the others to the right."""
    first, *rest = widths
    return [
        f"{name:<{first}}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, rest, strict=True))
        for name, *cells in lines
    ]


def cut_line(document: Row, things: str) -> str:
    """The line above the tables of a run that a signal cut; nothing for a whole one."""
    cut = document.get("cut")
    return f"CUT by {cut['by']} after {cut['done']} of {cut['of']} {things}." if cut else ""


def precision(settings: Row) -> str:
    """`float32`, `bfloat16 with int8 weights`."""
    weights = settings.get("weights")
    return settings["dtype"] + (f" with {weights} weights" if weights else "")


def number(value: Any, digits: int = 2) -> str:
    """A float or a list of them with these digits after the point; anything else as it is."""
    if isinstance(value, list | tuple):
        return numbers(value, digits)
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return "-" if value is None else str(value)


def with_interval(value: float | None, bounds: Sequence[float] | None, digits: int = 2) -> str:
    """A number, and in brackets its interval, where it has one, with these digits."""
    return number(value) + ("" if bounds is None else f" ({numbers(bounds, digits, ' to ')})")


def quartiled(key: str, digits: int = 2) -> Callable[[Row], str]:
    """The column of a median and its quartiles: `1.52 (1.44 to 1.61)`."""

    def cell(row: Row) -> str:
        bounds = row.get(f"{key}_quartiles")
        shown = number(row[key], digits)
        return shown if bounds is None else f"{shown} ({numbers(bounds, digits, ' to ')})"

    return cell


def short(value: float | None) -> str:
    """A number with three digits, or all of those before the point."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def numbers(values: Sequence[float | None], digits: int = 2, between: str = " ") -> str:
    """Several numbers in one cell."""
    return between.join(number(value, digits) for value in values)


def gib(size: int | None) -> str:
    """Bytes in GiB; a question mark for what is not known."""
    return "?" if size is None else f"{size / 2**30:.3f}"


def percent(value: float | None, digits: int = 0) -> str:
    """A share of one in per cent."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"
