"""Conversations as questions: `--conversations` takes one turn per record, grouped by source.

The question is one of a record's user turns, after the record's earlier messages; the turn number
advances from record to record. The group is the record's source.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from infer.bench.paper import ALL
from infer.bench.suites import PAPER, Question
from infer.cli.program import names
from moa_jax.data import chat
from moa_jax.data import sources as sources_lib
from moa_jax.data.records import REASONING, read_record
from moa_jax.data.report import RecordTally
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json

SET = "conversations"


def questions_of(path: str, sources: Sequence[str], limit: int | None = None) -> Iterator[Question]:
    """One question per record of `sources` (() for all), up to `limit`, numbered from 1.

    Invalid records are skipped and keep their numbers; lines on stderr count the records per fault
    and the ignored keys. Raises InputError if all records are invalid.
    """
    tally = RecordTally()
    found = itertools.islice(sources_lib.read_some(path, sources), limit)
    yield from tally.each(found, lambda record: _question(record, tally.total))
    if tally.total and tally.faults.total() == tally.total:
        raise InputError(
            f"none of {tally.total} records of {path} has a question; {tally.most_frequent()}"
        )
    for line in tally.lines():
        print(line, file=sys.stderr)


def _question(record: dict[str, Any], number: int) -> Question:
    """One user turn of a record, after its history.

    Raises InputError without user turns, and for messages with more than a role and a text.
    """
    messages, _, template_kwargs = read_record(record)
    fields = {name for message in messages for name in message}
    if extra := sorted(fields & {"tool_calls", *REASONING}):
        raise InputError(f"a message with {', '.join(extra)}; questions have roles and texts alone")
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
        raise InputError("a record without a user message; give it one")
    *history, asked = messages[: turns[(number - 1) % len(turns)] + 1]
    said = tuple((message["role"], message["content"]) for message in history)
    name = str(record.get("source") or "none").rpartition("#")[2]
    # A group must not share its name with the row of all questions or with a set of the paper.
    group = f"#{name}" if name in (ALL, *PAPER) else name
    kwargs = to_json(template_kwargs) if template_kwargs else ""
    return Question(SET, number, "", group, (asked["content"],), said, kwargs)


def prompts_of(
    args: argparse.Namespace, tokenizer: Any, longest: int
) -> Iterator[tuple[str, list[int]]]:
    """Source and prompt per conversation, if the prompt has at most `longest` tokens."""
    for question in questions_of(args.conversations, names(args.sources)):
        prompt = chat.prompt_ids(tokenizer, question.messages(), question.kwargs())
        if len(prompt) <= longest:
            yield question.group, prompt
