"""Selects chat data: some records of each source, without duplicates and without evaluation text.

    python -m train.corpus --records data:chat/train.jsonl.gz --sources gsm8k-train=700,mbpp=250 \\
        --without data:specbench --turns 3 --output runs/prompts.jsonl
    python -m train.corpus --records runs/answers.jsonl --without data:specbench --ids-only \\
        --output data/answers.jsonl.gz

The first command writes prompts for train.regenerate: the messages of a record without the answers
that train.regenerate replaces, up to --turns user messages. The second command packs the answers: a
record with token ids keeps the ids, and loses its messages with --ids-only.

A record is left out if one of its messages shares --words words in a row with a text of --without,
or equals a shorter text of at least four words; case and punctuation do not count. A record is also
left out if its first user message equals that of another record, since both have the same greedy
answer. Records are drawn and ordered at random with --seed, so the first lines of the output are a
fair sample of all lines. A table on stdout counts the output by source and license.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from infer.cli.flags.sampling import seed
from infer.cli.program import Parser, local_path, names, positive, run
from moa_jax.data import chat, sources
from moa_jax.data.records import FOR_TEMPLATE, answers_of, generated_places, messages_of
from moa_jax.data.report import RecordTally
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.files.paths import check_folder
from moa_jax.files.whole_files import write_whole

LEAST_WORDS = 4  # of a short evaluation text: shorter ones, such as "Thank you.", are in all data
WORD = re.compile(r"\w+")
COLUMNS = ("conversations", "several turns", "answers", "cut", "tokens", "answer tokens")

Words = tuple[str, ...]


class Selection:
    """The number of records taken per source, and the first user messages of these records."""

    def __init__(self, quotas: dict[str, int | None], excluded: set[Words], words: int) -> None:
        self.quotas, self.counts = quotas, Counter[str]()
        self._excluded, self._words = excluded, words
        self._questions: set[Words] = set()

    def has_room(self, record: dict[str, Any] | InputError) -> bool:
        """Whether more records of this record's source may be taken; True for unreadable ones."""
        if isinstance(record, InputError):
            return True
        quota = self.quotas.get(_source(record))
        return quota is None or self.counts[_source(record)] < quota

    def take(self, record: dict[str, Any]) -> dict[str, Any]:
        """Counts a record and returns it; raises InputError for a record to leave out."""
        messages = messages_of(record)
        try:
            chat.encode_ids(answers_of(record) or [], sys.maxsize, sys.maxsize)
        except InputError as error:
            raise InputError("an answer without lists of token ids; remove the record") from error
        first = next((each["content"] for each in messages if each["role"] == "user"), None)
        if first is None:
            raise InputError("a record without a user message; give it one")
        for message in messages:
            if not self._excluded.isdisjoint(grams(message["content"], self._words)):
                raise InputError(f"{self._words} words in a row, or a whole text, of --without")
        question = tuple(WORD.findall(first.casefold())) or (first,)
        if question in self._questions:
            raise InputError("the first user message of another record")
        self._questions.add(question)
        self.counts[_source(record)] += 1
        return record


def grams(text: str, count: int) -> Iterator[Words]:
    """All runs of `count` words of a text; the whole text if the text has fewer words."""
    words = WORD.findall(text.casefold())
    if LEAST_WORDS <= len(words) < count:
        yield tuple(words)
    yield from zip(*(words[i:] for i in range(count)), strict=False)


def make_corpus(args: argparse.Namespace) -> None:
    """Selects and writes the records, and prints the table and the reasons of left-out records."""
    check_folder(args.output.parent)
    if not args.output.name.endswith((".jsonl", ".jsonl.gz")):
        raise InputError(f"--output {args.output} is read by no program; end it with .jsonl[.gz]")
    if args.output.exists():
        raise InputError(f"{args.output} exists already; remove it or name another --output")
    texts = (text for path in args.without for record in sources.read(path) for text in _in(record))
    excluded = {gram for text in texts for gram in grams(text, args.words)}
    found = list(sources.read_some(args.records, list(args.sources)))
    selection, tally = Selection(args.sources, excluded, args.words), RecordTally()
    drawn = (found[i] for i in _order(args.seed, len(found)) if selection.has_room(found[i][1]))
    kept = [_kept(record, args) for record in tally.each(drawn, selection.take)]
    for line in tally.lines():
        print(line, file=sys.stderr)
    for name, quota in args.sources.items():
        if (count := selection.counts[name]) < (quota or 1):
            print(f"{name} has {count} records, fewer than {quota or 1}", file=sys.stderr)
    if not kept:
        raise InputError(f"{args.records}: no record is left; name other --sources")
    kept = [kept[i] for i in _order(args.seed, len(kept))]
    lines = (to_json(each, ensure_ascii=False, separators=(",", ":")) + "\n" for each in kept)
    data = "".join(lines).encode()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.output, gzip.compress(data, mtime=0) if args.output.suffix == ".gz" else data)
    print("\n".join(_table(kept)))


