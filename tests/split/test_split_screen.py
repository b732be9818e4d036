"""An answer on a small terminal, which is emulated: what is to be seen in the end."""

from __future__ import annotations

import io
import random
import re

import pytest

from infer.split.client.screen import Screen, row_starts, visible


def terminal(data: str, columns: int, rows: int, row: int) -> list[str]:
    """What a terminal shows of this, with what scrolled off above; the cursor starts in `row`."""
    grid, gone, column = [[""] * columns for _ in range(rows)], [], 0

    def down() -> None:
        nonlocal row
        if row == rows - 1:
            gone.append(grid.pop(0))
            grid.append([""] * columns)
        else:
            row += 1

    for part in re.findall(r"\033\[\d*[A-Za-z]|[^\033]", data):
        if part == "\r":
            column = 0
        elif part == "\n":
            down()
            column = 0
        elif part.endswith("A") and len(part) > 1:
            row = max(row - int(part[2:-1]), 0)
        elif part.endswith("J") and len(part) > 1:
            grid[row][min(column, columns - 1) if column else 0 :] = [""] * (columns - column)
            grid[row + 1 :] = [[""] * columns for _ in grid[row + 1 :]]
        elif len(part) == 1:
            width = 2 if part in "字漢" else 1
            if column + width > columns:
                down()
                column = 0
            grid[row][column] = part
            column += width
    lines = ["".join(cells).rstrip() for cells in (*gone, *grid)]
    while lines and not lines[-1]:
        lines.pop()
    return [line for index, line in enumerate(lines) if line or index >= row]


def wrapped(text: str, columns: int) -> list[str]:
    starts = [*row_starts(text, columns), len(text)]
    rows = [text[a:b].rstrip() for a, b in zip(starts, starts[1:], strict=False)]
    return [row for row in rows if row]


@pytest.mark.parametrize("row", [0, 3, 7])
@pytest.mark.parametrize("seed", range(12))
def test_split_screen_shows_the_answer_and_the_notices_alone(seed, row):
    """Tails longer than the screen come and are rewritten; wide letters and ends of lines."""
    chance, columns, rows = random.Random(seed), 20, 8
    out = io.StringIO()
    screen = Screen(out, lambda: (columns, rows))
    letters = "abcdef ghij 字漢\n"
    words = lambda most: "".join(chance.choice(letters) for _ in range(chance.randrange(most)))
    text, notices = "", 0
    for _ in range(60):
        screen.show(text, words(chance.choice([3, 30, 300])))
        if chance.random() < 0.2:
            with screen.aside():
                out.write("[a notice]\n")
            notices += 1
        text += words(chance.choice([1, 8, 60]))
    screen.end(text)
    seen = terminal(out.getvalue(), columns, rows, row)
    assert seen.count("[a notice]") == notices
    found = [line for line in seen if line and line != "[a notice]"]
    assert "".join(found).split() == "".join(wrapped(text, columns)).split()
    assert found == wrapped(text, columns)


def test_split_screen_keeps_dim_text_that_fits():
    out = io.StringIO()
    screen = Screen(out, lambda: (10, 4))
    screen.show("verified ", "dim" * 4)
    assert terminal(out.getvalue(), 10, 4, 3) == ["verified d", "imdimdimdi", "m"]
    screen.show("verified ", "x" * 100)  # of which three rows fit
    assert terminal(out.getvalue(), 10, 4, 3) == ["verified x", "x" * 10, "x" * 10]
    screen.end("verified and right")
    assert terminal(out.getvalue(), 10, 4, 3) == ["verified a", "nd right"]


def test_split_screen_lets_no_text_move_the_cursor():
    assert visible("a\033[2Jb\r\x00c\td\n") == "a[2Jbc    d\n"
