"""The flags of infer.bench, which of them contradict each other, and the modes that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from infer.flags import batches
from infer.flags.pair import DEFAULT_TREE, add_cache_flag, add_pair_flags, check_folder
from infer.peers import check_peer
from infer.program import Parser, names, positive
from moa_jax import InputError
from moa_jax.config import DraftShape
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.measure.plot import check_plots
from moa_jax.pretrained import LoadedDrafter

MODES = ("plain", "chain", "tree")
TREE = (DEFAULT_TREE.depth, DEFAULT_TREE.breadth, DEFAULT_TREE.total_tokens)
SWEEP_DEPTHS, SWEEP_TOTALS = (2, 3, 4, 5), (4, 8, 16)
TUNE_DEPTHS, TUNE_TREES = (2, 3, 4, 5, 6, 8), ((3, 2, 6), (4, 4, 12), (5, 4, 24), TREE)


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
    group.add_argument("--modes", type=names, default="plain,chain,tree", help="which, in order")
    group.add_argument(
        "--chain-depth", type=positive, help="levels with the root; default: the drafter's own"
    )
    group.add_argument(
        "--tree", type=_sizes, default=",".join(map(str, TREE)), help="depth, breadth, total tokens"
    )
    group.add_argument("--sweep-depth", type=_sizes, metavar="D,D", help="chains of these depths")
    group.add_argument("--sweep-total", type=_sizes, metavar="T,T", help="trees of these sizes")
    group.add_argument(
        "--confidence", type=float, default=0.0, help="leave out nodes less probable than this"
    )
    group.add_argument("--draft-vocabulary", metavar="FILE", help="draft from these tokens only")
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
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    group.add_argument("--plot", metavar="FILE.png", help="speedup by depth and by tree size")
    group.add_argument(
        "--tune", action="store_true", help="store the fastest draft in the drafter's folder"
    )
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
    if args.tune and (made_up or args.modes == ["plain"]):
        raise InputError(
            "--tune measures how a trained pair drafts: leave out --random-weights and "
            "--simulate-acceptance, and name chain or tree in --modes"
        )
    if args.tune:
        check_folder("--tune", args.draft)
    if args.tune and (args.confidence or args.draft_vocabulary):
        raise InputError("--tune stores sizes alone: leave out --confidence and --draft-vocabulary")
    if (args.tune or args.plot or args.compare) and "plain" not in args.modes:
        raise InputError(
            "--modes lacks plain, to which --tune, --plot and --compare relate: add it"
        )
    if args.random_weights and (args.target or args.draft):
        raise InputError("--random-weights needs no files: leave out --target and --draft")
    if args.compare:
        check_peer(args.compare)
        if made_up or args.batch > 1:
            raise InputError(
                "--compare decodes real weights one prompt at a time: use a stored pair"
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
    if args.tune:
        depths, trees = [*depths, *TUNE_DEPTHS], [*trees, *TUNE_TREES]
    rest = {"confidence": args.confidence}
    each = {
        "plain": [DraftShape(1)],
        "chain": [DraftShape(levels, **rest) for levels in depths],
        "tree": [DraftShape(*sizes, **rest) for sizes in trees],
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
