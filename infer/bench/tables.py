"""Tables in Markdown and in columns of text, and numbers as their cells show them.

A dash stands for what is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with these column heads; cells are written as `str` writes them."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of rows that name their own columns, all alike; nothing for no rows."""
    return table([*rows[0]], [[*row.values()] for row in rows]) if rows else ""


def columns(lines: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Lines in columns of these widths: the first stands to the left, the others to the right."""
    first, *rest = widths
    return [
        f"{name:<{first}}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, rest, strict=True))
        for name, *cells in lines
    ]


def cut_line(document: Mapping[str, Any], things: str) -> str:
    """The line above the tables of a run that a signal cut; nothing for a whole one."""
    cut = document.get("cut")
    return f"CUT by {cut['by']} after {cut['done']} of {cut['of']} {things}." if cut else ""


def precision(settings: Mapping[str, Any]) -> str:
    """`float32`, `bfloat16 with int8 weights`."""
    weights = settings.get("weights")
    return settings["dtype"] + (f" with {weights} weights" if weights else "")


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits behind the point."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, bounds: tuple[float, float] | None, digits: int = 2) -> str:
    """A number, and in brackets its interval where it has one, with so many digits."""
    if bounds is None:
        return number(value)
    return f"{number(value)} ({numbers(bounds, digits, ' to ')})"


def with_quartiles(row: Mapping[str, Any], key: str, digits: int) -> str:
    """`1.52 (1.44 to 1.61)`: a median, and its quartiles where they are known."""
    low_high = row.get(f"{key}_quartiles")
    shown = number(row[key], digits)
    return shown if low_high is None else f"{shown} ({numbers(low_high, digits, ' to ')})"


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
