"""Incremental detokenization of an answer, and stop strings.

    part     [5, 17]    [230]      [159, 9]
    text     "Caf"      "Caf?"     "Café au"     of all tokens so far; ? is half a character
    shown    "Caf"      ""         "é a"         the "u" may begin the stop string "us"

A character may need several tokens, and so may a stop string: characters at the end that may become
part of either are held back until more tokens decide.
"""

from __future__ import annotations

import codecs
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

HALF = "\ufffd"  # stands for bytes that are not a character, or only a part of a character
WINDOW, CONTEXT = 32, 8  # maximum tokens decoded again, and tokens kept of a longer window
MOST_CUT = 3  # replacement characters for a character whose first byte is cut off
EACH_BYTE = "moa-jax-replace-each-byte"
codecs.register_error(EACH_BYTE, lambda error: (HALF * (error.end - error.start), error.end))


class Detokenizer:
    """Decodes token ids to text in which invalid bytes do not replace valid characters.

    A decoder with byte fallback, as Llama 2's, replaces all bytes of a run that has an invalid
    byte. This class, as SentencePiece, replaces each byte outside a character by a replacement
    character, and keeps the other bytes. Without a tokenizer the text is the ids.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        skip_special: bool = True,
        tags: frozenset[str] = frozenset(),
    ) -> None:
        """With `skip_special`, special tokens have no text, except those that are `tags`."""
        self._tokenizer, self._skip_special = tokenizer, skip_special and not tags
        self._backend = backend = getattr(tokenizer, "backend_tokenizer", None)
        self._hidden: set[int] = set()  # special tokens
        self._byte_of: dict[int, int] = {}  # the bytes of byte tokens, if the tokenizer has any
        if backend is None:  # no tokenizer, or a tokenizer without a `tokenizers` decoder
            return
        if skip_special:
            special = special_ids(tokenizer)
            self._hidden = {token for text, token in special.items() if text not in tags}
        self._token_of = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        tokens = [self._token_of[byte] for byte in HALF.encode()]
        if None not in tokens and backend.decode(tokens) == HALF:
            self._byte_of = {
                token: byte for byte, token in enumerate(self._token_of) if token is not None
            }

    def visible(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens that have text; others may stand within a character without effect."""
        if self._backend is None:
            return list(tokens)
        known, hidden = self._backend.id_to_token, self._hidden
        return [each for each in tokens if each not in hidden and known(each) is not None]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""
        return self.growing(self.visible(tokens))[0]

    def growing(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Returns the text of visible tokens, and the number of last characters not yet final."""
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens), 0
        decoder = self._backend or self._tokenizer
        if not self._byte_of:
            text = decoder.decode(tokens, skip_special_tokens=self._skip_special)
            return text, int(text.endswith(HALF))
        tokens, waiting = self._repaired(tokens)
        return decoder.decode(tokens, skip_special_tokens=self._skip_special), waiting

    def _repaired(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Replaces invalid bytes; also returns the number of last bytes that may be a character."""
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


@functools.lru_cache(maxsize=8)
def detokenizer_of(
    tokenizer: Any | None, skip_special: bool = True, tags: frozenset[str] = frozenset()
) -> Detokenizer:
    """Returns a tokenizer's cached detokenizer; its tables take longer than decoding an answer."""
    return Detokenizer(tokenizer, skip_special, tags)


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of special tokens, by text; none for a tokenizer of another package."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return {}
    added = backend.get_added_tokens_decoder()
    return {each.content: token for token, each in added.items() if each.special}


class GrowingText:
    """The text of an answer whose tokens come in parts, up to the first stop string.

    The text does not depend on the grouping of tokens into parts. Only the last tokens are decoded,
    so a token of a long answer costs no more than a token of a short answer.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        stops: Sequence[str] = (),
        *,
        keep_stop: bool = False,
        skip_special: bool = True,
        tags: frozenset[str] = frozenset(),
        preceding: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """Without a tokenizer the text is the token ids.

        `keep_stop` keeps the stop string in the text, and `skip_special` drops special tokens that
        are not `tags`.
        A stop string that is complete after `min_tokens` tokens or fewer does not stop the answer.
        `preceding` holds the tokens before the answer: some tokenizers drop the first space of a
        text, which must be kept if the answer continues other text.
        """
        self._detokenizer = detokenizer_of(tokenizer, skip_special, tags)
        self._stops, self._keep_stop, self._min_tokens = tuple(stops), keep_stop, min_tokens
        before = [] if tokenizer is None else self._detokenizer.visible(preceding)
        self._window = before[-CONTEXT:]  # the last tokens; the list is never mutated
        self._last, waiting = self._detokenizer.growing(self._window)  # text of the window
        if waiting:
            self._window, self._last = [], ""
        self._sure = len(self._last)  # characters of `_last` that are final, or before the answer
        self._before = -len(self._last)  # characters of the answer before `_last`
        self._waits = ""  # final text that may begin a stop string
        self.num_tokens = 0  # tokens added, up to the token that completed a stop string
        self.num_characters = 0  # characters of these tokens
        self.begin = 0  # position in the text at which the last added tokens begin
        self.stop: str | None = None  # the stop string that ended the answer

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the new final text; tokens after a stop string are ignored."""
        shown = ""
        for part in [[token] for token in tokens] if self._stops else [tokens]:
            if self.stop is not None or not part:
                break
            self._take(part)
            shown += self._released()
        return shown

    def end(self) -> str:
        """Returns the text that was held back; call this method after the last token."""
        if self.stop is not None:
            return ""
        return before_stop(self._waits + self._last[self._sure :], self._active_stops) or ""

    @property
    def _active_stops(self) -> tuple[str, ...]:
        return () if self.num_tokens <= self._min_tokens else self._stops

    def _take(self, tokens: Sequence[int]) -> None:
        """Decodes the window with more tokens."""
        before, tail = self._before + self._sure, self._last[self._sure :]
        self._window = [*self._window, *self._detokenizer.visible(tokens)]
        text, waiting = self._detokenizer.growing(self._window)
        sure = max(self._sure, len(text) - waiting)
        new, self._waits = text[self._sure :], self._waits + text[self._sure : sure]
        self.begin = before
        if sure - self._sure >= len(tail) and new.startswith(tail):  # invalid bytes
            self.begin += len(tail)
        self._last, self._sure = text, sure
        self.num_tokens += len(tokens)
        self.num_characters = self._before + len(text)
        if len(self._window) > WINDOW:
            self._move_on()

    def _released(self) -> str:
        """Returns the final text before a stop string, or before characters that may begin one."""
        stops = [stop for stop in self._active_stops if stop in self._waits]
        found = [(self._waits.find(stop), stop) for stop in stops]
        if found:
            place, self.stop = min(found)
            ready = place + len(self.stop) * self._keep_stop
        else:
            ready = len(self._waits) - held_back(self._waits, self._stops)
        shown, self._waits = self._waits[:ready], self._waits[ready:]
        return shown

    def _move_on(self) -> None:
        """Drops tokens whose text is final, except the last CONTEXT tokens."""
        kept = self._window[-CONTEXT:]
        context, waiting = self._detokenizer.growing(kept)
        # The context may begin within a character; the rest must equal the end of the whole text.
        same = context[:MOST_CUT].lstrip(HALF) + context[MOST_CUT:]
        if len(self._last) - self._sure == waiting <= len(same) and self._last.endswith(same):
            self._before += len(self._last) - len(context)
            self._sure += len(context) - len(self._last)
            self._window, self._last = kept, context


class Writer:
    """Decodes tokens; without a tokenizer `text` returns None and `pieces` yields token ids."""

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._detokenizer = detokenizer_of(tokenizer)

    def text(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of tokens, without special tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return self._detokenizer.decode(tokens)

    def pieces(self, parts: Iterable[list[int]], stops: Sequence[str]) -> Iterator[str]:
        """Yields the text of an answer whose tokens come in parts, up to the first stop string."""
        text = GrowingText(self.tokenizer, stops if self.tokenizer else ())
        for part in parts:
            yield text.add(part)
        yield text.end()


def before_stop(text: str | None, stops: Sequence[str]) -> str | None:
    """Returns the text before the first stop string; None stays None."""
    if text is None:
        return None
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


class StopFinder:
    """Returns the number of tokens that complete the first stop string, or None without a stop.

    An instance is a `stop_when` of `Session.generate`. Tokens of the previous call, if the new list
    begins with them, are not decoded again.
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
    """Returns the number of characters at the end of a text that may begin a stop string."""
    ends = (
        next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
        for stop in stops
    )
    return max(ends, default=0)
