"""Converts drafter layouts and target dtypes, and extracts the part of a pair for infer.client.

    python -m infer.convert --draft DIR --target DIR --to vllm --output NEW
    python -m infer.convert --target DIR --dtype bfloat16 --output NEW
    python -m infer.convert --target FILE.gguf --output NEW        to a Hugging Face folder
    python -m infer.convert --draft DIR --target DIR --for-client --output NEW

Layouts of a drafter's config.json and tensor names:
    ours         sizes, target layer inference, the drafter's target; a draft vocabulary is kept
    authors      the target's config, as the paper's training code writes it
    vllm         the config of the authors' vLLM fork, for MoA
    speculators  the files that vLLM and the speculators library 0.9 load, for EAGLE-3

A drafter's folder gets a model card, README.md; --push OWNER/NAME uploads the folder to the hub.
--for-client writes NEW/target and NEW/draft: the tensors of both that infer.client reads, in their
stored dtypes. A server that loads the whole pair accepts a client that loads this part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from infer.cli.flags import hub
from infer.cli.flags.pair import DEMO, MODEL, add_pair_flag, drafter_options
from infer.cli.program import Parser, local_path, run, stage
from moa_jax.decode.draft_vocabulary import FILE, content_of, vocabulary_beside
from moa_jax.drafters import needs_no_files
from moa_jax.errors import InputError
from moa_jax.files import client_files
from moa_jax.files.hub import push
from moa_jax.files.model_card import UNKNOWN, Card, with_training_of, write_card
from moa_jax.files.model_folder import find_folder, public_name
from moa_jax.files.registry import FILE_LAYOUTS
from moa_jax.files.replace import check_replaceable
from moa_jax.pretrained import (
    describe_target,
    load_drafter,
    load_target,
    save_drafter,
    save_for_client,
    save_target,
    stored_dtype,
)

DTYPES = ("float32", "bfloat16", "float16")
HUB = ("push", "license", "base_model")  # flags of a drafter's card


def convert_draft(flags: argparse.Namespace) -> dict[str, Any]:
    """Writes a drafter in another layout; returns a summary for JSON.

    Raises InputError for a layout without the drafter's kind, and if the layout would state a
    setting that was only assumed.
    """
    layout = flags.to or "ours"
    target = describe_target(flags.target)
    dtype = flags.dtype or stored_dtype(flags.draft)
    drafter = load_drafter(flags.draft, target, **drafter_options(flags), dtype=dtype)
    guesses = hasattr(drafter.config, "target_layer_inference")  # other kinds' notices state facts
    if layout == "ours" and guesses and drafter.notices:
        raise InputError(
            f"{flags.draft}: {drafter.notices[0]}: layout {layout} would state that as a fact; "
            "say it with --target-layer-inference"
        )
    depth = {} if drafter.depth is None else {"depth": drafter.depth}
    vocabulary, notices = vocabulary_beside(target, drafter), [*drafter.notices]
    if vocabulary and layout != "ours":
        notices.append(f"layout {layout} has no draft vocabulary: {vocabulary.file} is left out")
    verifier = flags.base_model or public_name(target.folder)
    if layout == "speculators" and "/" not in verifier:
        notices.append(
            f"verifier.name_or_path is {verifier!r}, not a model of the hub: `vllm serve DRAFT` "
            "needs that (--base-model); `vllm serve TARGET --speculative-config` does not"
        )
    kept = content_of(vocabulary) if vocabulary and layout == "ours" else None
    save_drafter(
        flags.output,
        drafter.method,
        drafter.config,
        drafter.params,
        target,
        dtype,
        layout=layout,
        verifier=verifier,
        beside={FILE: kept},
        **depth,
    )
    card = Card(flags.push or flags.output.name, drafter.method, layout, verifier, **depth)
    if guesses and layout != "ours":
        reused = f"--target-layer-inference {drafter.config.target_layer_inference}"
        card = card._replace(flags=reused)
    card = card._replace(license=flags.license or UNKNOWN)
    card = with_training_of(card, drafter.folder, public_name(drafter.folder))
    if stays := write_card(flags.output, card):
        notices.append(stays)
    return {
        "output": str(flags.output),
        "method": drafter.method,
        "layout": layout,
        "dtype": str(dtype),
        "notices": notices,
    }


def cut_for_client(flags: argparse.Namespace) -> dict[str, Any]:
    """Writes the part of a pair that a client reads; returns a summary for JSON."""
    target = describe_target(find_folder(flags.target))
    drafter = load_drafter(flags.draft, target, **drafter_options(flags), for_client=True)
    vocabulary = vocabulary_beside(target, drafter)
    kept = content_of(vocabulary) if vocabulary else None
    save_for_client(flags.output, target, drafter, beside={FILE: kept})
    return {
        "output": str(flags.output),
        "method": drafter.method,
        "bytes": {
            name: _num_bytes(flags.output / name)
            for name in sorted(client_files.PAIR)
            if (flags.output / name / client_files.FILE).is_file()
        },
        "of_bytes": {
            name: _num_bytes(folder)
            for name, folder in (("draft", drafter.folder), ("target", target.folder))
            if folder.is_dir()
        },
        "notices": list(drafter.notices),
    }


def _num_bytes(folder: Path) -> int:
    """Total size of a folder's safetensors files in bytes."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def convert_target(flags: argparse.Namespace) -> dict[str, Any]:
    """Writes a target as a Hugging Face folder; returns a summary for JSON."""
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
    return {"output": str(flags.output), "dtype": str(dtype), "notices": list(target.notices)}


