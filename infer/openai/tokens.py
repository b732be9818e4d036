"""Single tokens as text and bytes, for log-probabilities."""

from __future__ import annotations

import functools
import re
from typing import Any

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte token of SentencePiece


class TokenTexts:
    """Text and bytes of single tokens, computed once per token."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self._byte_of = _bytes_of_characters()
        self._word = ("", []) if tokenizer is None else _word_of(tokenizer)

    def __call__(self, token: int) -> tuple[str, bytes]:
        """The token's text and its bytes; without a tokenizer those of the token id.

        A token that is a part of a character has the text `bytes:\\xe2\\x82`, as in OpenAI's API.
        """
        if token not in self._known:
            self._known[token] = self._found(token)
        return self._known[token]

    def _found(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return str(token), str(token).encode()
        text = self._after_a_word(token)
        if "\ufffd" not in text:
            return text, text.encode()
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if found := BYTE.fullmatch(name):
            data = bytes.fromhex(found[1])
        elif all(character in self._byte_of for character in name):
            data = bytes(self._byte_of[character] for character in name)
        else:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def _after_a_word(self, token: int) -> str:
        """The token's text after a word: some tokenizers drop the leading space of a lone token."""
        decode = functools.partial(self._tokenizer.decode, skip_special_tokens=False)
        word, ids = self._word
        text = decode([*ids, token])
        return text[len(word) :] if text.startswith(word) else decode([token])


def _word_of(tokenizer: Any) -> tuple[str, list[int]]:
    """The text and the token ids of a word; empty if the text is incomplete."""
    ids = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return ("", []) if text.endswith("\ufffd") else (text, ids)


def _bytes_of_characters() -> dict[str, int]:
    """Bytes by character in byte-level vocabularies.

    Printable Latin-1 bytes are the characters themselves, other bytes are U+0100 and up in order.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printed} | shifted
