"""The flags of `infer.bench --split`, and checks of their combinations."""

from __future__ import annotations

import argparse

from infer.bench.network import PROFILES
from infer.cli.flags.pair import DEFAULT_TREE, MODEL, add_pair_flag, add_weights_flag
from infer.cli.program import Parser, names, positive
from infer.split_client.flags import add_pace_flags, add_row_flags
from moa_jax.errors import InputError

MODES = ("stream", "plain", "chain", "tree")
DRAFTING = ("chain", "tree")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The parser of `infer.bench --split`, with grouped flags."""
    parser = Parser("infer.bench --split", description)
    group = parser.add_argument_group("models")
    add = group.add_argument
    add_pair_flag(parser, group)
    add("--target", metavar=MODEL, help="default: the bundled target")
    add("--draft", metavar="DIR_OR_HUB_ID", help="default: the bundled drafter")
    add("--dtype", choices=("float32", "bfloat16"), help="default: by hardware")
    add_weights_flag(group)
    add = parser.add_argument_group("prompts and answers").add_argument
    add("--suite", default="demo", help="question sets, as of infer.evaluate")
    add("--prompts", type=positive, default=8, metavar="K", help="number of prompts")
    add("--max-new-tokens", type=positive, default=64, help="tokens of each answer")
    group = parser.add_argument_group("ways of answering")
    about = f"of {', '.join(MODES)}"
    group.add_argument("--modes", type=names, default="stream,plain,chain", help=about)
    tree = (DEFAULT_TREE.depth, DEFAULT_TREE.breadth, DEFAULT_TREE.total_tokens)
    about = "depth, breadth, total tokens"
    group.add_argument("--tree", type=positives, default=tree, metavar="D,B,T", help=about)
    add_pace_flags(group, slowdown=3.0)  # the paper's client is 3 times slower
    add_row_flags(group)
    add = parser.add_argument_group("networks").add_argument
    add("--profiles", type=names, default=",".join(PROFILES), help=f"of {', '.join(PROFILES)}")
    add("--seed", type=int, default=0, help="of losses and delays")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON document on stdout")
    return parser


def positives(text: str) -> tuple[int, ...]:
    """Flag type: integers >= 1, separated by commas."""
    return tuple(map(positive, names(text)))


def check(args: argparse.Namespace) -> None:
    """Raises InputError for contradicting values, before any model is loaded."""
    for flag, given, known in (("modes", args.modes, MODES), ("profiles", args.profiles, PROFILES)):
        if not given or set(given) - set(known):
            raise InputError(f"--{flag} {','.join(given)}; choose from {', '.join(known)}")
    args.modes = list(dict.fromkeys(args.modes))
    if len(args.tree) != 3 or args.tree[0] < 2:
        raise InputError("--tree takes depth (2 or more), breadth and total tokens: 7,8,62")
    if args.target is not None and args.draft is None:
        raise InputError("--target without --draft; name its drafter")
