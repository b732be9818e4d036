"""Plans a training step for a machine that is not attached: memory, collectives and time.

    python -m train.plan --config configs/moa_llama3_8b.py --topology v5e:4x4
    python -m train.plan --config configs/moa_llama3_8b.py --topology v5p:2x2x4 --mesh.tensor 4
    python -m train.plan --config configs/moa_llama3_8b.py --topology h100:1 --fit

Compiles the step of train.distill ahead of time: requires the extra `plan` (make env PLAN=1), but
no accelerator, driver or network. A preset of the config file with the topology's name applies
unless `--preset` names another preset or `none`. Dotted flags override settings. The time of a
step is modelled from the compiled program; nothing is measured. The hours of the whole run are
those of its steps, without compilation, evaluations, saves and restarts. After `does not fit` a
line on stderr names settings that lower the memory, and `--fit` adds such settings until the step
fits.

The last line of stdout is `fits` (exit code 0) or `does not fit` (3); with --json stdout is one
JSON document.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import jax

from infer.bench.plan import machines, training
from infer.bench.tables import gib
from infer.cli.flags.config_file import SHAPES, presets_of
from infer.cli.program import run
from moa_jax.config import ChunkConfig, DistillConfig, TargetConfig
from moa_jax.files.json_text import to_json
from moa_jax.pretrained import SpecialIds, Target, describe_target
from train.distill import with_vocabulary
from train.run.settings import NO_PRESET, config_parser, overridden, parse_config

FITS, DOES_NOT_FIT = 0, 3


def main(arguments: list[str] | None = None) -> int:
    config, args = _asked(sys.argv[1:] if arguments is None else arguments)
    jax.config.update("jax_platforms", "cpu")  # an attached accelerator is left alone
    jax.config.update("jax_enable_compilation_cache", False)  # jax decides at the first compile
    wanted = machines.machine(args.topology)
    config, target_cfg = with_shapes(config)
    found = planned(config, target_cfg, wanted, args.full)
    added: list[tuple[str, str]] = []
    while args.fit and not found["fits"] and (more := training.smaller(config, found)):
        print(f"does not fit: adding {as_flags(more)}", file=sys.stderr, flush=True)
        config, added = overridden(config, more), added + more
        found = planned(config, target_cfg, wanted, args.full)
    found |= {"preset": args.preset, "added": as_flags(added)}
    print(to_json(found, indent=2) if args.json else described(found))
    if not found["fits"]:
        print(f"train.plan: {advice(config, found)}", file=sys.stderr)
    return FITS if found["fits"] else DOES_NOT_FIT


def planned(
    config: DistillConfig, target_cfg: TargetConfig, wanted: machines.Machine, full: bool
) -> training.Plan:
    """The plan of a config, compiled with full effort if `full` is True or the limit is close."""
    found = training.plan(config, target_cfg, wanted, not full)
    if found["hurried"] and training.is_close(found):
        print("close to the limit: compiling again with full effort", file=sys.stderr, flush=True)
        found = training.plan(config, target_cfg, wanted)
    return found


def as_flags(settings: list[tuple[str, str]]) -> str:
    """Settings as flags of a command line; the last value of a repeated name counts."""
    return " ".join(f"--{name} {value}" for name, value in dict(settings).items())


def advice(config: DistillConfig, found: training.Plan) -> str:
    """Advice after a plan that does not fit."""
    if more := training.smaller(config, found):
        return f"to lower the memory, try {as_flags(more)}; --fit adds such settings until it fits"
    return "no setting is left that lowers the memory; name a larger --topology, or fewer rows"


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
    known = SHAPES.get(name)
    target = Target(known, None, Path(name), SpecialIds()) if known else describe_target(name)
    return with_vocabulary(config, target), target.config


def described(found: training.Plan) -> str:
    """A plan as text, which ends with the verdict."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    memory = ", ".join(f"{part} {gib(size)}" for part, size in found["memory"].items())
    again = found["flops"] * found["chips"] / found["model_flops"] - 1
    lines = [
        f"{found['topology']}: {found['chips']} devices, mesh {mesh}, preset {found['preset']}",
        f"a step: {found['rows_per_batch']} rows of {found['row_length']} tokens in "
        f"{found['accumulate']} parts, {found['model_flops']:.3g} FLOPs, {again:.1%} computed again"
        + (", compiled in a hurry (--full optimises as a run does)" if found["hurried"] else ""),
        f"memory of a chip in GiB: {memory}",
    ]
    if found["step_s"] is None:
        lines.append("the compiler refused the program: the peak is a lower bound")
    else:
        kinds = sorted(found["collectives"].items())
        sent = [f"{each['count']} {kind} of {gib(each['bytes'])} GiB" for kind, each in kinds]
        parts = ", ".join(f"{part} {seconds:.4f}" for part, seconds in found["parts_s"].items())
        lines += [
            f"collectives of a step: {', '.join(sent) or 'none'}",
            f"seconds of a step, modelled: {found['step_s']:.4f} ({parts})",
            f"{found['tokens_per_s']:,.0f} tokens/s with padding, {found['mfu']:.1%} model FLOP "
            "utilisation",
            f"the whole run: {found['total_steps']:,} steps in {found['hours']:,.2f} hours, "
            f"{found['total_tokens']:.3g} tokens with padding",
        ]
    if found["added"]:
        lines.append(f"this is the plan with {found['added']}")
    return "\n".join([*lines, "fits" if found["fits"] else "does not fit"])


def _parser() -> argparse.ArgumentParser:
    parser = config_parser("train.plan", __doc__)
    help = "v5e:AxB, v6e:AxB, v5p:AxBxC, v7x:AxBxC, or a100:N, h100:N, h200:N, b200:N (GPUs)"
    parser.add_argument("--topology", required=True, help=help)
    group = parser.add_argument_group("planning")
    group.add_argument("--fit", action="store_true", help="add settings until the step fits")
    group.add_argument("--full", action="store_true", help="optimise as a run does: slow on TPUs")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    run(main)
