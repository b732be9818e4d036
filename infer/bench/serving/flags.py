"""Flags of `infer.bench --serve`, and those of the servers that it starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from infer.bench.candidates import PLAIN
from infer.bench.drawing import check_plots
from infer.cli.flags.mesh import add_mesh_flag, as_flag
from infer.cli.flags.pair import AUTO, EXPLICIT, add_model_flags, drafter_options
from infer.cli.program import Parser, above_zero, names, positive, whole
from moa_jax.config import Sampling
from moa_jax.errors import InputError

MODES = (*EXPLICIT, AUTO)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The parser of `infer.bench --serve`, with grouped flags."""
    parser = Parser("infer.bench --serve", description)
    add_mesh_flag(add_model_flags(parser))
    add = parser.add_argument_group("servers").add_argument
    modes = f"of {', '.join(MODES)}; plain is always one of them"
    add("--modes", type=names, default="plain,chain,auto", help=modes)
    add("--slots", type=positive, default=16, help="requests decoded at once")
    add("--max-tokens", type=positive, metavar="N", help="of a prompt with its answer")
    add = parser.add_argument_group("requests").add_argument
    add("--suite", default="demo", help="question sets, as of infer.evaluate")
    add("--max-new-tokens", type=positive, default=128, help="longest answer")
    add("--ignore-stop", action="store_true", help="decode past the end of the answer")
    add("--temperature", type=float, default=0.0, metavar="X", help="each request has a seed")
    add("--seed", type=whole, default=0, help="of arrivals, questions and requests")
    add = parser.add_argument_group("load").add_argument
    add("--rates", type=_rates, default="0.5,1,2,4,8", metavar="R,R", help="requests/s")
    add("--requests", type=positive, default=64, metavar="N", help="per rate")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON document on stdout")
    add("--plot", metavar="FILE.png", help="latency, throughput and speedup by rate")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises InputError for invalid values and combinations, before any server starts."""
    if not args.modes or set(args.modes) - set(MODES):
        raise InputError(f"--modes {','.join(args.modes)}; choose from {', '.join(MODES)}")
    Sampling(temperature=args.temperature)
    if args.plot:
        check_plots(Path(args.plot))


def variants_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """The flags of a server per mode, plain decoding first."""
    shared = ("target", "dtype", "weights", "threads", "slots", "max_tokens")
    common = {name: getattr(args, name) for name in shared}
    common["mesh"] = as_flag(args.mesh) if args.mesh else None
    drafter = {"draft": args.draft, **drafter_options(args)}
    found = {}
    for mode in dict.fromkeys([PLAIN, *args.modes]):
        values = common | {"mode": mode} | ({} if mode == PLAIN else drafter)
        flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
        found[mode] = [str(word) for pair in flags.items() if pair[1] is not None for word in pair]
    return found


def _rates(text: str) -> list[float]:
    """Type of --rates: requests/s, separated by commas."""
    found = [above_zero(each) for each in names(text)]
    if not found:
        raise argparse.ArgumentTypeError("no rate; give requests/s, separated by commas")
    return sorted(found)
