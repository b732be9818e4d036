"""Text of tokens as they come: whole characters, and nothing of a stop text."""

from __future__ import annotations

import pytest

from moa_jax.decode.text import Writer, before_stop, stop_finder


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


WRITER = Writer(Bytes())


def pieces(*parts: bytes, stops: tuple[str, ...] = ()) -> list[str]:
    return list(WRITER.pieces([list(part) for part in parts], stops))


def test_a_character_is_shown_when_it_is_whole():
    cafe = "Café!".encode()
    assert pieces(cafe[:4], cafe[4:5], cafe[5:]) == ["Caf", "é", "!", ""]
    assert "".join(pieces(cafe[:4])) == "Caf\ufffd"  # an answer may end within a character


def test_what_may_become_a_stop_text_waits():
    assert pieces(b"a us", b"e", stops=("us.",)) == ["a ", "use", ""]
    assert pieces(b"a us", b". b", stops=("us.",)) == ["a ", "", ""]
    assert pieces(b"a u", stops=("us.",)) == ["a ", "u"]  # none came


def test_without_a_tokenizer_ids_are_shown():
    writer = Writer(None)
    assert writer.text([5]) is None
    assert list(writer.pieces([[5, 6], [7]], [])) == ["5 6 ", "7 ", ""]


def test_a_text_ends_before_its_first_stop():
    assert before_stop("one two three", ["three", "two"]) == "one "
    assert before_stop("one", ["two"]) == "one"
    assert before_stop(None, ["two"]) is None


@pytest.mark.parametrize("text, count", [(b"ab.cd", 3), (b"a.", 2), (b"abc", None)])
def test_a_stop_keeps_the_tokens_that_complete_it(text, count):
    assert stop_finder(Bytes(), ["."])(list(text)) == count
