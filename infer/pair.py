"""The flags with which every program names its two models and how much a round drafts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import moa_jax
from infer.cli import positive
from moa_jax import load_drafter, load_target
from moa_jax.config import DraftShape
from moa_jax.errors import InputError
from moa_jax.pretrained import LoadedDrafter, Target

DEMO = Path(moa_jax.__file__).parent / "demo"
MODES = ("plain", "chain")
_SPECULATIVE: dict[str, tuple[str, type]] = {  # key of vLLM's JSON: (flag, type)
    "method": ("method", str),
    "model": ("draft", str),
    "num_speculative_tokens": ("num_speculative_tokens", int),
}


def add_pair_flags(parser: argparse.ArgumentParser) -> None:
    """--target, --draft and what describes them."""
    group = parser.add_argument_group("models")
    group.add_argument("--target", metavar="DIR_OR_HUB_ID", help="default: the bundled target")
    group.add_argument("--draft", metavar="DIR_OR_HUB_ID", help="default: the bundled drafter")
    group.add_argument("--method", help="drafter kind, where its files do not say")
    group.add_argument(
        "--target-layer-inference",
        type=int,
        metavar="N",
        help="target layers that the drafter reuses, where its files do not say",
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by hardware")
    group.add_argument(
        "--speculative-config",
        type=_json_object,
        metavar="JSON",
        help='as vLLM takes it: {"method": ..., "model": ..., "num_speculative_tokens": K}',
    )


def add_draft_flags(parser: argparse.ArgumentParser) -> None:
    """--mode and --depth."""
    group = parser.add_argument_group("drafting")
    group.add_argument("--mode", choices=MODES, default="chain", help="how to decode")
    depth = group.add_mutually_exclusive_group()
    depth.add_argument(
        "--depth",
        type=positive,
        help="levels of a draft, the root included: 5 drafts 4 tokens; default: the drafter's",
    )
    depth.add_argument(
        "--num-speculative-tokens", type=positive, metavar="K", help="the same as --depth K+1"
    )


def load_pair(args: argparse.Namespace) -> tuple[Target, LoadedDrafter | None]:
    """Loads both models; no drafter in plain mode. Notices go to stderr.

    Raises InputError for models that are missing, damaged or not made for each other.
    """
    _apply_speculative_config(args)
    dtype = None if args.dtype is None else jnp.dtype(args.dtype)
    if args.target is None and args.draft is not None:
        raise InputError("--draft without --target: a drafter belongs to one target, name both")
    target = load_target(args.target or DEMO / "target", dtype)
    if getattr(args, "mode", None) == "plain":
        return target, None
    if args.draft is None and args.target is not None:
        raise InputError("--target without --draft: name its drafter, or use --mode plain")
    drafter = load_drafter(
        args.draft or DEMO / "draft",
        target,
        method=args.method,
        target_layer_inference=args.target_layer_inference,
    )
    for notice in drafter.notices:
        print(notice, file=sys.stderr)
    return target, drafter


def depth_of(args: argparse.Namespace) -> int | None:
    """The depth that the flags ask for, None for the drafter's own; InputError if too deep."""
    if args.num_speculative_tokens is not None:
        return DraftShape(args.num_speculative_tokens + 1).depth
    return None if args.depth is None else DraftShape(args.depth).depth


def _apply_speculative_config(args: argparse.Namespace) -> None:
    """Spreads vLLM's JSON over our flags; InputError for what we cannot take from it."""
    given, args.speculative_config = args.speculative_config or {}, None
    unknown = sorted(set(given) - set(_SPECULATIVE))
    if unknown:
        raise InputError(
            f"--speculative-config: {', '.join(unknown)} has no meaning here, "
            f"known are {', '.join(_SPECULATIVE)}"
        )
    for key, value in given.items():
        flag, kind = _SPECULATIVE[key]
        if type(value) is not kind or (kind is int and value < 1):
            wanted = "text" if kind is str else "a whole number of at least 1"
            raise InputError(f"--speculative-config: {key} is {value!r}, give {wanted}")
        for same in (flag, "depth") if kind is int else (flag,):
            if getattr(args, same, None) is not None:
                shown = same.replace("_", "-")
                raise InputError(f"--speculative-config states {key}: leave out --{shown}")
        setattr(args, flag, value)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return found
