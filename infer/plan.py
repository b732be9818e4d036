"""Models decoding on a chip that is not attached: launches, bytes, time, memory, fits or not.

    python -m infer.plan --shape meta-llama/Meta-Llama-3-8B-Instruct --topology h200:1 \\
        --cache-rows 2048
    python -m infer.plan --shape meta-llama/Meta-Llama-3-8B-Instruct --topology h200:1 \\
        --drafter configs/moa_llama3_8b.py --mode tree --cache-rows 32768 --rows-used 1024

Compiles the decoding programs ahead of time. This needs the extra `plan` (make env PLAN=1), but no
accelerator, driver, network or weights. Times are modelled: a matrix product takes the longer of
the time to move its operands and results and the time to compute it. Each launch adds 2.5 us on a
GPU. Launches are the kernels and copies of one round. The roofline has the products alone.

The last line of stdout is `fits` (exit code 0) or `does not fit` (3); with --json stdout is one
JSON document.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

from infer.bench.inputs import shapes_of
from infer.bench.plan import decoding, machines
from infer.bench.plan.decoding import FORMATS, Plan, PlanRequest
from infer.bench.tables import gib, table_of
from infer.cli.flags import pair
from infer.cli.flags.config_file import SHAPES, read_config
from infer.cli.flags.mesh import add_mesh_flag, as_flag
from infer.cli.program import Parser, above_zero, positive, run
from moa_jax.config import DistillConfig, DraftShape
from moa_jax.decode.programs import cache_rows_for
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.drafters import method_of
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.files.registry import check_pairing, target_sizes
from moa_jax.pretrained import LoadedDrafter, SpecialIds, Target, describe_target

FITS, DOES_NOT_FIT = 0, 3
ASSUMED_TAU = {"plain": 1.0, "chain": 3.2, "tree": 4.98}  # of Llama-3-8B; the tree's is the paper's


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # an attached accelerator is left alone
    jax.config.update("jax_enable_compilation_cache", False)  # jax decides at the first compile
    request = request_of(args)
    print("compiling, which takes up to a minute", file=sys.stderr, flush=True)
    found = decoding.plan(request) | {"mode": args.mode}
    print(to_json(found, indent=2) if args.json else described(found))
    return FITS if found["fits"] else DOES_NOT_FIT


def request_of(args: argparse.Namespace) -> PlanRequest:
    """The `PlanRequest` of the flags; raises InputError for flags that contradict each other."""
    if args.mode is None and (args.drafter or args.depth or args.breadth or args.total_tokens):
        raise InputError("a draft without --mode, which is plain; add --mode chain or tree")
    if args.shape is None and args.target is None:
        raise InputError("no --shape; name the target to plan for")
    args.mode = args.mode or "plain"
    target = _target(args.shape or args.target)
    drafter = None if args.mode == "plain" else _drafter(args, target)
    shape = pair.shape_of(args, drafter.depth) if drafter else DraftShape(1)
    found = machines.machine(args.topology)
    chip = found.chip
    if args.bandwidth is not None:
        chip = chip._replace(bandwidth=1e12 * args.bandwidth)
    if args.launch_us is not None:
        chip = chip._replace(launch=1e-6 * args.launch_us)
    request = PlanRequest(
        machine=found._replace(chip=chip),
        target=target.config,
        drafter=drafter if shape.num_drafted else None,
        shape=shape,
        cache_rows=cache_rows_for(args.cache_rows),
        rows_used=args.rows_used,
        batch=args.batch,
        weights=args.weights,
        tau=args.tau or min(ASSUMED_TAU[args.mode], shape.levels),
        mesh=args.mesh or {},
    )
    request.check()
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
    options = pair.drafter_options(args)
    if not args.drafter.endswith(".py"):
        return pair.open_drafter(args.drafter, target, **options)._replace(params=None)
    if given := [flag.replace("_", "-") for flag, value in options.items() if value is not None]:
        raise InputError(f"--{given[0]}: {args.drafter} sets it; leave the flag out")
    config = read_config(args.drafter, DistillConfig)
    check_pairing(target_sizes(shapes_of(config.target)), target_sizes(target.config))
    method = method_of(config.drafter)
    return LoadedDrafter(method, config.drafter, None, (), Path(args.drafter), None)


def described(found: Plan) -> str:
    """A plan as text, which ends with the verdict."""
    rows, axes, of_windows = found["cache_rows"], as_flag(found["mesh"]), found["window_rows"]
    memory = ", ".join(f"{part} {gib(size)}" for part, size in found["memory"].items())
    lines = [
        f"{found['topology']}: {found['device_kind']}, {found['bandwidth'] / 1e12:g} TB/s, "
        f"{found['launch_us']:g} us a launch" + (f", mesh {axes}, figures of a chip" * bool(axes)),
        f"{found['nodes']} nodes a round, batch {found['batch']}, "
        f"{found['rows_used'] or rows} of {rows} rows used, "
        + f"layers with a window have {of_windows}, " * bool(of_windows)
        + f"weights in {found['weights']}",
        *(_round(found) if found["phases"] else []),
        f"memory in GiB: {memory}",
        "fits" if found["fits"] else "does not fit",
    ]
    return "\n".join(lines)


def _round(found: Plan) -> list[str]:
    """The table of phases, and lines on time, speed, collectives and large copies of a round."""
    share, links, moves = found["tokens_per_s"] / found["roofline"], found["links"], found["moves"]
    phases = [
        each | {"bytes": f"{each['bytes'] / 1e6:,.1f} MB", "ms": f"{each['ms']:.3f}"}
        for each in found["phases"]
    ]
    counts = [f"{each['count']} {kind}" for kind, each in links["collectives"].items()]
    moved = [f"{of['opcode']} of {of['bytes'] / 1e6:.0f} MB in {of['phase']}" for of in moves]
    return [
        f"\n{table_of(phases)}\n",
        f"a round: {found['round_ms']:.3f} ms, {found['launches']} launches, modelled; prefill, of "
        f"{found['chunk']} tokens, is not part of it",
        f"tokens/s with {found['tau']:g} tokens a round: {found['tokens_per_s']:,.0f} of "
        f"{found['roofline']:,.0f} that the roofline allows ({share:.0%})",
        f"over links a round: {', '.join(counts) or 'nothing'}, {links['bytes'] / 1e6:.2f} MB "
        f"received, {links['ms']:.3f} ms",
        f"moves of 2 MiB or more within a round: {', '.join(moved) or 'none'}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.plan", __doc__)
    group = parser.add_argument_group("models")
    pair.add_pair_flag(parser, group)
    # --pair sets `target`; the others are flags that only decoding programs have.
    parser.set_defaults(target=None, num_speculative_tokens=None, paths=None, sampled_drafts=False)
    help = f"target: {', '.join(SHAPES)}, a folder with its config.json, or a GGUF file"
    group.add_argument("--shape", metavar="NAME_OR_DIR", help=help)
    help = "a config file of train.distill, or a drafter"
    group.add_argument("--drafter", metavar="FILE.py_OR_DIR", help=help)
    pair.add_kind_flags(group)
    group.add_argument("--weights", default="bfloat16", choices=FORMATS, help="their format")
    group = parser.add_argument_group("drafting")
    group.add_argument("--mode", choices=pair.EXPLICIT, help="how to decode; default: plain")
    help = f"levels with the root; default: the drafter's, else {DEFAULT_DEPTH}, trees "
    group.add_argument("--depth", type=positive, help=f"{help}{pair.DEFAULT_TREE.depth}")
    pair.add_tree_sizes(group)
    help = f"tokens that a target pass commits; default: Llama-3-8B's, {ASSUMED_TAU}"
    group.add_argument("--tau", type=above_zero, help=help)
    group = parser.add_argument_group("sizes")
    group.add_argument("--batch", type=positive, default=1, help="prompts side by side")
    help = "rows of each cache, rounded up to a multiple of 128"
    group.add_argument("--cache-rows", type=positive, default=2048, metavar="N", help=help)
    group.add_argument("--rows-used", type=positive, metavar="N", help="of a cache; default: all")
    group = parser.add_argument_group("machine")
    help = "h200:1 (h100, a100, b200), v5e:1x1, v6e:1x1, v5p:1x1x1; several, as h200:8, with --mesh"
    group.add_argument("--topology", default="h200:1", help=help)
    add_mesh_flag(group)
    group.add_argument("--bandwidth", type=above_zero, help="in TB/s; default: the data sheet's")
    group.add_argument("--launch-us", type=above_zero, help="default: 2.5 on GPUs, a guess")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    run(main)
