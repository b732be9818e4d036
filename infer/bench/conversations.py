"""Conversations as questions: `--conversations` asks one turn of each record, by source.

The question is one of a record's user turns, another turn for each record, behind the history
that the record has up to there; its group is the record's source.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from infer.bench.paper import ALL
from infer.bench.suites import PAPER, Question
from infer.program import names
from moa_jax.data import chat, corpora
from moa_jax.data.records import messages_of
from moa_jax.data.report import RecordTally
from moa_jax.errors import InputError

SET = "conversations"


def questions_of(path: str, sources: Sequence[str], limit: int | None = None) -> Iterator[Question]:
    """A question of each of the first records of some sources, () for all, numbered from 1.

    Records that cannot be asked are left out and keep their numbers; a line on stderr counts each
    kind of them, and one the keys that are not read. Raises InputError where all are bad.
    """
    tally = RecordTally()
    found = itertools.islice(corpora.read_some(path, sources), limit)
    yield from tally.each(found, lambda record: _question(record, tally.total))
    if tally.total and tally.faults.total() == tally.total:
        raise InputError(
            f"none of {tally.total} records of {path} can be asked; {tally.most_frequent()}"
        )
    for line in tally.lines():
        print(line, file=sys.stderr)


def _question(record: dict[str, Any], number: int) -> Question:
    """One user turn of a record, behind its history; InputError where it has none."""
    messages = messages_of(record)
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
        raise InputError("a record without a user message: give it one")
    *history, asked = messages[: turns[(number - 1) % len(turns)] + 1]
    said = tuple((message["role"], message["content"]) for message in history)
    name = str(record.get("source") or "none").rpartition("#")[2]
    # A group must not bear the name of the row of all questions, or of one of the paper's sets.
    group = f"#{name}" if name in (ALL, *PAPER) else name
    return Question(SET, number, "", group, (asked["content"],), said)


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
