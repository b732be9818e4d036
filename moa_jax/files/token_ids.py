"""A tokenizer's vocabulary as a map from tokens to ids, read from its files and compared.

    tokenizer.json          model.vocab, added_tokens
    tokenizer_config.json   added_tokens_decoder

Two vocabularies are the same where no token has two ids and no id two tokens. A token that only one
of them has does not count: embeddings are padded, and fine-tuning adds tokens. A file keeps the
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
from moa_jax.files.folders import file_hash, json_hash, read_json
from moa_jax.files.places import size_and_time

TokenIds = Mapping[str, int]


class TokenDifference(NamedTuple):
    """The first id at which two vocabularies differ; None where one has no token there."""

    token_id: int
    token: str | None
    other: str | None


class TokenizerTokens(NamedTuple):
    """The ids of all tokens, and those tokens that text is searched for first."""

    ids: dict[str, int]
    added: frozenset[str]


def read_token_ids(folder: Path) -> dict[str, int] | None:
    """The ids of all tokens of a folder's tokenizer, as `read_tokens`."""
    found = read_tokens(folder)
    return None if found is None else found.ids


def read_tokens(folder: Path) -> TokenizerTokens | None:
    """The tokens of a folder's tokenizer; None without any in tokenizer.json.

    Raises InputError for a vocabulary that does not map tokens to ids.
    """
    files = (folder / "tokenizer.json", folder / "tokenizer_config.json")
    if not files[0].is_file():
        return None
    return _read(*files, *(size_and_time(file) if file.is_file() else None for file in files))


@functools.lru_cache(maxsize=4)  # a start reads one for several checks, at 0.3 s for 128,000 tokens
def _read(path: Path, settings: Path, *versions: object) -> TokenizerTokens | None:
    """The tokens of two files, read again once one of `versions` differs."""
    content = read_json(path)
    added = read_json(settings).get("added_tokens_decoder", {}) if settings.is_file() else {}
    try:
        vocab = (content.get("model") or {}).get("vocab") or {}
        if not isinstance(vocab, dict):  # Unigram's has scores in the order of ids
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
        raise InputError(f"{path} does not map tokens to ids: fetch or write it again") from error


def fingerprint(tokens: TokenIds) -> str:
    """The text by which files name a vocabulary."""
    return f"{max(tokens.values(), default=-1) + 1}:{json_hash(tokens)}"


def is_same(
    folder: Path, tokens: TokenIds | None, stated: str | None, file_sha256: str | None
) -> bool | None:
    """Whether a file was made for the tokenizer of a folder, `tokens`; None where it is unknown.

    `stated` is the fingerprint that the file states. Files of earlier versions state `file_sha256`
    of tokenizer.json instead: an equal hash is the same vocabulary, another hash is unknown.
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
    """The vocabulary that the files of a folder state, from a folder beside it; None without one.

    Pairs are often written so, and the bundled pair is. The arguments are those of `is_same`.
    """
    for path in sorted(folder.resolve().parent.glob("*/tokenizer.json")):
        if stated is None and (file_sha256 is None or file_hash(path) != file_sha256):
            continue
        with contextlib.suppress(InputError):  # a damaged file of some other model
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
    """The first id that has two tokens, or whose token has two ids; None without one."""
    token_at, other_at = ({i: token for token, i in each.items()} for each in (tokens, others))
    renamed = (i for i, token in token_at.items() if other_at.get(i, token) != token)
    moved = (min(i, others[token]) for token, i in tokens.items() if others.get(token, i) != i)
    if (first := min([*renamed, *moved], default=None)) is None:
        return None
    return TokenDifference(first, token_at.get(first), other_at.get(first))
