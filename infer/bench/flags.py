"""The flags of infer.bench, checks of their combinations, and the modes that they select."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from infer.bench.inputs import add_batch_flags
from infer.cli.flags.pair import AUTO, DEFAULT_TREE, EXPLICIT, add_cache_flag, add_pair_flags
from infer.cli.flags.vocabulary import add_vocabulary_flag
from infer.cli.program import Parser, names, positive
from infer.peers import check_peer
from moa_jax import InputError
from moa_jax.config import DraftShape
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.pairs import LOOKUP
from moa_jax.pretrained import LoadedDrafter

MODES = (*EXPLICIT, AUTO)
TREE = (DEFAULT_TREE.depth, DEFAULT_TREE.breadth, DEFAULT_TREE.total_tokens)


class Mode(NamedTuple):
    """A measured decoding mode: one row of the results."""

    name: str
    shape: DraftShape

    @property
    def sizes(self) -> dict[str, Any]:
        kept = {key: getattr(self.shape, key) for key in ("depth", "breadth", "total_tokens")}
        return {"mode": self.name} | kept


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The parser of infer.bench, with grouped flags."""
    parser = Parser("infer.bench", description)
    add_pair_flags(parser)
    add = parser.add_argument_group("models without files").add_argument
    add("--random-weights", metavar="CONFIG", help="random weights of a config's shapes")
    about = "accept drafts with this probability, to time rounds without a trained drafter"
    add("--simulate-acceptance", type=_probability, metavar="P", help=about)
    group = parser.add_argument_group("modes")
    add = group.add_argument
    add("--modes", type=names, default=",".join(MODES), help="which, in order")
    about = "levels with the root; default: the drafter's own"
    add("--chain-depth", type=positive, help=about)
    tree = ",".join(map(str, TREE))
    add("--tree", type=_sizes, default=tree, help="depth, breadth, total tokens")
    add_vocabulary_flag(group)
    add_batch_flags(parser)
    add_cache_flag(parser)
    add = parser.add_argument_group("measuring").add_argument
    add("--repeats", type=positive, default=3, help="measured times of each prompt")
    add("--max-new-tokens", type=positive, default=128, help="longest answer")
    add("--ignore-stop", action="store_true", help="answers go on past their end")
    add("--no-phases", action="store_true", help="leave out the time by phase")
    about = "also measure `transformers` or `vllm`, in a process of its own"
    add("--compare", metavar="PEER", help=about)
    add("--peer-python", metavar="PYTHON", help="with the packages of PEER; default: this one")
    about = "chat records; compare --weights with the weights as stored on their answers"
    add("--weights-cost", metavar="PATH", help=about)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON document on stdout")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises InputError for contradicting flags, before any model is loaded."""
    random, compares = args.random_weights, args.compare
    made_up = random or args.simulate_acceptance is not None
    if compares:
        check_peer(compares, python=args.peer_python)
    refusals = {
        f"--modes {','.join(args.modes)}; choose from {', '.join(MODES)}": not args.modes
        or not {*args.modes} <= {*MODES},
        "--tree takes three numbers, depth, breadth and total tokens: 7,8,62": len(args.tree) != 3,
        "--modes lacks plain, to which --compare relates; add it": compares
        and "plain" not in args.modes,
        "--random-weights needs no files; leave out --target and --draft": random
        and (args.target or args.draft),
        "--random-weights has no tokenizer; use --prompt-length or prompt_ids": random
        and args.conversations,
        "--peer-python runs --compare; add it": args.peer_python and not compares,
        "--compare decodes real weights one prompt at a time; use a stored pair": compares
        and (made_up or args.batch > 1),
        "--compare decodes weights as they are stored; leave out --weights": compares
        and args.weights,
        "--weights-cost compares quantized weights with stored ones; add --weights, and leave out "
        "--random-weights": args.weights_cost and (random or not args.weights),
    }
    for message, is_wrong in refusals.items():
        if is_wrong:
            raise InputError(message)


def modes_of(args: argparse.Namespace, drafter: LoadedDrafter | None) -> list[Mode]:
    """The modes that the flags select, without duplicates; raises InputError for invalid drafts."""
    asked = getattr(args, "num_speculative_tokens", None)
    depth = args.chain_depth or (asked and asked + 1) or (drafter and drafter.depth)
    chain = DraftShape(depth or DEFAULT_DEPTH)
    each = {"plain": DraftShape(1), "chain": chain, "tree": DraftShape(*args.tree), AUTO: chain}
    modes = args.modes
    if modes == list(MODES) and drafter and drafter.method == LOOKUP:  # drafts no trees
        modes = [name for name in MODES if name != "tree"]
    return [Mode(name, each[name]) for name in dict.fromkeys(modes)]


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
