"""Conversations as questions: `--conversations` asks one turn of each record, by source.

The question is one of a record's user turns, another turn for each record, behind the history
that the record has up to there; its group is the record's source.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from infer.evaluation.paper import ALL
from infer.evaluation.suites import PAPER, Question
from infer.program import names
from moa_jax.data import chat, corpora
from moa_jax.errors import InputError

SET = "conversations"


def questions_of(path: str, sources: Sequence[str]) -> Iterator[Question]:
    """A question of each record of some sources, () for all, numbered from 1 in their order.

    Raises InputError that names the place of a bad record.
    """
    for index, (where, record) in enumerate(corpora.read_numbered(path, sources)):
        try:
            messages = chat.messages_of(record)
            turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
            if not turns:
                raise InputError("a conversation without a user message: give it one or remove it")
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        *history, asked = messages[: turns[index % len(turns)] + 1]
        said = tuple((message["role"], message["content"]) for message in history)
        name = str(record.get("source") or "none").rpartition("#")[2]
        # A group must not bear the name of the row of all questions, or of one of the paper's sets.
        group = f"#{name}" if name in (ALL, *PAPER) else name
        yield Question(SET, index + 1, "", group, (asked["content"],), said)


def prompts_of(
    args: argparse.Namespace, tokenizer: Any, longest: int
) -> Iterator[tuple[str, list[int]]]:
    """Source and prompt of each conversation whose prompt has at most `longest` tokens."""
    for question in questions_of(args.conversations, names(args.sources)):
        said = [*question.history, ("user", *question.turns)]
        messages = [{"role": role, "content": text} for role, text in said]
        prompt = chat.prompt_ids(tokenizer, messages)
        if len(prompt) <= longest:
            yield question.group, prompt
