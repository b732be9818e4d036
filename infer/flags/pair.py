"""The flags with which every program names its two models and how much a round drafts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import moa_jax
from infer.program import positive
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.decode.vocabulary import load_vocabulary
from moa_jax.drafters import needs_no_files
from moa_jax.errors import InputError
from moa_jax.files.folders import find_folder
from moa_jax.measure.tuned import load_tuned
from moa_jax.pretrained import LoadedDrafter, Target, describe_target

DEMO = Path(moa_jax.__file__).parent / "demo"
MODES = ("plain", "chain", "tree")
DEFAULT_TREE = DraftShape(7, 8, 62)  # the paper's and EAGLE-2's
_SHAPE = ("mode", "depth", "num_speculative_tokens", "breadth", "total_tokens", "paths")
_SPECULATIVE: dict[str, tuple[str, type]] = {  # key of vLLM's JSON: (flag, type)
    "method": ("method", str),
    "model": ("draft", str),
    "num_speculative_tokens": ("num_speculative_tokens", int),
}


def add_pair_flags(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add --target, --draft and the flags that describe them; `several` lets --draft repeat."""
    add_model_flags(parser, several).add_argument(
        "--speculative-config",
        type=_json_object,
        metavar="JSON",
        help='as vLLM takes it: {"method": ..., "model": ..., "num_speculative_tokens": K}',
    )


