"""Tokens as text while an answer grows, and the texts that end an answer.

    part     [5, 17]    [230]      [159, 9]
    text     "Caf"      "Caf?"     "Café au"     of all tokens so far; ? is half a character
    shown    "Caf"      ""         "é a"         with the stop text "us": this "u" may begin it

A character may need several tokens, and so may a stop text: what could still become one is held
back until the next tokens decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


class Writer:
    """Decodes tokens with a tokenizer; with None there is no text, and token ids stand for it."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer

    def text(self, tokens: Sequence[int]) -> str | None:
        """The text of some tokens, without special tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def pieces(self, parts: Iterable[list[int]], stops: Sequence[str]) -> Iterator[str]:
        """Yield the text of an answer whose tokens come in parts, up to the first stop text."""
        tokens: list[int] = []
        shown = 0
        text: str | None = ""
        for part in parts:
            tokens += part
            text = self.text(tokens)
            if text is None:
                yield "".join(f"{token} " for token in part)
                continue
            ready = max(shown, len(text.rstrip("\ufffd")) - _held_back(text, stops))
            yield text[shown:ready]
            shown = ready
        yield (before_stop(text, stops) or "")[shown:]


def before_stop(text: str | None, stops: Sequence[str]) -> str | None:
    """A text up to the first stop text in it; None stays None."""
    if text is None:
        return None
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


def stop_finder(tokenizer: Any, stops: Sequence[str]) -> Callable[[list[int]], int | None]:
    """A function of an answer's tokens: how many of them complete the first stop text, else None.

    It is the `stop_when` that `Session.generate` takes.
    """

    def has_stop(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return any(stop in text for stop in stops)

    def stop_when(tokens: list[int]) -> int | None:
        if not has_stop(tokens):
            return None
        count = len(tokens)
        while count > 1 and has_stop(tokens[: count - 1]):
            count -= 1
        return count

    return stop_when


def _held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text belong to a stop text, or may come to."""
    whole = before_stop(text, stops) or ""
    if len(whole) < len(text):
        return len(text) - len(whole)
    ends = (n for stop in stops for n in range(len(stop), 0, -1) if text.endswith(stop[:n]))
    return max(ends, default=0)
