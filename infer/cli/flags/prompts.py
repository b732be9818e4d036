"""Flags that name prompts, and the token ids of these prompts."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.cli.flags.sampling import ids
from infer.cli.program import utf8
from moa_jax.config.checks import is_utf8
from moa_jax.data import chat, records, sources
from moa_jax.data.report import unread_lines
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.errors import InputError

BYTE_ORDER_MARK = "\ufeff"  # some editors and shells put this before text


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `prompts_of` reads."""
    group = parser.add_argument_group("prompts").add_mutually_exclusive_group()
    group.add_argument(
        "--prompt", metavar="TEXT", type=utf8, help="one message, put in the chat template"
    )
    group.add_argument("--prompt-ids", metavar='"1,2,3"', type=ids, help="token ids as they are")
    group.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help="lines with `prompt`, `messages` or `prompt_ids`, or of a style that training reads",
    )


def tokenizer_of(folder: Path) -> Any | None:
    """The tokenizer in a target's folder; None without a tokenizer.json."""
    return load_tokenizer(folder) if (folder / "tokenizer.json").exists() else None


def prompts_of(args: argparse.Namespace, tokenizer: Any | None) -> Iterator[list[int]]:
    """Yields the prompts of the flags, else the prompt on stdin unless stdin is a terminal.

    Raises InputError for an empty file, and for an invalid line with its location. Prints the
    unread keys of a file on stderr.
    """
    if args.prompt_ids is not None:
        yield args.prompt_ids
    elif args.prompts is not None:
        yield from prompts_in(args.prompts, tokenizer)
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


def prompts_in(path: str, tokenizer: Any | None, limit: int | None = None) -> Iterator[list[int]]:
    """Yields the first `limit` prompts of a file; raises and prints like `prompts_of`."""
    unread: Counter[str] = Counter()
    total = shorter = 0
    for place, record in itertools.islice(sources.read_numbered(path), limit):
        total += 1
        try:
            prompt, keys, cut = _prompt_of(record, tokenizer)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
        unread.update(keys)
        shorter += cut
        yield prompt
    if not total:
        raise InputError(f"{path} holds no prompts; write one a line")
    for line in unread_lines(unread, total):
        print(line, file=sys.stderr)
    if shorter:
        print(
            f"{shorter} of {total} prompts end before the last answer of a record", file=sys.stderr
        )


def _prompt_of(
    record: dict[str, Any], tokenizer: Any | None
) -> tuple[list[int], tuple[str, ...], bool]:
    """The prompt of a record, its unread keys, and whether messages after the prompt remain."""
    answers = [each for each in records.answers_of(record) or () if isinstance(each, dict)]
    token_ids = (answers[-1] if answers else record).get("prompt_ids")
    if token_ids is not None:
        if not isinstance(token_ids, list) or not all(type(i) is int for i in token_ids):
            raise InputError("`prompt_ids` is not a list of whole numbers; give a list")
        return token_ids, (), bool(answers)
    read = records.read_record(record)
    asked = records.prompt_of(read.messages)
    prompt = after(asked, tokenizer, read.template_kwargs)
    unread = records.unread_by(tokenizer.chat_template, read)
    return prompt, unread, len(asked) < len(read.messages)


def asking(text: str, tokenizer: Any | None) -> list[int]:
    """The prompt of a single user message; raises InputError without a tokenizer."""
    return after([{"role": "user", "content": text}], tokenizer)


def after(
    messages: Sequence[records.Message],
    tokenizer: Any | None,
    template_kwargs: Mapping[str, Any] = records.NO_KWARGS,
) -> list[int]:
    """The prompt for the next answer in a conversation; raises InputError like `asking`."""
    if tokenizer is None:
        raise InputError("the target's folder has no tokenizer.json; use --prompt-ids")
    return chat.prompt_ids(tokenizer, messages, template_kwargs)