def _kept(record: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The part of a record that is written."""
    about = {key: record[key] for key in ("source", "license") if isinstance(record.get(key), str)}
    answers, messages = answers_of(record), messages_of(record)
    if answers is not None and args.ids_only:
        return {"answers": answers} | about
    about |= {key: record[key] for key in FOR_TEMPLATE if record.get(key)}
    if answers is not None:
        return {"messages": messages, "answers": answers} | about
    generated = generated_places(messages)
    prompts = [message for i, message in enumerate(messages) if i not in generated]
    ends = [i for i, message in enumerate(prompts) if message["role"] == "user"] + [len(prompts)]
    return {"messages": prompts[: ends[min(args.turns or len(ends), len(ends) - 1)]]} | about


def _table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of a Markdown table that counts records by source and license."""
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        answers = record.get("answers", [])
        users = sum(message["role"] == "user" for message in record.get("messages", []))
        examples = chat.encode_ids(answers, sys.maxsize, sys.maxsize)
        count = {
            "conversations": 1,
            "several turns": max(len(answers), 0 if answers else users) > 1,
            "answers": len(answers),
            "cut": sum(answer.get("finish_reason") == "length" for answer in answers),
            "tokens": sum(len(example.tokens_T) for example in examples),
            "answer tokens": sum(len(answer["token_ids"]) for answer in answers),
        }
        for key in ((record.get("source", ""), record.get("license", "")), ("~all", "")):
            counts[key].update(count)
    yield f"| source | license | {' | '.join(COLUMNS)} |"
    yield "| --- " * (2 + len(COLUMNS)) + "|"
    for (source, license), count in sorted(counts.items()):
        row = (source.lstrip("~"), license, *(f"{count[column]:,}" for column in COLUMNS))
        yield f"| {' | '.join(row)} |"


def _source(record: dict[str, Any]) -> str:
    """The name of a record's source without its repository."""
    return str(record.get("source") or "none").rpartition("#")[2]


def _in(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _in(each)


def _order(seed: int, count: int) -> list[int]:
    return np.random.default_rng((seed, count)).permutation(count).tolist()


# ---- flags ----


def _quotas(text: str) -> dict[str, int | None]:
    """Type of --sources: a number per name, None for all records."""
    pairs = (part.partition("=") for part in names(text))
    return {name: positive(number) if equals else None for name, equals, number in pairs}


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.corpus", __doc__)
    group = parser.add_argument_group("records")
    group.add_argument("--records", required=True, metavar="PATH", help="as in a data config")
    group.add_argument(
        "--sources",
        type=_quotas,
        default="",
        metavar="NAME=COUNT,NAME,...",
        help="sources with the most records of each; default: all records",
    )
    group.add_argument(
        "--without",
        type=names,
        default=[],
        metavar="PATH,PATH,...",
        help="evaluation data, whose texts no record may share",
    )
    group.add_argument("--words", type=positive, default=13, help="words in a row that are shared")
    group.add_argument("--seed", type=seed, default=0, help="of the drawn records and their order")
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=local_path, required=True, metavar="FILE.jsonl[.gz]")
    group.add_argument("--turns", type=positive, help="most user messages of a prompt")
    group.add_argument("--ids-only", action="store_true", help="write token ids without messages")
    return parser


def main(arguments: list[str] | None = None) -> None:
    make_corpus(_parser().parse_args(arguments))


if __name__ == "__main__":
    run(main)
