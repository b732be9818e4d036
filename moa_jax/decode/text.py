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

HALF = "\ufffd"  # a part of a character
WINDOW, CONTEXT = 32, 8  # tokens that are decoded again at most, and those kept of a longer window


class GrowingText:
    """The text of an answer whose tokens come in parts, up to the first stop text.

    A token of a long answer costs no more than one of a short answer: only the last are decoded.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        stops: Sequence[str] = (),
        *,
        keep_stop: bool = False,
        skip_special: bool = True,
        behind: Sequence[int] = (),
    ) -> None:
        """Without a tokenizer there is no text, and token ids stand for it.

        `keep_stop` leaves the stop text in the text, and `skip_special` special tokens out of it.
        The text follows the tokens that it is `behind`: some tokenizers drop the first space of a
        text, which between two words is none to drop.
        """
        self._tokenizer, self._stops, self._keep_stop = tokenizer, tuple(stops), keep_stop
        self._skip_special = skip_special
        self._window = [] if tokenizer is None else list(behind[-CONTEXT:])  # the last tokens
        self._last = self._text(self._window)  # their text
        if self._last.endswith(HALF):
            self._window, self._last = [], ""
        self._shown = len(self._last)  # characters of it that were returned, or are not ours
        self._before = -len(self._last)  # characters of the text before theirs
        self.num_tokens = 0  # up to the one that completed a stop text, if one did
        self.num_characters = 0  # of these tokens
        self.begin = 0  # where the last tokens that were added begin in the text
        self.stop: str | None = None  # the stop text that ended the answer

    def add(self, tokens: Sequence[int]) -> str:
        """The text that more tokens make sure; those after a stop text do not count."""
        waits = ""
        for part in [[token] for token in tokens] if self._stops else [tokens]:
            if self.stop is not None or not part:
                break
            waits = self._take(part)
        ready = len(waits)
        if self.stop is None:
            whole = waits.rstrip(HALF)
            ready = len(whole) - held_back(whole, self._stops)
        self._shown += ready
        self._move_on()
        return waits[:ready]

    def end(self) -> str:
        """The text that waited for tokens which do not come."""
        return "" if self.stop is not None else self._last[self._shown :]

    def _take(self, tokens: Sequence[int]) -> str:
        """The text that was not returned yet, with these tokens and before a stop text."""
        before = self._last
        self._window += tokens
        self.num_tokens += len(tokens)
        text = self._last = self._text(self._window)
        self.num_characters = self._before + len(text)
        grew = len(text) > len(before) and text.startswith(before)
        same = before if grew else before.rstrip(HALF)
        self.begin = self._before + len(same)
        waits = text[self._shown :]
        found = [(waits.find(stop), stop) for stop in self._stops if stop in waits]
        if not found:
            return waits
        place, self.stop = min(found)
        return waits[: place + len(self.stop) * self._keep_stop]

    def _move_on(self) -> None:
        """Forgets tokens that later ones cannot change, but for a few that give these a context."""
        if self.stop is not None or len(self._window) <= WINDOW:
            return
        text, kept = self._last, self._window[-CONTEXT:]
        context = self._text(kept)
        waits = text[self._shown :]
        whole = not context.endswith(HALF) and text.endswith(context)
        if whole and context.endswith(waits):  # both empty behind many special tokens
            self._before += len(text) - len(context)
            self._window, self._last = kept, context
            self._shown = len(context) - len(waits)

    def _text(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special)


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
        text = GrowingText(self.tokenizer, stops if self.tokenizer else ())
        for part in parts:
            yield text.add(part)
        yield text.end()


def before_stop(text: str | None, stops: Sequence[str]) -> str | None:
    """A text up to the first stop text in it; None stays None."""
    if text is None:
        return None
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


def stop_finder(tokenizer: Any, stops: str | Sequence[str]) -> Callable[[list[int]], int | None]:
    """A function of an answer's tokens: how many of them complete the first stop text, else None.

    It is the `stop_when` that `Session.generate` takes. `stops` may be a single text.
    """
    stops = [stops] if isinstance(stops, str) else stops

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


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may come to belong to a stop text."""
    ends = (n for stop in stops for n in range(len(stop), 0, -1) if text.endswith(stop[:n]))
    return max(ends, default=0)
