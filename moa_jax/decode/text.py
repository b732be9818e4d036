"""Tokens as text while an answer grows, and the texts that end an answer.

    part     [5, 17]    [230]      [159, 9]
    text     "Caf"      "Caf?"     "Café au"     of all tokens so far; ? is half a character
    shown    "Caf"      ""         "é a"         with the stop text "us": this "u" may begin it

A character may need several tokens, and so may a stop text: what could still become one is held
back until the next tokens decide.
"""

from __future__ import annotations

import codecs
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

HALF = "\ufffd"  # bytes that are no character, or a part of one
WINDOW, CONTEXT = 32, 8  # tokens that are decoded again at most, and those kept of a longer window
MOST_CUT = 3  # replacement characters for a character whose first byte is cut off
EACH_BYTE = "moa-jax-replace-each-byte"
codecs.register_error(EACH_BYTE, lambda error: (HALF * (error.end - error.start), error.end))


class Detokenizer:
    """Token ids as text in which bad bytes never take good characters with them.

    A decoder with byte fallback, as Llama 2 has, replaces all bytes of a run with a bad one. Here,
    as in SentencePiece, each byte outside a character becomes a replacement character,
    and the others are kept. Without a tokenizer ids stand for their text.
    """

    def __init__(self, tokenizer: Any | None, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._backend = backend = getattr(tokenizer, "backend_tokenizer", None)
        self._hidden: set[int] = set()  # special tokens
        self._byte_of: dict[int, int] = {}  # of the tokens that stand for bytes, if there are any
        if backend is None:  # ids, or a tokenizer without a decoder of `tokenizers`
            return
        if skip_special:
            added = backend.get_added_tokens_decoder()
            self._hidden = {token for token, each in added.items() if each.special}
        self._token_of = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        tokens = [self._token_of[byte] for byte in HALF.encode()]
        if None not in tokens and backend.decode(tokens) == HALF:
            self._byte_of = {
                token: byte for byte, token in enumerate(self._token_of) if token is not None
            }

    def visible(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that have a text; others may stand within a character and change nothing."""
        if self._backend is None:
            return list(tokens)
        known, hidden = self._backend.id_to_token, self._hidden
        return [each for each in tokens if each not in hidden and known(each) is not None]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.growing(self.visible(tokens))[0]

    def growing(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text of visible tokens, and how many characters at its end may yet change."""
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens), 0
        decoder = self._backend or self._tokenizer
        if not self._byte_of:
            text = decoder.decode(tokens, skip_special_tokens=self._skip_special)
            return text, int(text.endswith(HALF))
        tokens, waiting = self._repaired(tokens)
        return decoder.decode(tokens, skip_special_tokens=self._skip_special), waiting

    def _repaired(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Tokens whose bytes are whole characters, and the number of bytes that may begin one."""
        found: list[int] = []
        waiting = 0
        for are_bytes, run in itertools.groupby(tokens, self._byte_of.__contains__):
            waiting = 0
            if are_bytes:
                data = bytes(map(self._byte_of.__getitem__, run))
                text, used = codecs.utf_8_decode(data, EACH_BYTE, False)
                waiting = len(data) - used
                run = map(self._token_of.__getitem__, (text + HALF * waiting).encode())
            found.extend(run)
        return found, waiting


@functools.lru_cache(maxsize=4)
def detokenizer_of(tokenizer: Any | None, skip_special: bool = True) -> Detokenizer:
    """The detokenizer of a tokenizer; its tables take longer than the text of an answer."""
    return Detokenizer(tokenizer, skip_special)


class GrowingText:
    """The text of an answer whose tokens come in parts, up to the first stop text.

    However tokens are grouped, the text is that of all of them. A token of a long answer costs no
    more than one of a short answer: only the last are decoded.
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
        self._detokenizer = detokenizer_of(tokenizer, skip_special)
        self._stops, self._keep_stop = tuple(stops), keep_stop
        before = [] if tokenizer is None else self._detokenizer.visible(behind)
        self._window = before[-CONTEXT:]  # the last tokens, of a list that is never changed
        self._last, waiting = self._detokenizer.growing(self._window)  # their text
        if waiting:
            self._window, self._last = [], ""
        self._sure = len(self._last)  # characters of it that no token changes, or are not ours
        self._before = -len(self._last)  # characters of the text before theirs
        self._waits = ""  # sure text that may begin a stop text
        self.num_tokens = 0  # up to the one that completed a stop text, if one did
        self.num_characters = 0  # of these tokens
        self.begin = 0  # where the last tokens that were added begin in the text
        self.stop: str | None = None  # the stop text that ended the answer

    def add(self, tokens: Sequence[int]) -> str:
        """The text that more tokens make sure; those after a stop text do not count."""
        shown = ""
        for part in [[token] for token in tokens] if self._stops else [tokens]:
            if self.stop is not None or not part:
                break
            self._take(part)
            shown += self._released()
        return shown

    def end(self) -> str:
        """The text that waited for tokens which do not come."""
        if self.stop is not None:
            return ""
        return before_stop(self._waits + self._last[self._sure :], self._stops) or ""

    def _take(self, tokens: Sequence[int]) -> None:
        """Decodes more tokens."""
        before, tail = self._before + self._sure, self._last[self._sure :]
        self._window = [*self._window, *self._detokenizer.visible(tokens)]
        text, waiting = self._detokenizer.growing(self._window)
        sure = max(self._sure, len(text) - waiting)
        new, self._waits = text[self._sure :], self._waits + text[self._sure : sure]
        self.begin = before
        if sure - self._sure >= len(tail) and new.startswith(tail):  # bytes of no character
            self.begin += len(tail)
        self._last, self._sure = text, sure
        self.num_tokens += len(tokens)
        self.num_characters = self._before + len(text)
        if len(self._window) > WINDOW:
            self._move_on()

    def _released(self) -> str:
        """The sure text before a stop text, and before what may become one."""
        found = [(self._waits.find(stop), stop) for stop in self._stops if stop in self._waits]
        if found:
            place, self.stop = min(found)
            ready = place + len(self.stop) * self._keep_stop
        else:
            ready = len(self._waits) - held_back(self._waits, self._stops)
        shown, self._waits = self._waits[:ready], self._waits[ready:]
        return shown

    def _move_on(self) -> None:
        """Forgets tokens that later ones cannot change, but for a few that give these a context."""
        kept = self._window[-CONTEXT:]
        context, waiting = self._detokenizer.growing(kept)
        # It may begin within a character; the rest must be as in the whole text.
        same = context[:MOST_CUT].lstrip(HALF) + context[MOST_CUT:]
        if len(self._last) - self._sure == waiting <= len(same) and self._last.endswith(same):
            self._before += len(self._last) - len(context)
            self._sure += len(context) - len(self._last)
            self._window, self._last = kept, context


class Writer:
    """Decodes tokens with a tokenizer; with None there is no text, and token ids stand for it."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._detokenizer = detokenizer_of(tokenizer)

    def text(self, tokens: Sequence[int]) -> str | None:
        """The text of some tokens, without special tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return self._detokenizer.decode(tokens)

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


class StopFinder:
    """A function of an answer's tokens: how many of them complete the first stop text, else None.

    It is the `stop_when` that `Session.generate` takes. Tokens that it has seen before, at the
    begin of those that it is called with, are not decoded again.
    """

    def __init__(self, tokenizer: Any, stops: str | Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = [stops] if isinstance(stops, str) else stops
        self._seen: list[int] = []
        self._text = GrowingText(tokenizer, self._stops)

    def __call__(self, tokens: list[int]) -> int | None:
        if tokens[: len(self._seen)] != self._seen:
            self._seen, self._text = [], GrowingText(self._tokenizer, self._stops)
        self._text.add(tokens[len(self._seen) :])
        self._seen = list(tokens)
        return None if self._text.stop is None else self._text.num_tokens


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may come to belong to a stop text."""
    ends = (
        next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)
        for stop in stops
    )
    return max(ends, default=0)