def add_model_flags(parser: argparse.ArgumentParser, several: bool = False) -> Any:
    """Add the same flags without vLLM's JSON; returns their group."""
    group = parser.add_argument_group("models")
    group.add_argument("--target", metavar="DIR_OR_HUB_ID", help="default: the bundled target")
    more = {"action": "append", "metavar": "[NAME=]DIR_OR_HUB_ID"} if several else {}
    group.add_argument(
        "--draft",
        **{"metavar": "DIR_OR_HUB_ID", **more},
        help="default: the bundled drafter"
        + (", by the name bundled; repeat for several" if several else ""),
    )
    group.add_argument("--method", help="drafter kind, where its files do not say")
    group.add_argument(
        "--target-layer-inference",
        type=int,
        metavar="N",
        help="target layers that the drafter reuses, where its files do not say",
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by hardware")
    group.add_argument(
        "--threads",
        type=positive,
        help="CPU cores to use; small models are fastest on one, since their products are short",
    )
    return group


def add_draft_flags(parser: argparse.ArgumentParser) -> None:
    """Add --mode and the flags of a draft's shape."""
    group = parser.add_argument_group("drafting")
    group.add_argument("--mode", choices=MODES, help="how to decode; default: chain")
    depth = group.add_mutually_exclusive_group()
    depth.add_argument(
        "--depth",
        type=positive,
        help="levels of a draft, the root included: 5 drafts 4 tokens; default: the drafter's, "
        f"trees {DEFAULT_TREE.depth}",
    )
    depth.add_argument(
        "--num-speculative-tokens", type=positive, metavar="K", help="the same as --depth K+1"
    )
    group.add_argument(
        "--breadth",
        type=positive,
        help=f"candidates a node of a tree gets; default: {DEFAULT_TREE.breadth}",
    )
    group.add_argument(
        "--total-tokens",
        type=positive,
        help=f"most drafted nodes of a tree; default: {DEFAULT_TREE.total_tokens}",
    )
    group.add_argument(
        "--paths", metavar="FILE.json", help="a static tree: [[0], [1], [0, 0]] by child ranks"
    )
    group.add_argument(
        "--confidence",
        type=float,
        default=0.0,
        help="leave out nodes that the drafter finds less probable than this",
    )
    group.add_argument(
        "--sampled-drafts",
        action="store_true",
        help="draw candidates from the drafter instead of its likeliest (chains, static trees)",
    )
    group.add_argument(
        "--draft-vocabulary", metavar="FILE", help="draft from these tokens only (train.vocabulary)"
    )
    group.add_argument(
        "--tuned",
        action="store_true",
        help="mode and sizes that `infer.bench --tune` found fastest on this hardware",
    )


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """Add --cache-rows, which `Session` takes."""
    parser.add_argument_group("memory").add_argument(
        "--cache-rows",
        type=positive,
        metavar="N",
        help="rows of each cache, for prompt, answer and draft, so that one program serves all "
        "lengths; rounded up to a multiple of 128; default: what a prompt needs",
    )


def load_pair(
    args: argparse.Namespace, *, for_client: bool = False
) -> tuple[Target, LoadedDrafter | None]:
    """Load the two models that the flags name, without a drafter in plain mode.

    `for_client` loads no weights of the target, and of the drafter what drafting reads, in every
    mode. Notices go to stderr. Raises InputError for flags that contradict each other, and for
    models that are missing, damaged or not made for each other.
    """
    _apply_speculative_config(args)
    if getattr(args, "tuned", False):
        _check_tuned(args)
    if args.threads is not None:
        use_cores(args.threads)
    if args.draft is None and needs_no_files(args.method):
        args.draft = args.method
    drafts = for_client or getattr(args, "mode", None) != "plain"
    if args.target is None and args.draft is not None and not needs_no_files(args.draft):
        raise InputError("--draft without --target: a drafter belongs to one target, name both")
    if args.target is not None and args.draft is None and drafts:
        rest = "" if for_client else ", or use --mode plain"
        raise InputError(f"--target without --draft: name its drafter{rest}")
    if for_client:  # a hub id is fetched whole: what is borrowed may lie in any of its files
        target = describe_target(find_folder(args.target or DEMO / "target"))
    else:
        target = open_target(args)
    if not drafts:
        return target, None
    options = drafter_options(args) | {"dtype": dtype_of(args), "for_client": for_client}
    return target, open_drafter(args.draft, target, **options)


def open_target(args: argparse.Namespace) -> Target:
    """The target that --target and --dtype name, by default the bundled one."""
    return load_target(args.target or DEMO / "target", dtype_of(args))


def open_drafter(
    folder: str | os.PathLike[str] | None, target: Target, **options: Any
) -> LoadedDrafter:
    """A drafter, the bundled one for None; its notices go to stderr.

    `options` are those of `load_drafter`, which raises InputError.
    """
    drafter = load_drafter(folder or DEMO / "draft", target, **options)
    for notice in drafter.notices:
        print(notice, file=sys.stderr)
    return drafter


def drafter_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of a drafter whose files do not say it, as `load_drafter` takes it."""
    return {flag: getattr(args, flag) for flag in ("method", "target_layer_inference")}


def dtype_of(args: argparse.Namespace) -> Any:
    """The dtype that --dtype names; None leaves the choice to the loader."""
    return None if args.dtype is None else jnp.dtype(args.dtype)


def use_cores(count: int) -> None:
    """Keep this process to its first `count` cores; jax counts them when it starts its threads."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def shape_of(args: argparse.Namespace, own_depth: int | None) -> DraftShape:
    """The draft that the flags ask for, else the drafter's own; raises InputError if impossible."""
    tokens = args.num_speculative_tokens
    depth = args.depth if tokens is None else tokens + 1
    rest = {"confidence": args.confidence, "sampled": args.sampled_drafts}
    if args.mode != "tree":
        for flag in ("breadth", "total_tokens", "paths"):
            if getattr(args, flag) is not None:
                shown = flag.replace("_", "-")
                raise InputError(f"--{shown} describes a tree: use it with --mode tree")
        return DraftShape(depth or own_depth or DEFAULT_DEPTH, **rest)
    if args.paths is not None:
        if (depth, args.breadth, args.total_tokens) != (None, None, None):
            raise InputError(
                "--paths describes a whole tree: leave out --depth, --breadth and --total-tokens"
            )
        return DraftShape.static(_read_paths(args.paths), **rest)
    breadth = args.breadth or DEFAULT_TREE.breadth
    total = args.total_tokens or DEFAULT_TREE.total_tokens
    return DraftShape(depth or DEFAULT_TREE.depth, breadth, total, **rest)


def mode_of(shape: DraftShape) -> str:
    """Which of MODES a shape belongs to."""
    if not shape.num_drafted:
        return "plain"
    return "chain" if shape.is_chain else "tree"


def tuned_shape(
    args: argparse.Namespace, target: Target, drafter: LoadedDrafter, batch: int
) -> DraftShape:
    """The draft that --tune found fastest on this device; raises InputError where it never ran."""
    kind, dtype = jax.devices()[0].device_kind, str(target.params["embed"].dtype)
    shape = load_tuned(drafter.folder, kind, dtype, batch)
    if shape is None:
        models = f"--target {args.target} --draft {args.draft} " if args.draft else ""
        raise InputError(
            f"{drafter.folder} is not tuned for {kind}, {dtype}, batch {batch}: run "
            f"python -m infer.bench --tune {models}--dtype {dtype} --batch {batch}"
        )
    return dataclasses.replace(shape, confidence=args.confidence, sampled=args.sampled_drafts)


def check_folder(flag: str, draft: str | None) -> None:
    """Raise InputError unless the drafter lies in a folder, beside which a flag keeps its file."""
    if draft is not None and not Path(draft).is_dir():
        raise InputError(f"{flag} needs a drafter in a folder: {draft} is none, copy it to one")


def open_session(
    args: argparse.Namespace,
    target: Target,
    drafter: LoadedDrafter | None,
    *,
    batch: int = 1,
    cache_rows: int | None = None,
) -> Session:
    """The session that the flags ask for; --tuned takes what was fastest for `batch` prompts."""
    if args.tuned and drafter:
        shape = tuned_shape(args, target, drafter, batch)
    else:
        shape = shape_of(args, drafter and drafter.depth)
    vocabulary = None
    if args.draft_vocabulary is not None:
        vocabulary = load_vocabulary(args.draft_vocabulary, target)
    return Session(target, drafter, shape, vocabulary=vocabulary, cache_rows=cache_rows)


def _check_tuned(args: argparse.Namespace) -> None:
    """Raise InputError for what does not go with --tuned, before anything is loaded."""
    for flag in _SHAPE:
        if getattr(args, flag) is not None:
            shown = flag.replace("_", "-")
            raise InputError(f"--tuned says mode and sizes of a draft: leave out --{shown}")
    check_folder("--tuned", args.draft)


def _read_paths(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is no JSON list of paths ({error}): write it like [[0], [1], [0, 0]]"
        ) from error


def _apply_speculative_config(args: argparse.Namespace) -> None:
    """Spread vLLM's JSON over our flags; raise InputError for what has no flag."""
    given = getattr(args, "speculative_config", None) or {}
    args.speculative_config = None
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
