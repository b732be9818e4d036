"""The token that clients present to a server; both sides read it from a file."""

from __future__ import annotations

from pathlib import Path

from moa_jax.errors import InputError


def read_token(path: str) -> str:
    """The token in a file, one word.

    Raises InputError if it cannot be sent in a header, and OSError if the file cannot be read.
    """
    token = Path(path).read_text(encoding="utf-8", errors="replace").strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(f"{path}: a token is one word of printable ASCII: write one")
    return token
