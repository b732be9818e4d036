"""The flags that name prompts, and the token ids of the prompts that they name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infer.flags.sampling import ids
from infer.program import utf8
from moa_jax.config.checks import is_utf8
from moa_jax.data import chat, corpora
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.errors import InputError

BYTE_ORDER_MARK = "\ufeff"  # that some editors and shells put before a text


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `prompts_of` reads."""
    group = parser.add_argument_group("prompts").add_mutually_exclusive_group()
    group.add_argument(
        "--prompt", metavar="TEXT", type=utf8, help="one message, put in the chat template"
    )
    group.add_argument("--prompt-ids", metavar='"1,2,3"', type=ids, help="token ids as they are")
    group.add_argument(
        "--prompts", metavar="FILE.jsonl", help="lines with `prompt`, `messages` or `prompt_ids`"
    )


def tokenizer_of(folder: Path) -> Any | None:
    """The tokenizer in a target's folder; None where there is none, and token ids must do."""
    return load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None


def prompts_of(args: argparse.Namespace, tokenizer: Any | None) -> Iterator[list[int]]:
    """Yield the prompts of the flags, or the one on stdin where that is no terminal.

    Raises InputError for an empty file, and for a bad line with its place.
    """
    if args.prompt_ids is not None:
        yield args.prompt_ids
    elif args.prompts is not None:
        place = None
        for place, record in corpora.read_numbered(args.prompts):
            yield prompt_of(record, place, tokenizer)
        if place is None:
            raise InputError(f"{args.prompts} holds no prompts: write one a line")
    elif args.prompt is not None:
        yield asking(args.prompt, tokenizer)
    elif not sys.stdin.isatty():
        text = sys.stdin.read().removeprefix(BYTE_ORDER_MARK)
        if not is_utf8(text):
            encoding = sys.stdin.encoding
            raise InputError(
                f"the text on stdin is not valid {encoding}: {text[:60]!r}; write it in {encoding}"
            )
        yield asking(text, tokenizer)


def prompt_of(record: dict[str, Any], where: str, tokenizer: Any | None) -> list[int]:
    """The prompt in a line of a --prompts file; raises InputError that begins with `where`."""
    token_ids, messages, text = (record.get(key) for key in ("prompt_ids", "messages", "prompt"))
    if token_ids is not None:
        if not isinstance(token_ids, list) or not all(type(i) is int for i in token_ids):
            raise InputError(f"{where}: `prompt_ids` is not a list of whole numbers")
        return token_ids
    if messages is None and text is None:
        raise InputError(f"{where}: give it `prompt`, `messages` or `prompt_ids`")
    if messages is None and not isinstance(text, str):
        raise InputError(f"{where}: `prompt` is no text: write it in quotes")
    try:
        return asking(text, tokenizer) if messages is None else after(messages, tokenizer)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{where}: `messages` is no list of messages: give each a `role` and a `content`"
        ) from error


def asking(text: str, tokenizer: Any | None) -> list[int]:
    """The prompt of a single message; raises InputError without a tokenizer."""
    return after([{"role": "user", "content": text}], tokenizer)


def after(messages: Sequence[chat.Message], tokenizer: Any | None) -> list[int]:
    """The prompt that asks for an answer to a conversation; raises InputError as `asking`."""
    if tokenizer is None:
        raise InputError("the target's folder has no tokenizer.json: use --prompt-ids")
    return chat.prompt_ids(tokenizer, messages)
