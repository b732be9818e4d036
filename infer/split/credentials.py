"""The token that a server wants to be shown, which both sides read from a file."""

from __future__ import annotations

from pathlib import Path

from moa_jax.errors import InputError


def read_token(path: str) -> str:
    """The one word of a file; InputError where it cannot go into a header, OSError without it."""
    token = Path(path).read_text(encoding="utf-8", errors="replace").strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InputError(f"{path}: a token is one word of printable ASCII: write one")
    return token
