"""Tokens and API keys of clients; servers and clients read them from files."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from pathlib import Path

from moa_jax.errors import InputError


def read_token(path: str) -> str:
    """Returns the token in a file, one word.

    Raises InputError if the token cannot be sent in a header, OSError if the file cannot be read.
    """
    return _checked(_read(path).strip(), path, "a token is")


def read_keys(path: str) -> tuple[str, ...]:
    """Returns the keys in a file, one per line; skips empty lines and comments (#).

    Raises like `read_token`, and InputError for a file without keys.
    """
    lines = (line.strip() for line in _read(path).splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InputError(f"{path}: it holds no keys; write one a line")
    return tuple(_checked(key, path, "keys are one a line, each") for key in keys)


def is_bearer(header: str, tokens: Iterable[str]) -> bool:
    """True if an Authorization header has one of these tokens; compares in constant time."""
    scheme, _, shown = header.partition(" ")
    same = [hmac.compare_digest(shown.encode(), token.encode()) for token in tokens]
    return scheme.lower() == "bearer" and any(same)


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8-sig", errors="replace")


def _checked(word: str, path: str, what: str) -> str:
    if not word or not word.isascii() or not word.isprintable() or " " in word:
        raise InputError(f"{path}: {what} one word of printable ASCII; write one")
    return word
