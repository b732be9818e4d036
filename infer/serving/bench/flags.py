"""The flags of `infer.bench --serve`, and which of them contradict each other."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from infer.bench.candidates import PLAIN, given_of
from infer.bench.drawing import check_plots
from infer.flags.mesh import add_mesh_flag, as_flag
from infer.flags.pair import AUTO, BUNDLED, EXPLICIT, LOOKUP, add_model_flags
from infer.program import Parser, above_zero, local_path, names, positive, whole
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from moa_jax.files.folders import public_name
from moa_jax.files.places import check_file

MODES = (*EXPLICIT, AUTO)
RATES = "0.1x,0.3x,0.5x,0.75x,1x,1.25x,1.5x"
SECONDS = 10.0  # of arrivals, for each rate and repeat


EACH = 12  # requests of each client who asks again and again, for each repeat


class Rate(NamedTuple):
    """How many requests come in a second, or how many clients ask again once they are answered."""

    value: float
    unit: str  # "" of requests a second, "x" of plain decoding's capacity, "c" of clients

    @property
    def of_capacity(self) -> bool:
        return self.unit == "x"

    @property
    def clients(self) -> int | None:
        return int(self.value) if self.unit == "c" else None


class ServedWay(NamedTuple):
    """A way to decode that has servers of its own, with their flags."""

    label: str
    mode: str
    draft: str | None
    flags: tuple[str, ...]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Grouped flags with their defaults."""
    parser = Parser("infer.bench --serve", description)
    add_mesh_flag(add_model_flags(parser, several=True))
    group = parser.add_argument_group("servers")
    group.add_argument(
        "--modes",
        type=names,
        default="plain,chain,auto",
        help=f"of {', '.join(MODES)}; all but plain with each drafter",
    )
    group.add_argument(
        "--chain-depth", type=positive, help="levels with the root; default: the drafter's own"
    )
    group.add_argument("--slots", type=positive, default=16, help="answers decoded at once")
    group.add_argument(
        "--max-tokens", type=positive, metavar="N", help="of a prompt with its answer"
    )
    group = parser.add_argument_group("what is asked")
    group.add_argument(
        "--suite", help="question sets, as of infer.evaluate; default: paper where found, else demo"
    )
    group.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer")
    group.add_argument("--ignore-stop", action="store_true", help="answers go on past their end")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="above 0 each answer has a seed"
    )
    _add_load_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    group.add_argument("--output", type=local_path, metavar="FILE.json", help="it as a file, too")
    group.add_argument("--plot", metavar="FILE.png", help="latency and throughput against rate")
    return parser


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--rates",
        type=_rates,
        default=RATES,
        metavar="R,R",
        help="requests a second; 0.5x is half of what plain decoding can serve, which is measured; "
        "2c are two clients who ask again once they are answered",
    )
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--seconds",
        type=above_zero,
        metavar="S",
        help="during which requests come, for each rate and repeat, but not for clients; default: "
        f"{SECONDS:g}",
    )
    size.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help=f"of them, instead; clients have {EACH} each by default",
    )
    group.add_argument(
        "--repeats", type=positive, default=2, help="of each rate, with other questions each time"
    )
    group.add_argument(
        "--servers",
        type=positive,
        default=1,
        metavar="N",
        help="of each way, which take turns repeat by repeat, as two processes of the same "
        "programs may be some percent apart; --repeats is a multiple",
    )
    group.add_argument("--seed", type=whole, default=0, help="of arrivals, questions and answers")


def check(args: argparse.Namespace) -> None:
    """Raise InputError for values and combinations that cannot be, before anything starts."""
    if not args.modes or set(args.modes) - set(MODES):
        raise InputError(f"--modes {','.join(args.modes)}: choose from {', '.join(MODES)}")
    drafts = [mode for mode in args.modes if mode != PLAIN]
    if not drafts and args.draft:
        raise InputError("--draft with --modes plain, which drafts nothing: leave one out")
    if args.chain_depth and "chain" not in args.modes:
        raise InputError("--chain-depth without chain in --modes: leave it out, or add chain")
    if PLAIN not in args.modes and any(rate.of_capacity for rate in args.rates):
        raise InputError(
            "--modes lacks plain, of whose capacity --rates are shares: add it, or give --rates in "
            "requests a second, without x"
        )
    Sampling(temperature=args.temperature)
    twice = [way.label for way in ways_of(args)]
    for label, count in Counter(twice).items():
        if count > 1:
            raise InputError(f"two ways are named {label}: name drafters as --draft NAME=DIR")
    if args.repeats % args.servers:
        raise InputError(
            f"--servers {args.servers} cannot have equal parts of --repeats {args.repeats}: choose "
            "a multiple"
        )
    if args.output:
        check_file("--output", args.output)
    if args.plot:
        check_plots(Path(args.plot))


def ways_of(args: argparse.Namespace) -> list[ServedWay]:
    """The ways that are measured: plain decoding once, the other modes with each drafter.

    Raises InputError for a --draft that cannot be read.
    """
    own = LOOKUP if args.target else BUNDLED
    given = [given_of(text) for text in args.draft or [own]]
    found = []
    for mode in dict.fromkeys(args.modes):
        for each in given[:1] if mode == PLAIN else given:
            name = each.label or (public_name(Path(each.path)) if args.draft else own)
            options = {"method": args.method, "target_layer_inference": args.target_layer_inference}
            flags = _common_flags(args) + ["--mode", mode]
            if mode != PLAIN:
                flags += [] if each.path == BUNDLED else ["--draft", each.path]
                flags += _flags_of(options | each.options)
            if mode == "chain" and args.chain_depth:
                flags += ["--depth", str(args.chain_depth)]
            label = mode if mode == PLAIN or len(given) == 1 else f"{name} {mode}"
            found.append(ServedWay(label, mode, None if mode == PLAIN else name, tuple(flags)))
    return found


def _common_flags(args: argparse.Namespace) -> list[str]:
    shared = ("target", "dtype", "weights", "threads", "slots", "max_tokens")
    values = {name: getattr(args, name) for name in shared}
    return _flags_of(values | {"mesh": as_flag(args.mesh) if args.mesh else None})


def _flags_of(values: dict[str, object]) -> list[str]:
    """Values by the names of flags as a command line has them, without those that are None."""
    known = {name: value for name, value in values.items() if value is not None}
    return [
        word
        for name, value in known.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def _rates(text: str) -> tuple[Rate, ...]:
    found = tuple(map(_rate, names(text)))
    if not found:
        raise argparse.ArgumentTypeError(
            "no rate: give requests a second, shares like 0.5x, or clients like 2c"
        )
    return found


def _rate(text: str) -> Rate:
    unit = text[-1:] if text[-1:] in ("x", "c") else ""
    number = text.removesuffix(unit)
    try:
        return Rate(positive(number) if unit == "c" else above_zero(number), unit)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no rate above 0: give requests a second, a share of plain's capacity "
            "like 0.5x, or a number of clients like 2c"
        ) from None
