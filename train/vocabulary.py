"""Picks a drafter's vocabulary: the tokens that the answers of a corpus hold most often.

    python -m train.vocabulary --target runs/demo_target/final --corpus runs/demo_answers.jsonl \\
        --size 1024 --output runs/demo_vocabulary.safetensors
    python -m train.vocabulary --target TARGET --corpus ANSWERS --size 32768 --draft DRAFTER

The target's own answers (train.regenerate) are the best corpus, as they are what is drafted. The
ids that end the target's text are always among the chosen. The output holds the tensors d2t and
t2d of EAGLE-3. With --draft it is a file of the drafter's folder, which decoding uses by default
where the target has many tokens (--draft-vocabulary of infer.generate). It prints the share of
answer tokens that are in the vocabulary. A draft must miss all other tokens, so raise --size if
this share is low.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from infer.flags.pair import MODEL
from infer.program import Parser, Progress, local_path, names, positive, progress, run
from moa_jax.data import chat, corpora
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.vocabulary import (
    FILE,
    check_size,
    count_tokens,
    coverage,
    most_frequent,
    save_vocabulary,
    vocabulary_of,
)
from moa_jax.errors import InputError
from moa_jax.files.places import check_file, check_folder
from moa_jax.pretrained import Target, describe_target, functions_of, load_drafter


def make_vocabulary(args: argparse.Namespace) -> None:
    """Counts the corpus, writes the vocabulary and prints its coverage."""
    target = describe_target(args.target)
    output = _output(args, target)
    vocab_size, ends = target.config.vocab_size, target.generation.eos_ids
    check_size(args.size, vocab_size, ends)
    tokenizer = load_tokenizer(target.folder)
    records = itertools.islice(corpora.read(args.corpus, names(args.sources)), args.limit)
    dropped: Counter[str] = Counter()
    with progress(args.limit, "conversations") as bar:
        count_V = count_tokens(_answers(records, tokenizer, vocab_size, dropped, bar), vocab_size)
    _report(args, dropped, bool(count_V.any()))
    ids_U = most_frequent(count_V, args.size, ends)
    save_vocabulary(output, vocabulary_of(ids_U, target))
    print(
        f"{output}: {len(ids_U)} of {vocab_size} tokens cover {coverage(count_V, ids_U):.2%} "
        f"of {count_V.sum()} answer tokens"
    )


def _output(args: argparse.Namespace, target: Target) -> Path:
    """The file to write, in a folder that is there.

    Raises InputError for one that exists, and for a drafter that has no use for it. All this is
    found before the counting, which may take long.
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
        raise InputError(f"{output} exists already: remove it or {other}")
    return output


def _check_drafter(folder: Path, target: Target) -> None:
    """Raise InputError unless a folder holds a drafter that uses the head of this target."""
    if not folder.is_dir():
        raise InputError(f"--draft {folder} is no folder: name that of a drafter")
    drafter = load_drafter(folder, target)
    if functions_of(drafter, target.config).own_head:
        raise InputError(
            f"--draft {folder}: a drafter of kind {drafter.method} has a head of its own, and a "
            "draft vocabulary is a slice of the target's: use --output"
        )


def _answers(
    records: Iterable[dict[str, Any]],
    tokenizer: Any,
    vocab_size: int,
    dropped: Counter[str],
    bar: Progress,
) -> Iterator[np.ndarray]:
    """The answer tokens of each record, whole; why a record has none is counted in `dropped`."""
    for record in records:
        bar.step()
        try:
            examples = chat.encode_record(tokenizer, record, vocab_size, sys.maxsize)
        except InputError as error:
            dropped[str(error)] += 1
            continue
        if not examples:
            dropped["the chat template leaves the answers out"] += 1
        for example in examples:
            yield example.tokens_T[example.response_T]


def _report(args: argparse.Namespace, dropped: Counter[str], found: bool) -> None:
    """Tells what was left out; raises InputError where that is everything."""
    if not found and not dropped:
        raise InputError(f"{args.corpus}: no records of {args.sources or 'any source'}")
    if not found:
        ((fault, count),) = dropped.most_common(1)
        raise InputError(
            f"{args.corpus}: none of {dropped.total()} records has an answer; {count}: {fault}"
        )
    for fault, count in dropped.most_common():
        print(f"{count} records left out: {fault}", file=sys.stderr)


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
