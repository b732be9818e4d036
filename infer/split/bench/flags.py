"""The flags of `infer.bench --split`, and which of them contradict each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from infer.bench.drawing import check_plots
from infer.flags.pair import DEFAULT_TREE, DEMO, MODEL, add_pair_flag, add_weights_flag
from infer.program import Parser, names, positive
from infer.split.client.flags import add_pace_flags, add_row_flags
from infer.split.network.profiles import PROFILES
from moa_jax.errors import InputError
from moa_jax.files.places import check_file

MODES = ("stream", "plain", "chain", "tree", "offline")
DRAFTING = ("chain", "tree")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Grouped flags with their defaults."""
    parser = Parser("infer.bench --split", description)
    group = parser.add_argument_group("models")
    add_pair_flag(parser, group)
    group.add_argument("--target", metavar=MODEL, help="default: the bundled target")
    group.add_argument(
        "--draft",
        action="append",
        metavar="NAME=DIR_OR_HUB_ID",
        help="repeat for several; default: the bundled drafter",
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by hardware")
    add_weights_flag(group)
    group = parser.add_argument_group("what is asked")
    group.add_argument("--suite", default="demo", help="question sets, as of infer.evaluate")
    group.add_argument("--prompts", type=positive, default=8, metavar="K", help="how many of them")
    group.add_argument("--max-new-tokens", type=positive, default=64, help="longest answer")
    group.add_argument(
        "--natural-stops",
        action="store_true",
        help="answers end where the target ends them; else all have --max-new-tokens",
    )
    group = parser.add_argument_group("ways of answering")
    group.add_argument(
        "--modes",
        type=names,
        default="stream,plain,chain,offline",
        help=f"of {', '.join(MODES)}; {' and '.join(DRAFTING)} with each drafter",
    )
    tree = (DEFAULT_TREE.depth, DEFAULT_TREE.breadth, DEFAULT_TREE.total_tokens)
    group.add_argument(
        "--tree", type=_numbers, default=tree, metavar="D,B,T", help="depth, breadth, total tokens"
    )
    add_pace_flags(group, slowdown=3.0)  # the paper's client is 3 times slower
    add_row_flags(group)
    group = parser.add_argument_group("networks")
    group.add_argument(
        "--profiles", type=names, default=",".join(PROFILES), help=f"of {', '.join(PROFILES)}"
    )
    group.add_argument("--seed", type=int, default=0, help="of losses, delays and arrivals")
    _add_more(parser)
    return parser


def _add_more(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("many clients (first network and drafter; none by default)")
    group.add_argument("--clients", type=_numbers, default=(), metavar="1,8,32", help="how many")
    group.add_argument("--arrivals", choices=("poisson",), default="poisson", help="their law")
    group.add_argument(
        "--rate", type=float, default=2.0, metavar="R", help="clients that come each second"
    )
    group.add_argument("--asks", type=positive, default=2, help="questions of each client")
    group.add_argument("--slots", type=positive, default=8, help="of the server they share")
    group = parser.add_argument_group("links that die for good (none by default)")
    group.add_argument(
        "--outages",
        type=_counts,
        default=(),
        metavar="0,16,64",
        help="cut the link after so many tokens; --max-new-tokens more are then written alone",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    group.add_argument("--output", metavar="FILE.json", help="the document as a file, too")
    group.add_argument("--plot", metavar="FILE.png", help="a picture")


def check(args: argparse.Namespace) -> None:
    """Raise InputError for values and combinations that cannot be, before anything is loaded."""
    for flag, given, known in (("modes", args.modes, MODES), ("profiles", args.profiles, PROFILES)):
        if not given or set(given) - set(known):
            raise InputError(f"--{flag} {','.join(given)}: choose from {', '.join(known)}")
    if len(args.tree) != 3 or args.tree[0] < 2:
        raise InputError("--tree takes depth (2 or more), breadth and total tokens: 7,8,62")
    if not 0 < args.rate < float("inf"):
        raise InputError(f"--rate {args.rate}: choose a number above 0")
    if args.target is not None and args.draft is None:
        raise InputError("--target without --draft: name its drafters")
    labels = [label for label, _ in named(args)]
    if len(set(labels)) < len(labels):
        raise InputError("--draft: two drafters have one name: give each as NAME=DIR")
    if args.output:
        check_file("--output", Path(args.output))
    if args.plot:
        check_plots(Path(args.plot))


def named(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Name and place of each drafter."""
    found = []
    for text in args.draft or [f"bundled={DEMO / 'draft'}"]:
        label, _, path = text.rpartition("=")
        found.append((label or Path(path).name, path))
    return found


def _numbers(text: str) -> tuple[int, ...]:
    found = tuple(map(positive, names(text)))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers with commas")
    return found


def _counts(text: str) -> tuple[int, ...]:
    return tuple(0 if part == "0" else positive(part) for part in names(text))
