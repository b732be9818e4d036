"""Uploads of a model folder to the Hugging Face hub, in one commit."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from moa_jax.errors import InputError
from moa_jax.files.model_card import TAG
from moa_jax.files.model_folder import TOKENIZER_PATTERNS

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")  # an upload removes earlier ones
_FILES = ("README.md", "LICENSE*", "NOTICE*", "config.json", "generation_config.json")
_FILES += (*TOKENIZER_PATTERNS, *_WEIGHTS)
_FIXES = {
    401: "the hub refuses the token (401); run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there (403); set HF_TOKEN to a token with write access",
    404: "the hub finds no such owner or repository (404); check the name",
}
_LONGEST = 300  # characters of another error


def check_token(name: str) -> None:
    """Raises InputError if this machine has no token of the hub."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise InputError(
            f"--push {name}: no token of the hub; run `hf auth login`, or set HF_TOKEN"
        )


def push(folder: Path, name: str, private: bool = False) -> str:
    """Uploads a model's files to the repository `name` and returns the repository's address.

    A missing repository is created. One commit holds all files and removes earlier weights, so
    readers see either the earlier or the new model. Only the names in `_FILES` are uploaded, so
    training_run.json, which holds paths of this machine, is not. Raises InputError for errors of
    the hub and of the connection, for a public repository if `private`, and for a repository with
    weights whose card lacks TAG.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    found = [path for path in sorted(folder.iterdir()) if _matches(path.name, _FILES)]
    files = [path for path in found if path.is_file()]
    with _one_line(folder, name), quiet_hub():
        api = HfApi()
        url = api.create_repo(name, private=private or None, exist_ok=True)
        there = api.model_info(name)
        if private and not there.private:
            raise InputError(
                f"--push {name} --private: the repository is public; change that in its settings, "
                "or choose another name"
            )
        earlier = sorted(file.rfilename for file in there.siblings or ())
        stale = [each for each in earlier if "/" not in each and _matches(each, _WEIGHTS)]
        if stale and TAG not in (there.tags or ()):
            raise InputError(
                f"--push {name}: the repository holds a model without the tag {TAG}, which would "
                "be lost; choose another name, or add the tag to its card"
            )
        new = {path.name for path in files}
        api.create_commit(
            name,
            [CommitOperationDelete(each) for each in stale if each not in new]
            + [CommitOperationAdd(path.name, str(path)) for path in files],
            commit_message="Upload of a drafter by moa-jax",
        )
    return str(url)


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Silences the hub client's report of each retry; the final error is reported once."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _one_line(folder: Path, name: str) -> Iterator[None]:
    """Converts errors of an upload to an InputError; the status of a reply is in its causes."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # of the hub's library, of httpx and of Xet
        status = _status(error)
        why = _FIXES.get(status) or " ".join(str(error).split())[:_LONGEST]
        raise InputError(
            f"--push {name}: {why}; the hub confirmed no upload, and {folder} is complete: give "
            "the command again with --overwrite"
        ) from (None if status in _FIXES else error)  # Xet reports a 403 as a lost connection


def _status(error: BaseException | None) -> int | None:
    """The status of the reply that caused an error, if any; Xet has it in its message only."""
    while error is not None:
        if (reply := getattr(error, "response", None)) is not None:
            return reply.status_code
        if stated := re.search(r"HTTP status client error \((\d{3}) ", str(error)):
            return int(stated[1])
        error = error.__cause__ or error.__context__
    return None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
