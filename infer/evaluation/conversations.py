"""One drafter beside plain decoding on conversations: tau, speed and sameness by source.

Each conversation gives one prompt: its history up to one of its user turns, another turn for
each conversation; what is too long is left out. Both ways decode it on the device, one prompt
at a time. Loops flatter tau, so the share of repeated 8-grams in the answers stands beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from infer.cli import names, progress
from infer.sampling import sampling_of, stopper
from moa_jax import InputError, Result, Session
from moa_jax.data import chat, corpora
from moa_jax.session import row_of
from moa_jax.tokenizer import load_tokenizer

NGRAM = 8
ALL = "all"  # the source of the last row
COLUMNS = ("source", "prompts", "tokens", "tau", "speedup", "repeated", "stopped", "same")


class Answer(NamedTuple):
    """One prompt answered both ways."""

    source: str
    drafted: Result
    plain: Result


def compare_on_conversations(args: argparse.Namespace, drafted: Session, plain: Session) -> str:
    """The table of `--conversations`, or its JSON; InputError if no prompt fits."""
    target = plain.target
    tokenizer = load_tokenizer(target.folder)
    longest = min(args.max_prompt, target.config.max_position_embeddings - args.max_new_tokens)
    prompts = list(itertools.islice(prompts_of(args, tokenizer, longest), args.limit))
    if not prompts:
        raise InputError(
            f"{args.conversations}: no prompt of {args.sources or 'any source'} "
            f"within {longest} tokens: raise --max-prompt or lower --max-new-tokens"
        )
    ends = {"stop_ids": args.stop_ids, "stop_when": stopper(tokenizer, args.stop)}
    answers = []
    with progress(len(prompts), "prompts") as bar:
        for index, (source, prompt) in enumerate(prompts):
            how = {"sampling": row_of(sampling_of(args), index), **ends}
            found = (s.generate([prompt], args.max_new_tokens, **how) for s in (drafted, plain))
            answers.append(Answer(source, *(result for (result,) in found)))
            bar.step()
    rows = summarise(answers)
    depth = drafted.shape.depth
    return json.dumps({"depth": depth, "rows": rows}) if args.json else as_table(rows)


def prompts_of(
    args: argparse.Namespace, tokenizer: Any, longest: int
) -> Iterator[tuple[str, list[int]]]:
    """Source and prompt of each conversation; InputError that names the place of a bad record."""
    sources = names(args.sources)
    for index, (where, record) in enumerate(corpora.read_numbered(args.conversations, sources)):
        try:
            prompt = chat.prompt_ids(tokenizer, _asked(chat.messages_of(record), index))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        if len(prompt) <= longest:
            yield source_of(record), prompt


def _asked(messages: list[chat.Message], index: int) -> list[chat.Message]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not turns:
        raise InputError("a conversation without a user message: give it one or remove it")
    return messages[: turns[index % len(turns)] + 1]


def source_of(record: dict[str, Any]) -> str:
    """The short name of a record's source, never the name of the row of all."""
    name = str(record.get("source") or "none").rpartition("#")[2]
    return f"#{name}" if name == ALL else name


def summarise(answers: list[Answer]) -> list[dict[str, Any]]:
    """One row of figures a source, most prompts first, and one for all."""
    by_source = defaultdict(list)
    for answer in answers:
        by_source[answer.source].append(answer)
    groups = sorted(by_source.items(), key=lambda item: -len(item[1]))
    return [_row(name, group) for name, group in [*groups, (ALL, answers)]]


def _row(source: str, answers: list[Answer]) -> dict[str, Any]:
    drafted, plain = [a.drafted for a in answers], [a.plain for a in answers]
    rounds = sum(result.rounds for result in drafted)
    committed = sum(sum(result.accept_lengths) for result in drafted)
    repeated = [repeats(result.token_ids) for result in drafted]
    grams = sum(count for _, count in repeated)
    return {
        "source": source,
        "prompts": len(answers),
        "tokens": sum(len(result.token_ids) for result in drafted),
        "tau": committed / rounds if rounds else None,
        "speedup": sum(r.decode_s for r in plain) / sum(r.decode_s for r in drafted),
        "repeated": sum(seen for seen, _ in repeated) / grams if grams else 0.0,
        "stopped": sum(result.finish_reason == "stop" for result in drafted) / len(answers),
        "same": sum(a.drafted.token_ids == a.plain.token_ids for a in answers),
    }


def repeats(tokens: list[int]) -> tuple[int, int]:
    """How many 8-grams of an answer it has had before, and how many it has."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return len(grams) - len(set(grams)), len(grams)


def as_table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [[_cell(row[name]) for name in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
