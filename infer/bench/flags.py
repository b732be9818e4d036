"""The flags of infer.bench, which of them contradict each other, and the modes that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from infer.bench import inputs as batches
from infer.bench.drawing import check_plots
from infer.flags.pair import AUTO, DEFAULT_TREE, EXPLICIT, add_cache_flag, add_pair_flags
from infer.flags.vocabulary import add_vocabulary_flag
from infer.peers import check_peer
from infer.program import Parser, names, positive
from moa_jax import InputError
from moa_jax.config import DraftShape
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.pretrained import LoadedDrafter

MODES = (*EXPLICIT, AUTO)
TREE = (DEFAULT_TREE.depth, DEFAULT_TREE.breadth, DEFAULT_TREE.total_tokens)
SWEEP_DEPTHS, SWEEP_TOTALS = (2, 3, 4, 5), (4, 8, 16)


class Mode(NamedTuple):
    """A way to decode that is measured: one row of the results."""

    name: str
    shape: DraftShape

    @property
    def sizes(self) -> dict[str, Any]:
        kept = {key: getattr(self.shape, key) for key in ("depth", "breadth", "total_tokens")}
        return {"mode": self.name} | kept


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Grouped flags with their defaults."""
    parser = Parser("infer.bench", description)
    add_pair_flags(parser)
    group = parser.add_argument_group("models without files")
    group.add_argument(
        "--random-weights", metavar="CONFIG", help="random weights of a config's shapes"
    )
    group.add_argument(
        "--simulate-acceptance",
        type=_probability,
        metavar="P",
        help="accept drafts with this probability, to time rounds without a trained drafter",
    )
    group = parser.add_argument_group("modes")
    group.add_argument("--modes", type=names, default=",".join(MODES), help="which, in order")
    group.add_argument(
        "--chain-depth", type=positive, help="levels with the root; default: the drafter's own"
    )
    group.add_argument(
        "--tree", type=_sizes, default=",".join(map(str, TREE)), help="depth, breadth, total tokens"
    )
    group.add_argument("--sweep-depth", type=_sizes, metavar="D,D", help="chains of these depths")
    group.add_argument("--sweep-total", type=_sizes, metavar="T,T", help="trees of these sizes")
    add_vocabulary_flag(group)
    batches.add_batch_flags(parser)
    add_cache_flag(parser)
    group = parser.add_argument_group("measuring")
    group.add_argument("--repeats", type=positive, default=3, help="measured times of each prompt")
    group.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer")
    group.add_argument("--ignore-stop", action="store_true", help="answers go on past their end")
    group.add_argument("--no-phases", action="store_true", help="leave out the time by phase")
    group.add_argument(
        "--compare", metavar="PEER", help="also measure `transformers`, in a process of its own"
    )
    group.add_argument(
        "--weights-cost",
        metavar="PATH",
        help="chat records; compare --weights with the weights as stored on their answers",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    group.add_argument("--plot", metavar="FILE.png", help="speedup by depth and by tree size")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raise InputError for flags that do not go together, before anything is loaded."""
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown or not args.modes:
        raise InputError(f"--modes {','.join(args.modes)}: choose from {', '.join(MODES)}")
    if len(args.tree) != 3:
        raise InputError("--tree takes three numbers, depth, breadth and total tokens: 7,8,62")
    simulated = args.simulate_acceptance is not None
    made_up = args.random_weights or simulated
    if (args.plot or args.compare) and "plain" not in args.modes:
        raise InputError("--modes lacks plain, to which --plot and --compare relate: add it")
    if args.random_weights and (args.target or args.draft):
        raise InputError("--random-weights needs no files: leave out --target and --draft")
    if args.compare:
        check_peer(args.compare)
        if made_up or args.batch > 1:
            raise InputError(
                "--compare decodes real weights one prompt at a time: use a stored pair"
            )
    if args.compare and args.weights:
        raise InputError("--compare decodes weights as they are stored: leave out --weights")
    if args.weights_cost and (args.random_weights or not args.weights):
        raise InputError(
            "--weights-cost compares quantised weights with stored ones: add --weights, and leave "
            "out --random-weights"
        )
    if args.plot:
        check_plots(Path(args.plot))
    batches.check(args)


def modes_of(args: argparse.Namespace, drafter: LoadedDrafter | None) -> list[Mode]:
    """The modes that the flags ask for, each once; raises InputError for an impossible draft."""
    asked = getattr(args, "num_speculative_tokens", None)
    depth = args.chain_depth or (asked and asked + 1) or (drafter and drafter.depth)
    depths = [depth or DEFAULT_DEPTH, *(args.sweep_depth or (SWEEP_DEPTHS if args.plot else ()))]
    high, wide, total = args.tree
    totals = args.sweep_total or (SWEEP_TOTALS if args.plot else ())
    trees = [(high, wide, size) for size in (total, *totals)]
    each = {
        "plain": [DraftShape(1)],
        "chain": [DraftShape(levels) for levels in depths],
        "tree": [DraftShape(*sizes) for sizes in trees],
        AUTO: [DraftShape(depths[0])],
    }
    return list(dict.fromkeys(Mode(name, shape) for name in args.modes for shape in each[name]))


def _sizes(text: str) -> list[int]:
    return [positive(part) for part in names(text)]


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a probability from 0 to 1")
    return value
