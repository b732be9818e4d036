"""Models decoding on a chip that is not attached: launches, bytes, time, memory, fits or not.

    python -m infer.plan --shape meta-llama/Meta-Llama-3-8B-Instruct --topology h200:1 \\
        --cache-rows 2048
    python -m infer.plan --shape meta-llama/Meta-Llama-3-8B-Instruct --topology h200:1 \\
        --drafter configs/moa_llama3_8b.py --mode tree --cache-rows 32768 --rows-used 1024

Compiles the decoding programs ahead of time. This needs the extra `plan` (make env PLAN=1), but no
accelerator, driver, network or weights. Times are modelled: a kernel takes the longer of the time
to move its operands and results and the time to compute its products. Each launch adds 2.5 us on a
GPU. Launches are the kernels and copies of one round. The roofline reads the weights and the used
cache rows once.

The last line of stdout is `fits` (exit code 0) or `does not fit` (3); with --json stdout is one
JSON document. If the compiler itself crashes, the exit code is 4, without a verdict.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from infer.bench.inputs import shapes_of
from infer.bench.plan import decoding
from infer.bench.plan.child import CompilerCrash
from infer.bench.plan.decoding import FORMATS, Plan, PlanRequest
from infer.bench.plan.machines import GIB, check_compiler, machine
from infer.bench.tables import columns, gib
from infer.cli.flags.config_file import SHAPES, read_config
from infer.cli.flags.mesh import add_mesh_flag, as_flag
from infer.cli.flags.pair import (
    DEFAULT_TREE,
    EXPLICIT,
    add_kind_flags,
    add_pair_flag,
    add_tree_sizes,
    drafter_options,
    open_drafter,
    shape_of,
)
from infer.cli.program import Parser, above_zero, positive, run
from moa_jax.config import DistillConfig, DraftShape
from moa_jax.decode.programs import cache_rows_for
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.drafters import method_of
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.files.registry import check_pairing, target_sizes
from moa_jax.pretrained import LoadedDrafter, SpecialIds, Target, describe_target

FITS, DOES_NOT_FIT, CRASHED = 0, 3, 4
ASSUMED_TAU = {"plain": 1.0, "chain": 3.2, "tree": 4.98}  # of Llama-3-8B; the tree's is the paper's


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    request = request_of(args)
    check_compiler(request.machine)
    print("compiling, which takes up to a minute", file=sys.stderr, flush=True)
    try:
        found = decoding.plan(request)
    except CompilerCrash as crash:
        print(f"infer.plan: {crash}", file=sys.stderr)
        return CRASHED
    for notice in found.pop("notices", ()):
        print(notice, file=sys.stderr)
    found |= {"mode": args.mode, "tau_assumed": args.mode != "plain" and args.tau is None}
    print(to_json(found, indent=2) if args.json else described(found))
    if not args.json:
        print("fits" if found["fits"] else "does not fit")
    return FITS if found["fits"] else DOES_NOT_FIT


def request_of(args: argparse.Namespace) -> PlanRequest:
    """The `PlanRequest` of the flags; raises InputError for flags that contradict each other."""
    given = [
        name for name in ("drafter", "depth", "breadth", "total_tokens") if getattr(args, name)
    ]
    if args.mode is None and given:
        flag = given[0].replace("_", "-")
        raise InputError(f"--{flag} without --mode, which is plain; add --mode chain or tree")
    if args.shape is None and args.target is None:
        raise InputError("no --shape; name the target to plan for")
    args.mode = args.mode or "plain"
    target = _target(args.shape or args.target)
    drafter = None if args.mode == "plain" else _drafter(args, target)
    shape = shape_of(args, drafter.depth) if drafter else DraftShape(1)
    found = machine(args.topology)
    chip = found.chip
    chip = chip._replace(
        bandwidth=chip.bandwidth if args.bandwidth is None else 1e12 * args.bandwidth,
        launch=chip.launch if args.launch_us is None else 1e-6 * args.launch_us,
    )
    request = PlanRequest(
        machine=found._replace(chip=chip),
        target=target.config,
        drafter=drafter if shape.num_drafted else None,
        shape=shape,
        cache_rows=cache_rows_for(args.cache_rows),
        rows_used=args.rows_used,
        batch=args.batch,
        weights=args.weights,
        prompt_length=args.prompt_length,
        tau=args.tau or min(ASSUMED_TAU[args.mode], shape.levels),
        mesh=args.mesh or {},
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


def _target(name: str) -> Target:
    """A target without weights: from `SHAPES` by hub id, else from its files."""
    if name in SHAPES:
        return Target(SHAPES[name], None, Path(name), SpecialIds())
    if not Path(name).exists():
        raise InputError(f"--shape {name} is no folder, and no known shape: {', '.join(SHAPES)}")
    return describe_target(name)


def _drafter(args: argparse.Namespace, target: Target) -> LoadedDrafter:
    """The drafter of --drafter, without weights."""
    if args.drafter is None:
        raise InputError(f"--mode {args.mode} drafts; name the drafter with --drafter")
    if not args.drafter.endswith(".py"):
        return open_drafter(args.drafter, target, **drafter_options(args))._replace(params=None)
    for flag, value in drafter_options(args).items():
        if value is not None:
            shown = flag.replace("_", "-")
            raise InputError(f"--{shown}: {args.drafter} sets it; leave the flag out")
    config = read_config(args.drafter, DistillConfig)
    try:
        check_pairing(target_sizes(shapes_of(config.target)), target_sizes(target.config))
    except InputError as error:
        raise InputError(f"{args.drafter}: {error}") from error
    return LoadedDrafter(
        method_of(config.drafter), config.drafter, None, (), Path(args.drafter), None
    )


# ---- the table ----------------------------------------------------------------------------


def described(found: Plan) -> str:
    """A plan as a table."""
    rows, axes = found["cache_rows"], as_flag(found["mesh"])
    lines = [
        f"{found['topology']}: {found['device_kind']}, {found['bandwidth'] / 1e12:g} TB/s, "
        f"{found['launch_us']:g} us a launch" + (f", mesh {axes}, figures of a chip" * bool(axes)),
        f"{found['nodes']} nodes a round, batch {found['batch']}, "
        f"{found['rows_used'] or rows} of {rows} rows used, weights in {found['weights']}",
        "",
    ]
    if found["phases"]:
        lines += [*_phases(found["phases"]), "", *_round(found), ""]
    memory = found["memory"]
    parts = {"weights": "weights", "state": "caches and state", "temporary": "temporary, at most"}
    sizes = [[f"  {name}", gib(memory[part])] for part, name in (parts | {"peak": "peak"}).items()]
    lines += columns([["memory", "GiB"], *sizes], (26, 9))
    least = "" if memory["temporary"] is not None else ", at least"
    return "\n".join(lines) + f"{least} of {memory['limit'] / GIB:.2f} usable"


def _phases(phases: list[dict[str, Any]]) -> list[str]:
    lines = [["", "launches", "MB", "FLOPs", "ms"]]
    for each in phases:
        work = [f"{each['launches']:,}", f"{each['bytes'] / 1e6:,.1f}", f"{each['flops']:.3g}"]
        lines.append([each["phase"], *work, f"{each['ms']:.3f}"])
    return columns(lines, (9, *[12] * 4))


def _round(found: Plan) -> list[str]:
    """Lines on time, speed, collectives and large copies of a round."""
    share, links = found["tokens_per_s"] / found["roofline"], found["links"]
    tau = f"tau {found['tau']:g}" + (", assumed" if found["tau_assumed"] else "")
    lines = [
        f"a round: {found['round_ms']:.3f} ms, {found['launches']:,} launches, modelled",
        f"tokens/s at {tau}: {found['tokens_per_s']:,.0f} of {found['roofline']:,.0f} that the "
        f"roofline allows ({share:.0%})",
        f"prefill is of prompts of {found['prompt_length']} tokens and not part of a round",
    ]
    if links["collectives"]:
        counts = [f"{each['count']:,} {kind}" for kind, each in links["collectives"].items()]
        size = f"{links['bytes'] / 1e6:,.2f} MB received, {links['ms']:.3f} ms"
        lines.append(f"over links a round: {', '.join(counts)}, {size}")
    moves = found["moves"]
    total = sum(move["times"] * move["bytes"] for move in moves) / 1e6
    lines.append(f"{len(moves) or 'no'} moves of 2 MiB or more within a round, {total:,.0f} MB")
    places = [f"{move['opcode']} in {move['phase']}" for move in moves]
    return [*lines, *(f"  {places.count(place)} {place}" for place in sorted({*places}))]


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.plan", __doc__)
    group = parser.add_argument_group("models")
    add_pair_flag(parser, group)
    # --pair sets `target`; the others are flags that only decoding programs have.
    parser.set_defaults(target=None, num_speculative_tokens=None, paths=None, sampled_drafts=False)
    help = f"target: {', '.join(SHAPES)}, a folder with its config.json, or a GGUF file"
    group.add_argument("--shape", metavar="NAME_OR_DIR", help=help)
    help = "a config file of train.distill, or a drafter"
    group.add_argument("--drafter", metavar="FILE.py_OR_DIR", help=help)
    add_kind_flags(group)
    group.add_argument("--weights", default="bfloat16", help=f"format: {', '.join(FORMATS)}")
    group = parser.add_argument_group("drafting")
    group.add_argument("--mode", choices=EXPLICIT, help="how to decode; default: plain")
    help = "levels of a draft with the root; default: the drafter's, else "
    help += f"{DEFAULT_DEPTH}, trees {DEFAULT_TREE.depth}"
    group.add_argument("--depth", type=positive, help=help)
    add_tree_sizes(group)
    help = "tokens that a target pass commits; by default Llama-3-8B's: "
    help += ", ".join(f"{mode} {tau:g}" for mode, tau in ASSUMED_TAU.items())
    group.add_argument("--tau", type=above_zero, help=help)
    group = parser.add_argument_group("sizes")
    group.add_argument("--batch", type=positive, default=1, help="prompts side by side")
    help = "rows of each cache, rounded up to a multiple of 128"
    group.add_argument("--cache-rows", type=positive, default=2048, metavar="N", help=help)
    help = "how many of them are used, which attention alone reads; default: all"
    group.add_argument("--rows-used", type=positive, metavar="N", help=help)
    help = "tokens of the prompt; default: the largest power of two that fits, at most 1024"
    group.add_argument("--prompt-length", type=positive, metavar="N", help=help)
    group = parser.add_argument_group("machine")
    help = "h200:1, v5e:1x1, v6e:1x1 or v5p:1x1x1; several chips, as h200:8, with --mesh"
    group.add_argument("--topology", default="h200:1", help=help)
    add_mesh_flag(group)
    help = "of the chip's memory; default: its data sheet's, 4.8 for an H200 SXM"
    group.add_argument("--bandwidth", type=above_zero, metavar="TB/S", help=help)
    help = "microseconds from one kernel to the next; default: 2.5 on GPUs, a guess, 0 on TPUs"
    group.add_argument("--launch-us", type=above_zero, metavar="US", help=help)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    run(main)
