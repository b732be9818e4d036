"""The tokens or keys that clients present to a server; both sides read them from files."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from moa_jax.errors import InputError


def read_token(path: str) -> str:
    """The token in a file, one word.

    Raises InputError if it cannot be sent in a header, and OSError if the file cannot be read.
    """
    return _checked(_read(path).strip(), path, "a token is")


def read_keys(path: str) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and lines that begin with # do not count.

    Raises as `read_token`, and InputError for a file without keys.
    """
    lines = (line.strip() for line in _read(path).splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InputError(f"{path}: it holds no keys: write one a line")
    return tuple(_checked(key, path, "keys are one a line, each") for key in keys)


def is_bearer(header: str, tokens: Iterable[str]) -> bool:
    """Whether an Authorization header names one of these tokens; it takes as long for any."""
    scheme, _, shown = header.partition(" ")
    same = [hmac.compare_digest(shown.encode(), token.encode()) for token in tokens]
    return scheme.lower() == "bearer" and any(same)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8-sig", errors="replace")


def _checked(word: str, path: str, what: str) -> str:
    if not word or not word.isascii() or not word.isprintable() or " " in word:
        raise InputError(f"{path}: {what} one word of printable ASCII: write one")
    return word
