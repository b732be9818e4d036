"""What is asked: questions of the six sets as bodies of requests, the same for every server."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from infer.bench.suites import FILE, PAPER, load_suite
from infer.flags.pair import DEMO
from infer.flags.prompts import asking, tokenizer_of
from moa_jax.data.corpora import locate
from moa_jax.errors import InputError
from moa_jax.files.folders import find_folder


class Asked(NamedTuple):
    """One request."""

    index: int  # which of all; its seed follows from it
    set: str
    body: dict[str, Any]


class Questions:
    """Questions in a random order that a seed fixes, as often as they are needed."""

    def __init__(self, args: argparse.Namespace, most_tokens: int) -> None:
        """Questions whose prompt and longest answer have at most `most_tokens` tokens.

        Raises InputError for a suite that cannot be read, or where no question fits.
        """
        self.suite = args.suite or default_suite()
        self._args = args
        tokenizer = tokenizer_of(find_folder(args.target or DEMO / "target", weights=False))
        longest = most_tokens - args.max_new_tokens
        found = [(q.set, q.turns[0]) for q in load_suite(self.suite)]
        fitting = [each for each in found if len(asking(each[1], tokenizer)) <= longest]
        if not fitting:
            raise InputError(
                f"--max-new-tokens {args.max_new_tokens}: no question of {self.suite} leaves room "
                f"for such an answer in {most_tokens} tokens: lower it"
            )
        self.count, self.left_out = len(fitting), len(found) - len(fitting)
        random.Random(args.seed).shuffle(fitting)
        self._turns: Sequence[tuple[str, str]] = fitting

    def from_(self, begin: int) -> Iterator[Asked]:
        """All requests from the one with index `begin` on, without an end."""
        index = begin
        while True:
            yield self._asked(index)
            index += 1

    def _asked(self, index: int) -> Asked:
        name, text = self._turns[index % len(self._turns)]
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._args.max_new_tokens,
            "temperature": self._args.temperature,
            "seed": self._args.seed + index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._args.ignore_stop:
            body["ignore_eos"] = True
        return Asked(index, name, body)


def default_suite() -> str:
    """The paper's six sets where the data folder has them, else the bundled questions."""
    try:
        found = all((locate("data:") / "specbench" / name / FILE).exists() for name in PAPER)
    except InputError:
        found = False
    return "paper" if found else "demo"
