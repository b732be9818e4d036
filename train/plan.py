"""Plans a training step for a machine that is not attached: memory, collectives and time.

    python -m train.plan --config configs/moa_llama3_8b.py --topology v5e:4x4
    python -m train.plan --config configs/moa_llama3_8b.py --topology h200:8 --largest
    python -m train.plan --config configs/moa_llama3_8b.py --topology v5p:2x2x4 --mesh.tensor 4

Compiles the step of train.distill ahead of time: requires the extra `plan` (make env PLAN=1), but
no accelerator, driver or network. A preset of the config file with the topology's name applies
unless `--preset` names another preset or `none`. Dotted flags override settings. The time of a
step is modelled from the compiled program; nothing is measured.

The last line of stdout is `fits` (exit code 0) or `does not fit` (3); with --json stdout is one
JSON document. If the compiler crashes, the exit code is 4 and no verdict is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from infer.bench.plan import training
from infer.bench.plan.child import CompilerCrash
from infer.bench.plan.machines import GIB, Machine, check_compiler, machine
from infer.bench.plan.training import Plan
from infer.bench.tables import columns, gib
from infer.cli.flags.config_file import SHAPES, presets_of
from infer.cli.program import run
from moa_jax.config import ChunkConfig, DistillConfig, TargetConfig
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.pretrained import SpecialIds, Target, describe_target
from train.distill import with_vocabulary
from train.run.settings import NO_PRESET, config_parser, parse_config

FITS, DOES_NOT_FIT, CRASHED = 0, 3, 4


def main(arguments: list[str] | None = None) -> int:
    config, args = _asked(sys.argv[1:] if arguments is None else arguments)
    if args.plain:
        config = plain(config)
    if args.fill is not None and not 0 < args.fill <= 1:
        raise InputError(f"--fill {args.fill}; choose above 0 and at most 1")
    wanted = machine(args.topology)
    check_compiler(wanted)
    config, target_cfg = with_shapes(config)
    try:
        found = training.plan(config, target_cfg, wanted, not args.full)
        if found["hurried"] and training.is_close(found):
            print("close to the limit: compiling as a run does", file=sys.stderr, flush=True)
            found = training.plan(config, target_cfg, wanted)
        if args.largest:
            found["largest"] = largest(config, target_cfg, wanted, found, not args.full)
    except CompilerCrash as crash:
        print(f"train.plan: {crash}", file=sys.stderr)
        return CRASHED
    found = training.filled(found, config, args.fill) | {"preset": args.preset}
    print(to_json(found, indent=2) if args.json else described(found))
    if not args.json:
        print("fits" if found["fits"] else "does not fit")
    return FITS if found["fits"] else DOES_NOT_FIT


def _asked(arguments: list[str]) -> tuple[DistillConfig, argparse.Namespace]:
    """Config and flags, with the topology's preset if the file has one and no flag names another.

    `args.preset` is None if no preset applies.
    """
    config, args = parse_config(_parser(), DistillConfig, arguments)
    if args.preset is None and args.topology in presets_of(args.config):
        return parse_config(_parser(), DistillConfig, [*arguments, "--preset", args.topology])
    args.preset = None if args.preset == NO_PRESET else args.preset
    return config, args


def plain(config: DistillConfig) -> DistillConfig:
    """The config without chunks, so that its step recomputes nothing."""
    return dataclasses.replace(config, chunks=ChunkConfig(head=0, memory=0))


def with_shapes(config: DistillConfig) -> tuple[DistillConfig, TargetConfig]:
    """The config with its draft vocabulary, and the config of its target.

    A target in `SHAPES` needs no folder; a vocabulary is then not checked against its tokenizer.
    """
    name = config.target
    if name in SHAPES:
        target = Target(SHAPES[name], None, Path(name), SpecialIds())
    else:
        target = describe_target(name)
    return with_vocabulary(config, target), target.config


def largest(
    config: DistillConfig, target_cfg: TargetConfig, wanted: Machine, found: Plan, hurry: bool
) -> dict[str, Any]:
    """The largest data.rows_per_batch that fits and its peak memory; prints trials on stderr."""
    unit = found["rows_unit"]
    plans = {found["rows_per_batch"]: found}

    def fits(units: int) -> bool:
        rows = units * unit
        if rows not in plans:
            try:
                resized = training.with_rows(config, rows)
                plans[rows] = training.plan(resized, target_cfg, wanted, hurry)
            except CompilerCrash as crash:
                print(f"{rows} rows: {crash}", file=sys.stderr)
                plans[rows] = {"fits": False}
        verdict = "fit" if plans[rows]["fits"] else "do not fit"
        print(f"{rows} rows {verdict}", file=sys.stderr, flush=True)
        return plans[rows]["fits"]

    rows = unit * training.largest(fits, training.expected_rows(found) // unit)
    return {"rows_per_batch": rows, "peak": plans[rows]["memory"]["peak"] if rows else None}


# ---- the table ----------------------------------------------------------------------------


def described(found: Plan) -> str:
    """Formats a plan as tables."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    rows, length, parts = (found[key] for key in ("rows_per_batch", "row_length", "accumulate"))
    again, seconds = found["traced_flops"] / found["model_flops"] - 1, found["compile_s"]
    hurried = " (in a hurry: --full optimises as a run does)" * found["hurried"]
    lines = [
        f"{found['topology']}: {found['chips']} chips, mesh {mesh}"
        + (f", with --preset {found['preset']}" if found["preset"] else ""),
        f"a step: {rows} rows of {length} tokens"
        + (f" in {parts} parts of {rows // parts}" if parts > 1 else ""),
        *("", *_memory(found["memory"], found["refused"]), ""),
        f"FLOPs of a step: {found['model_flops']:.3g}, and {again:.1%} computed again",
        *("", *_links(found), "", *_time(found)),
        f"compiled in {seconds['step']:.0f} s, the evaluation in {seconds['evaluation']:.0f} s"
        + hurried,
    ]
    if "largest" in found:
        best = found["largest"]["rows_per_batch"]
        lines.append(f"largest data.rows_per_batch that fits: {best or 'none'}")
    return "\n".join(lines)