def main(arguments: list[str] | None = None) -> None:
    flags = _parser().parse_args(arguments)
    if flags.target is None and flags.draft is not None:
        raise InputError("--draft without --target: a drafter belongs to one target; name both")
    flags.target = flags.target or DEMO / "target"
    for flag in ("to", "method", "target_layer_inference", "for_client", *HUB):
        if not flags.draft and getattr(flags, flag) is not None:
            shown = flag.replace("_", "-")
            raise InputError(f"--{shown} describes a drafter; name it with --draft")
    for flag in ("to", "dtype"):
        if flags.for_client and getattr(flags, flag) is not None:
            raise InputError(f"--for-client leaves tensors as they are; leave out --{flag}")
    if flags.for_client and any(getattr(flags, flag) for flag in HUB):
        raise InputError("--for-client writes no model card; leave out the flags of the hub")
    hub.check_flags(flags, flags.output)
    if flags.output.exists() and not flags.overwrite:
        raise InputError(f"{flags.output} exists already; choose another or add --overwrite")
    _check_output(flags)
    convert = convert_draft if flags.draft else convert_target
    done = cut_for_client(flags) if flags.for_client else convert(flags)
    if flags.push:
        with stage(f"uploading {flags.output} to the hub"):
            done["pushed"] = push(flags.output, flags.push, flags.private)
    if flags.json:
        print(json.dumps(done, indent=2))
        return
    for notice in done["notices"]:
        print(f"note: {notice}", file=sys.stderr)
    print(_line(done))


def _check_output(flags: argparse.Namespace) -> None:
    """Raises InputError for an output that cannot be written or that is an input."""
    models = client_files.PAIR if flags.for_client else (".",)
    check_replaceable(
        flags.output, client_files.MARK if flags.for_client else "config.json", models
    )
    written = [os.path.realpath(flags.output / model) for model in models]
    for flag in ("target", "draft"):
        given = getattr(flags, flag)
        if given is None or (needs_no_files(str(given)) and not Path(given).is_dir()):
            continue
        folder = os.path.realpath(find_folder(given, weights=False))
        if folder in written:
            raise InputError(f"--output {folder} is --{flag} itself; choose another output")


def _line(done: dict[str, Any]) -> str:
    """The summary as one line of text."""
    if "bytes" not in done:
        pushed = f", pushed to {done['pushed']}" if "pushed" in done else ""
        return f"wrote {done['output']} in {done['dtype']}{pushed}"
    sizes = (
        f"{name} {size / 1e6:.1f} MB of {done['of_bytes'][name] / 1e6:.1f}"
        for name, size in done["bytes"].items()
    )
    return f"wrote {done['output']}: {', '.join(sizes)}"


def _parser() -> Parser:
    parser = Parser("infer.convert", __doc__)
    source = parser.add_argument_group("source")
    add_pair_flag(parser, source)
    source.add_argument("--target", metavar=MODEL, help="default: the bundled target")
    source.add_argument("--draft", metavar=MODEL, help="the drafter; without it the target itself")
    source.add_argument("--method", metavar="NAME", help="kind of the drafter, if not as detected")
    source.add_argument(
        "--target-layer-inference",
        metavar="N",
        type=int,
        help="target layers that the drafter reuses, if its files do not say",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="DIR", type=local_path, required=True)
    output.add_argument("--to", choices=FILE_LAYOUTS, help="layout of a drafter; default: ours")
    output.add_argument(
        "--for-client",
        action="store_true",
        default=None,
        help="only what infer.client needs of target and drafter, each in a folder of its own",
    )
    output.add_argument("--dtype", choices=DTYPES, help="of the tensors; as stored if not given")
    output.add_argument("--overwrite", action="store_true", help="replace the model of a folder")
    output.add_argument("--json", action="store_true", help="print one JSON document")
    hub.add_flags(parser)
    return parser


if __name__ == "__main__":
    run(main)
