"""Flags of `infer.bench --serve`, and the decoding variants that they select."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from infer.bench.candidates import PLAIN, given_of
from infer.bench.drawing import check_plots
from infer.cli.flags.mesh import add_mesh_flag, as_flag
from infer.cli.flags.pair import AUTO, BUNDLED, EXPLICIT, LOOKUP, add_model_flags
from infer.cli.program import Parser, above_zero, names, positive, whole
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from moa_jax.files.model_folder import public_name

MODES = (*EXPLICIT, AUTO)
RATES = "0.1x,0.3x,0.5x,0.75x,1x,1.25x,1.5x"
REQUESTS_PER_CLIENT = 12  # per repeat of a closed loop


class Variant(NamedTuple):
    """A mode with a drafter; every variant has its own servers."""

    label: str
    mode: str
    draft: str | None
    flags: tuple[str, ...]  # for infer.serve


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The parser of `infer.bench --serve`, with grouped flags."""
    parser = Parser("infer.bench --serve", description)
    add_mesh_flag(add_model_flags(parser, several=True))
    add = parser.add_argument_group("servers").add_argument
    modes = f"of {', '.join(MODES)}; all but plain with each drafter"
    add("--modes", type=names, default="plain,chain,auto", help=modes)
    add("--slots", type=positive, default=16, help="requests decoded at once")
    add("--max-tokens", type=positive, metavar="N", help="of a prompt with its answer")
    servers = "per variant, taking turns by repeat: two processes of one program differ in speed"
    add("--servers", type=positive, default=1, metavar="N", help=servers)
    add = parser.add_argument_group("requests").add_argument
    add("--suite", help="question sets, as of infer.evaluate; default: paper if found, else demo")
    add("--max-new-tokens", type=positive, default=128, help="longest answer")
    add("--ignore-stop", action="store_true", help="decode past the end of the answer")
    add("--temperature", type=float, default=0.0, metavar="X", help="each request has a seed")
    add("--seed", type=whole, default=0, help="of arrivals, questions and requests")
    group = parser.add_argument_group("load")
    rates = (
        "requests/s; 0.5x: half of plain decoding's measured capacity; 2c: two clients in a loop"
    )
    group.add_argument("--rates", type=_rates, default=RATES, metavar="R,R", help=rates)
    size = group.add_mutually_exclusive_group()
    seconds = "of arrivals per rate and repeat; closed loops have no time"
    size.add_argument("--seconds", type=above_zero, default=10.0, metavar="S", help=seconds)
    count = f"per rate and repeat instead; clients send {REQUESTS_PER_CLIENT} each by default"
    size.add_argument("--requests", type=positive, metavar="N", help=count)
    group.add_argument("--repeats", type=positive, default=2, help="of each rate, other questions")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON document on stdout")
    add("--plot", metavar="FILE.png", help="latency, throughput and speedup by rate")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises InputError for invalid values and combinations, before any server starts."""
    if not args.modes or set(args.modes) - set(MODES):
        raise InputError(f"--modes {','.join(args.modes)}; choose from {', '.join(MODES)}")
    if args.draft and set(args.modes) == {PLAIN}:
        raise InputError("--draft with --modes plain, which drafts nothing; leave one out")
    if PLAIN not in args.modes and any(rate.endswith("x") for rate in args.rates):
        raise InputError("--modes lacks plain, of whose capacity --rates are shares; add plain")
    if args.repeats % args.servers:
        line = f"--servers {args.servers} cannot have equal parts of --repeats {args.repeats}"
        raise InputError(f"{line}; choose a multiple")
    Sampling(temperature=args.temperature)
    labels = [variant.label for variant in variants_of(args)]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise InputError(f"two ways are named {twice[0]}; name drafters as --draft NAME=DIR")
    if args.plot:
        check_plots(Path(args.plot))


def variants_of(args: argparse.Namespace) -> list[Variant]:
    """Plain decoding once, and every other mode with every drafter.

    Raises InputError for a --draft that cannot be read.
    """
    own = LOOKUP if args.target else BUNDLED
    drafts = [given_of(text) for text in args.draft or [own]]
    shared = ("target", "dtype", "weights", "threads", "slots", "max_tokens")
    common = {name: getattr(args, name) for name in shared}
    common["mesh"] = as_flag(args.mesh) if args.mesh else None
    kind = {name: getattr(args, name) for name in ("method", "target_layer_inference")}
    found = []
    for mode in dict.fromkeys(args.modes):
        if mode == PLAIN:
            found.append(Variant(mode, mode, None, _as_flags(common | {"mode": mode})))
            continue
        for each in drafts:
            name = each.label or (public_name(Path(each.path)) if args.draft else own)
            flags = common | {"mode": mode, "draft": None if each.path == BUNDLED else each.path}
            label = mode if len(drafts) == 1 else f"{name} {mode}"
            found.append(Variant(label, mode, name, _as_flags(flags | kind | each.options)))
    return found


def _as_flags(values: dict[str, object]) -> tuple[str, ...]:
    """Converts values keyed by flag name to a command line; skips None."""
    pairs = [(f"--{name.replace('_', '-')}", str(v)) for name, v in values.items() if v is not None]
    return tuple(word for pair in pairs for word in pair)


def _rates(text: str) -> list[str]:
    """Type of --rates: requests/s, shares such as 0.5x, numbers of clients such as 2c."""
    found = names(text)
    for each in found:
        try:
            positive(each[:-1]) if each.endswith("c") else above_zero(each.removesuffix("x"))
        except argparse.ArgumentTypeError:
            line = f"{each!r} is no rate above 0; give requests/s, a share (0.5x) or clients (2c)"
            raise argparse.ArgumentTypeError(line) from None
    if not found:
        raise argparse.ArgumentTypeError("no rate; give requests/s, shares (0.5x) or clients (2c)")
    return found