def _memory(memory: dict[str, int | None], refused: bool) -> list[str]:
    names = {
        "target": "target weights",
        "drafter": "drafter weights",
        "optimizer": "optimiser state",
        "batch": "batch",
        "temporary": "temporary, step",
        "evaluation": "temporary, evaluation",
        "peak": "peak, at least" if refused else "peak",
    }
    rows = [[f"  {name}", gib(memory[part])] for part, name in names.items()]
    lines = columns([["memory of each chip", "GiB"], *rows], (26, 9))
    return [*lines[:-1], f"{lines[-1]} of {memory['limit'] / GIB:.2f} usable"]


def _links(found: Plan) -> list[str]:
    kinds, links = sorted(found["collectives"].items()), found["links"]
    rows = [[f"  {kind}", str(each["count"]), gib(each["bytes"])] for kind, each in kinds]
    lines = columns([["collectives of a step", "count", "GiB to a chip"], *rows], (26, 9, 15))
    if not kinds:
        lines.append("  not known" if found["refused"] else "  none")
    if links["count"]:
        rate = f"{links['bytes_per_s'] / 1e9:.0f} GB/s"
        lines.append(f"  the chip with the fewest links has {links['count']}, each of {rate}")
    if found["loops_of_unknown_length"]:
        lines.append(f"  {found['loops_of_unknown_length']} loops of unknown length count once")
    return lines


def _time(found: Plan) -> list[str]:
    shown = lambda seconds: "not known" if seconds is None else f"{seconds:.4f}"
    least = [[f"  {part}", shown(seconds)] for part, seconds in found["bound_s"].items()]
    names = {
        "products": f"matrix products, at {training.ATTAINED:.0%} of the peak",
        "memory": "kernels that wait for the memory",
        "network": "collectives that nothing hides",
    }
    parts = found["parts_s"] or dict.fromkeys(names)
    rows = [[f"  {name}", shown(parts[part])] for part, name in names.items()]
    titles = ["seconds of a step, at least", ""], ["seconds of a step, modelled", ""]
    total = ["  step", shown(found["step_s"])]
    lines = columns([titles[0], *least, titles[1], *rows, total], (42, 11))
    if found["step_s"] is None:
        return lines
    pallas = ", ".join(f"{name} {times}" for name, times in found["kernels"].items())
    return [
        *lines,
        f"kernels of attention: {pallas or 'none'}",
        f"rows are {found['fill']:.0%} full ({found['fill_source']})",
        f"so {found['tokens_per_s']:,.0f} tokens/s, {found['mfu']:.1%} model FLOP utilisation",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = config_parser("train.plan", __doc__)
    parser.add_argument(
        "--topology", required=True, help="v5e:AxB, v6e:AxB, v5p:AxBxC or h200:N (GPUs)"
    )
    group = parser.add_argument_group("planning")
    help = "search the largest data.rows_per_batch that fits"
    group.add_argument("--largest", action="store_true", help=help)
    help = "tokens of a row that are not padding, as a share"
    group.add_argument("--fill", type=float, metavar="SHARE", help=help)
    help = "no chunks, so that nothing is computed twice"
    group.add_argument("--plain", action="store_true", help=help)
    help = "optimise as a run does: minutes for a TPU, and the default where the verdict is close"
    group.add_argument("--full", action="store_true", help=help)
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    run(main)
