"""Says what decoding costs on a chip that is not there: launches, bytes, time, does it fit?

    python -m infer.plan --shape meta-llama/Meta-Llama-3-8B-Instruct --topology h200:1 \\
        --cache-rows 2048
    python -m infer.plan --shape meta-llama/Meta-Llama-3-8B-Instruct --topology h200:1 \\
        --drafter configs/moa_llama3_8b.py --mode tree --cache-rows 32768 --rows-used 1024

Compiles the programs that decoding runs, ahead of time. No accelerator, driver, network or weights
are needed, only the extra `plan` (make env PLAN=1). Times are modelled. A kernel takes the longer
of two times, that of its bytes and that of its products. Each launch adds 2.5 us on a GPU. Bytes
are those that reach the chip's memory: activations of up to half of a GPU's cache do not. Launches
are kernels and copies of one round. The roofline reads weights and used rows once.

The last line of stdout is `fits` (exit code 0) or `does not fit` (3); with --json stdout is one
JSON document. Where the compiler itself crashes there is no verdict, and the exit code is 4.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from infer.bench.inputs import shapes_of
from infer.bench.tables import columns, gib
from infer.flags.config_file import SHAPES, read_config
from infer.flags.mesh import add_mesh_flag, as_flag
from infer.flags.pair import (
    DEFAULT_TREE,
    EXPLICIT,
    add_kind_flags,
    add_pair_flag,
    add_tree_sizes,
    drafter_options,
    open_drafter,
    shape_of,
)
from infer.program import Parser, above_zero, local_path, positive, run
from moa_jax.aot import decoding
from moa_jax.aot.child import CompilerCrash
from moa_jax.aot.decoding import FORMATS, Plan, PlanRequest
from moa_jax.aot.machines import GIB, Machine, check_compiler, machine
from moa_jax.config import DistillConfig, DraftShape
from moa_jax.decode.programs import cache_rows_for
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.drafters import method_of
from moa_jax.errors import InputError
from moa_jax.files.folders import write_whole
from moa_jax.files.json_text import to_json
from moa_jax.files.kinds import check_pairing, target_sizes
from moa_jax.files.places import check_file
from moa_jax.pretrained import LoadedDrafter, SpecialIds, Target, describe_target

FITS, DOES_NOT_FIT, CRASHED = 0, 3, 4
ASSUMED_TAU = {"plain": 1.0, "chain": 3.2, "tree": 4.98}  # Llama-3-8B's, the paper's for a tree


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    request = request_of(args)
    check_compiler(request.machine)
    if args.dump_hlo is not None:
        check_file("--dump-hlo", args.dump_hlo)
    print("compiling, which takes up to a minute", file=sys.stderr, flush=True)
    try:
        found = decoding.plan(request)
    except CompilerCrash as crash:
        print(f"infer.plan: {crash}", file=sys.stderr)
        return CRASHED
    for notice in found.pop("notices", ()):
        print(notice, file=sys.stderr)
    text = found.pop("hlo")
    if args.dump_hlo is not None and text is not None:
        write_whole(args.dump_hlo, text)
    found |= {"mode": args.mode, "tau_assumed": args.mode != "plain" and args.tau is None}
    print(to_json(found, indent=2) if args.json else described(found))
    if not args.json:
        print("fits" if found["fits"] else "does not fit")
    return FITS if found["fits"] else DOES_NOT_FIT


def request_of(args: argparse.Namespace) -> PlanRequest:
    """What the flags ask for; raises InputError for what does not go together."""
    args.mode = _mode(args)
    if args.shape is None and args.target is None:
        raise InputError("no --shape: name the target whose rounds are to be priced")
    target = _target(args.shape or args.target)
    drafter = _drafter(args, target)
    drafts = drafter and args.mode != "plain"
    shape = shape_of(args, drafter.depth) if drafts else DraftShape(1)
    request = PlanRequest(
        machine=_machine(args),
        target=target.config,
        drafter=drafter if shape.num_drafted or args.late else None,
        shape=shape,
        cache_rows=cache_rows_for(args.cache_rows),
        rows_used=args.rows_used,
        batch=args.batch,
        weights=args.weights,
        prompt_length=args.prompt_length,
        tau=args.tau or min(ASSUMED_TAU[args.mode], shape.levels),
        mesh=args.mesh or {},
        late=args.late,
    )
    request.check()
    positions = target.config.max_position_embeddings
    if request.cache_rows > cache_rows_for(positions + shape.num_rows):
        print(
            f"{request.cache_rows} rows are priced, but the target has {positions} positions: "
            "decoding refuses longer texts",
            file=sys.stderr,
        )
    return request


def _machine(args: argparse.Namespace) -> Machine:
    """The machine of --topology, with the constants of the flags in place of its own."""
    found = machine(args.topology)
    chip = found.chip
    if args.bandwidth is not None:
        chip = chip._replace(bandwidth=1e12 * args.bandwidth)
    if args.launch_us is not None:
        chip = chip._replace(launch=1e-6 * args.launch_us)
    return found._replace(chip=chip)


def _target(name: str) -> Target:
    """The sizes of a target: known ones by their hub id, else those of its folder."""
    if name in SHAPES:
        return Target(SHAPES[name], None, Path(name), SpecialIds())
    if not Path(name).exists():
        known = ", ".join(SHAPES)
        raise InputError(f"--shape {name} is no folder, and no known shape: these are {known}")
    return describe_target(name)


def _mode(args: argparse.Namespace) -> str:
    """The mode that the flags ask for; raises InputError for drafts without one."""
    drafts = ("drafter", "depth", "breadth", "total_tokens", "late")
    given = [flag.replace("_", "-") for flag in drafts if getattr(args, flag)]
    if args.mode is None and given:
        raise InputError(f"--{given[0]} without --mode, which is plain: add --mode chain or tree")
    return args.mode or "plain"


def _drafter(args: argparse.Namespace, target: Target) -> LoadedDrafter | None:
    """The drafter of --drafter without its weights; None for plain decoding."""
    if args.mode == "plain" and not args.late:
        return None
    if args.drafter is None:
        asked = "--late" if args.late else f"--mode {args.mode} drafts"
        raise InputError(f"{asked}: name the drafter with --drafter")
    if not args.drafter.endswith(".py"):
        return open_drafter(args.drafter, target, **drafter_options(args))._replace(params=None)
    for flag, value in drafter_options(args).items():
        if value is not None:
            shown = flag.replace("_", "-")
            raise InputError(f"--{shown}: {args.drafter} says it: leave the flag out")
    config = read_config(args.drafter, DistillConfig)
    try:
        check_pairing(target_sizes(shapes_of(config.target)), target_sizes(target.config))
    except InputError as error:
        raise InputError(f"{args.drafter}: {error}") from error
    method, folder = method_of(config.drafter), Path(args.drafter)
    return LoadedDrafter(method, config.drafter, None, (), folder, None)


# ---- the table ----------------------------------------------------------------------------

_COLUMNS = ("launches", "products", "weights", "caches", "activations", "FLOPs", "ms")


def described(found: Plan) -> str:
    """A plan as a table."""
    rows = found["cache_rows"]
    used = rows if found["rows_used"] is None else found["rows_used"]
    axes = as_flag(found["mesh"])
    lines = [
        f"{found['topology']}: {found['device_kind']}, {found['bandwidth'] / 1e12:g} TB/s, "
        f"{found['launch_us']:g} us a launch" + (f", mesh {axes}, figures of a chip" * bool(axes)),
        f"{found['nodes']} nodes a round, batch {found['batch']}, {used} of {rows} rows used, "
        f"weights in {found['weights']}" + ", drafter late" * found["late"],
        "",
    ]
    if found["phases"]:
        lines += [*_phases(found), "", *_links(found["links"]), *_speed(found), ""]
        lines += [*_moves(found["moves"]), ""]
    return "\n".join(lines + _memory(found["memory"]))


def _phases(found: Plan) -> list[str]:
    lines = [["", *_COLUMNS]]
    for each in found["phases"]:
        sizes = [f"{each[kind] / 1e6:,.1f} MB" for kind in _COLUMNS[2:5]]
        counts = [each["phase"], f"{each['launches']:,}", f"{each['products']:,}"]
        lines.append([*counts, *sizes, f"{each['flops']:.3g}", f"{each['ms']:.3f}"])
    return columns(lines, (9, *[12] * len(_COLUMNS)))


def _speed(found: Plan) -> list[str]:
    share = found["tokens_per_s"] / found["roofline"]
    tau = f"tau {found['tau']:g}" + (", assumed" if found["tau_assumed"] else "")
    return [
        f"a round: {found['round_ms']:.3f} ms, {found['launches']:,} launches, modelled",
        f"tokens/s at {tau}: {found['tokens_per_s']:,.0f} of {found['roofline']:,.0f} that the "
        f"roofline allows ({share:.0%})",
        f"prefill is of prompts of {found['prompt_length']} tokens and no part of a round",
    ]


def _links(links: dict[str, Any]) -> list[str]:
    """What a round sends over links; nothing for a single chip."""
    if not links["collectives"]:
        return []
    counts = [f"{each['count']:,} {kind}" for kind, each in links["collectives"].items()]
    return [
        f"over links a round: {', '.join(counts)}, {links['bytes'] / 1e6:,.2f} MB received, "
        f"{links['ms']:.3f} ms"
    ]


def _moves(moves: list[dict[str, Any]]) -> list[str]:
    if not moves:
        return ["nothing of 2 MiB or more is moved within a round"]
    total = sum(move["times"] * move["bytes"] for move in moves) / 1e6
    lines = []
    kinds = sorted({(move["phase"], move["opcode"]) for move in moves})
    for phase, opcode in kinds:
        these = [m for m in moves if (m["phase"], m["opcode"]) == (phase, opcode)]
        sizes = [move["times"] * move["bytes"] for move in these]
        lines.append([f"  {phase:<9}{opcode}", str(len(sizes)), f"{sum(sizes) / 1e6:,.1f} MB"])
    title = f"{len(moves)} moves of 2 MiB or more within a round, {total:,.0f} MB"
    return [title, *columns(lines, (25, 5, 15))]


def _memory(memory: dict[str, int | None]) -> list[str]:
    names = {
        "weights": "weights",
        "state": "caches and state",
        "temporary": "temporary, at most",
        "peak": "peak",
    }
    rows = [[f"  {name}", gib(memory[part])] for part, name in names.items()]
    lines = columns([["memory", "GiB"], *rows], (26, 9))
    least = "" if memory["temporary"] is not None else ", at least"
    return [*lines[:-1], f"{lines[-1]}{least} of {memory['limit'] / GIB:.2f} usable"]


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.plan", __doc__)
    parser.set_defaults(num_speculative_tokens=None, paths=None, sampled_drafts=False)
    _add_models(parser)
    _add_drafting(parser)
    _add_sizes(parser)
    _add_machine(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--dump-hlo", type=local_path, metavar="FILE", help="writes the optimised decode program"
    )
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _add_models(parser: Parser) -> None:
    group = parser.add_argument_group("models")
    add_pair_flag(parser, group)
    parser.set_defaults(target=None)  # which --pair sets
    group.add_argument(
        "--shape",
        metavar="NAME_OR_DIR",
        help=f"target: {', '.join(SHAPES)}, a folder with its config.json, or a GGUF file",
    )
    group.add_argument(
        "--drafter", metavar="FILE.py_OR_DIR", help="a config file of train.distill, or a drafter"
    )
    add_kind_flags(group)
    group.add_argument("--weights", default="bfloat16", help=f"format: {', '.join(FORMATS)}")


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting")
    group.add_argument("--mode", choices=EXPLICIT, help="how to decode; default: plain")
    group.add_argument(
        "--depth",
        type=positive,
        help=f"levels of a draft with the root; default: the drafter's, else {DEFAULT_DEPTH}, "
        f"trees {DEFAULT_TREE.depth}",
    )
    add_tree_sizes(group)
    group.add_argument(
        "--late",
        action="store_true",
        help="with what is kept for a drafter that may read late, as where the mode is auto",
    )
    group.add_argument(
        "--tau",
        type=above_zero,
        help="tokens that a target pass commits; assumed by default, as for Llama-3-8B: "
        f"chains {ASSUMED_TAU['chain']}, trees {ASSUMED_TAU['tree']}; plain 1",
    )


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sizes")
    group.add_argument("--batch", type=positive, default=1, help="prompts side by side")
    group.add_argument(
        "--cache-rows",
        type=positive,
        default=2048,
        metavar="N",
        help="rows of each cache, rounded up to a multiple of 128",
    )
    group.add_argument(
        "--rows-used",
        type=positive,
        metavar="N",
        help="how many of them hold something; only kernels that know a length read fewer rows; "
        "default: all",
    )
    group.add_argument(
        "--prompt-length",
        type=positive,
        metavar="N",
        help="tokens of the prompt that prefill reads; default: a power of two that fits, at most "
        "1024",
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--topology",
        default="h200:1",
        help="h200:1, v5e:1x1, v6e:1x1 or v5p:1x1x1; several chips, as h200:8, with --mesh",
    )
    add_mesh_flag(group)
    group.add_argument(
        "--bandwidth",
        type=above_zero,
        metavar="TB/S",
        help="of the chip's memory; default: its data sheet's, 4.8 for an H200 SXM",
    )
    group.add_argument(
        "--launch-us",
        type=above_zero,
        metavar="US",
        help="microseconds from one kernel to the next; default: 2.5 on GPUs, where it is a "
        "guess for kernels of a CUDA graph until one is timed, and none on TPUs",
    )


if __name__ == "__main__":
    run(main)
