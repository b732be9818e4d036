"""Picks a draft vocabulary: the most frequent tokens in the answers of a corpus.

    python -m train.vocabulary --target runs/demo_target/final --corpus runs/demo_answers.jsonl \\
        --size 1024 --output runs/demo_vocabulary.safetensors
    python -m train.vocabulary --target TARGET --corpus ANSWERS --size 32768 --draft DRAFTER

The target's own answers (train.regenerate) are the best corpus, since drafts predict them. The
vocabulary always includes the target's eos ids. The output holds the tensors d2t and t2d of
EAGLE-3. --draft writes a file in the drafter's folder, which decoding uses by default for targets
with many tokens (--draft-vocabulary of infer.generate). The program prints the share of answer
tokens that are in the vocabulary. Drafts cannot contain any other token, so raise --size if this
share is low.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

from infer.cli.flags.pair import MODEL
from infer.cli.program import Parser, Progress, local_path, names, positive, progress, run
from moa_jax.data import chat, sources
from moa_jax.data.report import RecordTally
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.draft_vocabulary import (
    FILE,
    check_size,
    count_tokens,
    coverage,
    most_frequent,
    save_vocabulary,
    vocabulary_of,
)
from moa_jax.errors import InputError
from moa_jax.files.paths import check_file, check_folder
from moa_jax.pretrained import Target, describe_target, functions_of, load_drafter


def make_vocabulary(args: argparse.Namespace) -> None:
    """Counts the corpus, writes the vocabulary and prints its coverage."""
    target = describe_target(args.target)
    for line in target.notices:
        print(line, file=sys.stderr)
    output = _output(args, target)
    vocab_size, ends = target.config.vocab_size, target.generation.eos_ids
    check_size(args.size, vocab_size, ends)
    tokenizer = load_tokenizer(target.folder)
    found = itertools.islice(sources.read_some(args.corpus, names(args.sources)), args.limit)
    tally = RecordTally()
    with progress(args.limit, "conversations") as bar:
        answers = tally.each(found, lambda record: _answer(tokenizer, record, vocab_size, bar))
        count_V = count_tokens(itertools.chain.from_iterable(answers), vocab_size)
    _report(args, tally, bool(count_V.any()))
    ids_U = most_frequent(count_V, args.size, ends)
    save_vocabulary(output, vocabulary_of(ids_U, target))
    print(
        f"{output}: {len(ids_U)} of {vocab_size} tokens cover {coverage(count_V, ids_U):.2%} "
        f"of {count_V.sum()} answer tokens"
    )


def _output(args: argparse.Namespace, target: Target) -> Path:
    """The file to write; the folder of --output is created.

    Raises InputError for an existing file and for a drafter with its own head, before the corpus
    is counted, which may take long.
    """
    if args.draft is None:
        output, other = args.output, "name another --output"
        check_folder(output.parent)
        output.parent.mkdir(parents=True, exist_ok=True)
    else:
        output, other = args.draft / FILE, "use --output"
        _check_drafter(output.parent, target)
    check_file("--output" if args.draft is None else "--draft", output)
    if output.exists():
        raise InputError(f"{output} exists already; remove it or {other}")
    return output


def _check_drafter(folder: Path, target: Target) -> None:
    """Raises InputError unless `folder` holds a drafter that uses the head of this target."""
    if not folder.is_dir():
        raise InputError(f"--draft {folder} is no folder; name that of a drafter")
    drafter = load_drafter(folder, target)
    if functions_of(drafter, target.config).own_head:
        raise InputError(
            f"--draft {folder}: a drafter of kind {drafter.method} has a head of its own, and a "
            "draft vocabulary is a slice of the target's; use --output"
        )


def _answer(
    tokenizer: Any, record: dict[str, Any], vocab_size: int, bar: Progress
) -> list[np.ndarray]:
    """The answer tokens of a record, uncut; raises InputError for a record without any."""
    bar.step()
    examples = chat.encode_record(tokenizer, record, vocab_size, sys.maxsize)
    if not examples:
        raise InputError("a record whose answers have no tokens; fill or remove it")
    return [example.tokens_T[example.response_T] for example in examples]


def _report(args: argparse.Namespace, tally: RecordTally, found: bool) -> None:
    """Prints the left-out records on stderr; raises InputError if no record has an answer."""
    if not found and not tally.faults:
        sources = args.sources or "any source"
        raise InputError(f"{args.corpus}: no records of {sources}; name another corpus")
    if not found:
        raise InputError(
            f"{args.corpus}: none of {tally.total} records has an answer; {tally.most_frequent()}"
        )
    for line in tally.lines():
        print(line, file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.vocabulary", __doc__)
    group = parser.add_argument_group("model")
    group.add_argument("--target", required=True, metavar=MODEL)
    group = parser.add_argument_group("corpus")
    group.add_argument("--corpus", required=True, metavar="PATH", help="as in a data config")
    group.add_argument("--sources", default="", help="names with commas; default: all")
    group.add_argument("--limit", type=positive, help="at most this many conversations")
    group = parser.add_argument_group("vocabulary")
    group.add_argument("--size", type=positive, required=True, help="tokens that may be drafted")
    place = group.add_mutually_exclusive_group(required=True)
    place.add_argument("--output", type=local_path, metavar="FILE.safetensors")
    place.add_argument(
        "--draft", type=local_path, metavar="DIR", help=f"write {FILE} to this drafter's folder"
    )
    return parser


def main(arguments: list[str] | None = None) -> None:
    make_vocabulary(_parser().parse_args(arguments))


if __name__ == "__main__":
    run(main)
