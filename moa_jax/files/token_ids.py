"""A tokenizer's vocabulary as a map from tokens to ids, read from its files and compared.

    tokenizer.json          model.vocab, added_tokens
    tokenizer_config.json   added_tokens_decoder

Two vocabularies are equal if no token has two ids and no id has two tokens. A token that only one
vocabulary has does not count: embeddings are padded, and fine-tuning adds tokens. A file keeps the
fingerprint of a vocabulary, which also matches a vocabulary with more tokens after its last id:

    49152:1f6a...    ids below 49,152, sha256 of their map
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from moa_jax.errors import InputError
from moa_jax.files.model_folder import file_hash, json_hash
from moa_jax.files.paths import size_and_time
from moa_jax.files.whole_files import read_json

TokenIds = Mapping[str, int]


class TokenDifference(NamedTuple):
    """The first id at which two vocabularies differ; None if a vocabulary has no token there."""

    token_id: int
    token: str | None
    other: str | None


class TokenizerTokens(NamedTuple):
    """The ids of all tokens, and the added tokens, which are matched before text is split."""

    ids: dict[str, int]
    added: frozenset[str]


def read_token_ids(folder: Path) -> dict[str, int] | None:
    """The ids of all tokens of a folder's tokenizer, as `read_tokens` reads them."""
    found = read_tokens(folder)
    return None if found is None else found.ids


def read_tokens(folder: Path) -> TokenizerTokens | None:
    """The tokens of a folder's tokenizer; None if tokenizer.json is missing or has no tokens.

    Raises InputError for a vocabulary that does not map tokens to ids.
    """
    files = (folder / "tokenizer.json", folder / "tokenizer_config.json")
    if not files[0].is_file():
        return None
    return _read(*files, *(size_and_time(file) if file.is_file() else None for file in files))


@functools.lru_cache(maxsize=4)  # several checks at startup read one; 0.3 s for 128,000 tokens
def _read(path: Path, settings: Path, *versions: object) -> TokenizerTokens | None:
    """The tokens of two files; `versions` are part of the cache's key."""
    content = read_json(path)
    added = read_json(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
    try:
        vocab = (content.get("model") or {}).get("vocab") or {}
        if not isinstance(vocab, dict):  # Unigram: (token, score) in order of ids
            vocab = {token: index for index, (token, _) in enumerate(vocab)}
        own = {each["content"]: each["id"] for each in content.get("added_tokens") or ()}
        late = {each["content"]: int(index) for index, each in added.items()}
        found = vocab | own
        taken = set(found.values())
        found = {token: index for token, index in late.items() if index not in taken} | found
        # llama.cpp gives embedding rows without a token this name.
        ids = {t: operator.index(i) for t, i in found.items() if t != f"[PAD{i}]"}
        if not ids:
            return None
        return TokenizerTokens(ids, frozenset((own | late).keys() & ids.keys()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path} does not map tokens to ids; fetch or write it again") from error


def fingerprint(tokens: TokenIds) -> str:
    """The string that identifies a vocabulary in files."""
    return f"{max(tokens.values(), default=-1) + 1}:{json_hash(tokens)}"


def is_same(
    folder: Path, tokens: TokenIds | None, stated: str | None, file_sha256: str | None
) -> bool | None:
    """Whether a file was made for a folder's tokenizer, whose ids are `tokens`; None if unknown.

    `stated` is the fingerprint in the file. Files of earlier versions state `file_sha256` of
    tokenizer.json instead: an equal hash means the same vocabulary, another hash means unknown.
    """
    if tokens is None:
        return None
    if stated is not None:
        size = stated.partition(":")[0]
        end = int(size) if size.isdecimal() else 0
        return fingerprint({token: i for token, i in tokens.items() if i < end}) == stated
    if file_sha256 is None:
        return None
    return True if file_sha256 == file_hash(folder / "tokenizer.json") else None


def find_beside(folder: Path, stated: str | None, file_sha256: str | None) -> dict[str, int] | None:
    """The vocabulary that the files of a folder state, from a folder beside it; None if not found.

    Pairs are often stored side by side, as the bundled pair is. The arguments are those of
    `is_same`.
    """
    for path in sorted(folder.resolve().parent.glob("*/tokenizer.json")):
        if stated is None and (file_sha256 is None or file_hash(path) != file_sha256):
            continue
        with contextlib.suppress(InputError):  # a damaged file of another model
            tokens = read_token_ids(path.parent)
            if is_same(path.parent, tokens, stated, file_sha256):
                return tokens
    return None


def notice_unknown(made_for: Path) -> None:
    """Warn of a file that states the hash of another tokenizer.json, and no fingerprint."""
    logging.getLogger(__name__).warning(
        "%s states the hash of another tokenizer.json than the target's, as earlier versions did: "
        "its vocabulary is taken for the target's, since both have the same size",
        made_for,
    )


def first_difference(tokens: TokenIds, others: TokenIds) -> TokenDifference | None:
    """The first id with two tokens, or with a token that has two ids; None without a difference."""
    token_at, other_at = ({i: token for token, i in each.items()} for each in (tokens, others))
    renamed = (i for i, token in token_at.items() if other_at.get(i, token) != token)
    moved = (min(i, others[token]) for token, i in tokens.items() if others.get(token, i) != i)
    if (first := min([*renamed, *moved], default=None)) is None:
        return None
    return TokenDifference(first, token_at.get(first), other_at.get(first))
