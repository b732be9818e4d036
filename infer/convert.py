"""Convert drafters between file layouts, or write a target back in another dtype.

    python -m infer.convert --draft DIR --target DIR --to vllm --output NEW
    python -m infer.convert --target DIR --dtype bfloat16 --output NEW

Tensors keep the authors' names in every layout; config.json differs:
    ours         sizes, target layer inference, the target it belongs to
    authors      the target's config, as the paper's training code writes it
    vllm         that of the authors' vLLM fork
    speculators  that of the speculators library, with the target's config nested
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from infer.cli import Parser, run
from moa_jax.drafters.kinds import FILE_LAYOUTS
from moa_jax.errors import InputError
from moa_jax.pretrained import (
    describe_target,
    load_drafter,
    load_target,
    save_drafter,
    save_target,
    stored_dtype,
)

DTYPES = ("float32", "bfloat16", "float16")
STATING = ("ours", "speculators")  # layouts that store what other files leave to a guess


def convert_draft(flags: argparse.Namespace) -> dict[str, Any]:
    """Write a drafter in another layout; returns what was done.

    Raises InputError where a layout would state what was only assumed.
    """
    layout = flags.to or "ours"
    target = describe_target(flags.target)
    dtype = flags.dtype or stored_dtype(flags.draft)
    drafter = load_drafter(
        flags.draft,
        target,
        method=flags.method,
        target_layer_inference=flags.target_layer_inference,
        dtype=dtype,
    )
    if layout in STATING and drafter.notices:
        raise InputError(
            f"{flags.draft}: {drafter.notices[0]}: layout {layout} would state that as a fact, "
            "so say it with --target-layer-inference"
        )
    depth = {} if drafter.depth is None else {"depth": drafter.depth}
    save_drafter(
        flags.output,
        drafter.method,
        drafter.config,
        drafter.params,
        target,
        dtype,
        layout=layout,
        **depth,
    )
    return {
        "output": str(flags.output),
        "method": drafter.method,
        "layout": layout,
        "dtype": str(dtype),
        "notices": list(drafter.notices),
    }


def convert_target(flags: argparse.Namespace) -> dict[str, Any]:
    """Write a target as a Hugging Face folder; returns what was done."""
    dtype = flags.dtype or stored_dtype(flags.target)
    target = load_target(flags.target, dtype)
    save_target(
        flags.output,
        target.config,
        target.params,
        target.folder,
        dtype,
        generation=target.generation,
    )
    return {"output": str(flags.output), "dtype": str(dtype), "notices": []}


def main(arguments: list[str] | None = None) -> None:
    flags = _parser().parse_args(arguments)
    for flag in ("to", "method", "target_layer_inference"):
        if not flags.draft and getattr(flags, flag) is not None:
            shown = flag.replace("_", "-")
            raise InputError(f"--{shown} describes a drafter: name it with --draft")
    if flags.output.exists() and not flags.overwrite:
        raise InputError(f"{flags.output} exists already: choose another or add --overwrite")
    done = convert_draft(flags) if flags.draft else convert_target(flags)
    if flags.json:
        print(json.dumps(done, indent=2))
        return
    for notice in done["notices"]:
        print(f"note: {notice}", file=sys.stderr)
    print(f"wrote {done['output']} in {done['dtype']}")


def _parser() -> Parser:
    parser = Parser("infer.convert", __doc__)
    source = parser.add_argument_group("source")
    folder = "DIR_OR_HUB_ID"
    source.add_argument("--target", metavar=folder, required=True, help="the target")
    source.add_argument("--draft", metavar=folder, help="the drafter; without it the target itself")
    source.add_argument("--method", metavar="NAME", help="kind of the drafter, if not as detected")
    source.add_argument(
        "--target-layer-inference",
        metavar="N",
        type=int,
        help="target layers that the drafter reuses, if its files do not say",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="DIR", type=Path, required=True, help="new folder")
    output.add_argument("--to", choices=FILE_LAYOUTS, help="layout of a drafter; default: ours")
    output.add_argument("--dtype", choices=DTYPES, help="of the tensors; as stored if not given")
    output.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    output.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


if __name__ == "__main__":
    run(main)
