"""Flags of sampling and of the end of an answer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from infer.cli.program import positive, utf8
from moa_jax.config import Sampling
from moa_jax.config.checks import is_id
from moa_jax.decode.detokenize import StopFinder
from moa_jax.decode.session import StopWhen
from moa_jax.errors import InputError


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `Sampling`, of stop strings and stop ids, and of the longest answer."""
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer")
    add_law_flags(group)
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="keep tokens at least this likely, relative to the most likely token",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1 makes what was seen less likely",
    )
    for name, when in (("presence", "if it has them"), ("frequency", "each time it has them")):
        group.add_argument(
            f"--{name}-penalty",
            type=float,
            default=0.0,
            help=f"taken off the logits of the answer's tokens {when}; from -2 to 2",
        )
    group.add_argument(
        "--logit-bias", metavar="ID:BIAS,...", type=_biases, default=(), help="added to logits"
    )
    group.add_argument(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="of the first prompt, and the next adds 1; -1 draws one, which --json shows",
    )
    group.add_argument(
        "--stop",
        action="append",
        type=utf8,
        default=[],
        metavar="TEXT",
        help="end before this text (repeat)",
    )
    group.add_argument(
        "--stop-ids", metavar='"1,2"', type=ids, help="end after these; default: the target's own"
    )


def add_law_flags(group: Any) -> None:
    """Add --temperature, --top-k and --top-p."""
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument(
        "--top-k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all"
    )
    group.add_argument("--top-p", type=float, default=1.0, help="keep this much probability")


def seed(text: str) -> int:
    """Type of a flag that takes a seed; -1 is replaced by a random seed."""
    try:
        return Sampling(seed=int(text)).seeded().seed
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The `Sampling` of the first prompt; raises InputError for values out of range."""
    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=args.logit_bias,
        seed=args.seed,
    )


def check_stop_ids(stop_ids: Sequence[int] | None, vocab_size: int) -> None:
    """Raises InputError for an id outside the vocabulary."""
    for token in stop_ids or ():
        if not is_id(token, vocab_size):
            raise InputError(
                f"--stop-ids names the id {token}, outside the target's vocabulary of "
                f"{vocab_size}; leave it out"
            )


def stopper(tokenizer: Any, texts: Sequence[str]) -> StopWhen | None:
    """The `stop_when` of a session that ends answers at these stop strings; None without any.

    Raises InputError for a string that the tokenizer never produces.
    """
    if not texts:
        return None
    if tokenizer is None:
        raise InputError("--stop needs text: the target's folder has no tokenizer; use --stop-ids")
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if not text or text not in tokenizer.decode(token_ids, skip_special_tokens=True):
            raise InputError(
                f"--stop {text!r}: the tokenizer never writes this text; "
                "give plain text, or a special token's id with --stop-ids"
            )
    return StopFinder(tokenizer, texts)


def ids(text: str) -> list[int]:
    """Type of a flag that takes token ids."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of token ids such as 1,2,3"
        ) from error


def _biases(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = (part.split(":") for part in text.split(",") if part)
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError as error:
        raise argparse.ArgumentTypeError("write ids and numbers: 5:-2.5,7:1") from error
