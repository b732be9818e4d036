"""Flags of target, drafter and draft shape, and the models and sessions that they describe."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from infer.cli.flags.auto import costs_of, ways_of
from infer.cli.flags.mesh import add_mesh_flag, asked_mesh
from infer.cli.flags.vocabulary import add_vocabulary_flag
from infer.cli.program import Parser, positive
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.decode.session import DEFAULT_DEPTH, for_decoding
from moa_jax.decode.state import Weights
from moa_jax.drafters import needs_no_files
from moa_jax.errors import InputError
from moa_jax.files.model_folder import find_folder
from moa_jax.files.tensor_reader import GGUF_INDEX
from moa_jax.model.quantize import FORMATS
from moa_jax.pairs import DEFAULT as DEFAULT_PAIR
from moa_jax.pairs import DEMO, LOOKUP, PAIRS, locate
from moa_jax.pretrained import LoadedDrafter, Target, describe_target

BUNDLED = "bundled"  # the name of the drafter that comes with this package
PAIR_VARIABLE = "MOA_PAIR"
MODEL = "DIR_OR_GGUF_OR_HUB_ID"
EXPLICIT = ("plain", "chain", "tree")
AUTO = "auto"
MODES = (AUTO, *EXPLICIT)
DEFAULT_TREE = DraftShape(7, 8, 62)  # the paper's and EAGLE-2's
_SPECULATIVE: dict[str, tuple[str, type]] = {  # key of vLLM's JSON: (flag, type)
    "method": ("method", str),
    "model": ("draft", str),
    "num_speculative_tokens": ("num_speculative_tokens", int),
}


def add_pair_flags(parser: Parser, several: bool = False) -> None:
    """Add --target, --draft and the flags that describe them; `several` lets --draft repeat."""
    group = add_model_flags(parser, several)
    add_mesh_flag(group)
    group.add_argument(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help='as vLLM takes it: {"method": ..., "model": ..., "num_speculative_tokens": K}',
    )


def add_model_flags(parser: Parser, several: bool = False) -> Any:
    """Add the same flags without --mesh and --speculative-config; returns their group."""
    group = parser.add_argument_group("models")
    add_pair_flag(parser, group)
    group.add_argument("--target", metavar=MODEL, help="default: the bundled target")
    more = {"action": "append", "metavar": "[NAME=]DIR_OR_HUB_ID"} if several else {}
    group.add_argument(
        "--draft",
        **{"metavar": "DIR_OR_HUB_ID", **more},
        help="default: the bundled drafter, prompt lookup with --target alone"
        + ("; bundled names the bundled one; repeat for several" if several else ""),
    )
    add_kind_flags(group)
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by hardware")
    add_weights_flag(group)
    group.add_argument(
        "--threads",
        type=positive,
        help="number of CPU cores (default: all); small models run fastest on 1",
    )
    return group


def add_pair_flag(parser: Parser, group: Any) -> None:
    """Add --pair, which sets --target, and also --draft if the pair has a drafter."""
    group.add_argument(
        "--pair",
        choices=PAIRS,
        help=f"a target and its drafter by name, fetched once; default: ${PAIR_VARIABLE}, else "
        f"{DEFAULT_PAIR}, which is bundled; prompt lookup drafts for a pair without a drafter",
    )
    parser.finish_with(_use_pair)


def _use_pair(args: argparse.Namespace) -> None:
    """Sets the models of --pair, or of $MOA_PAIR if flags name no target; raises InputError."""
    if args.pair is not None and args.target is not None:
        raise InputError(f"--pair {args.pair} and --target {args.target}; leave one of them out")
    if args.pair is None:
        named = ("target", "random_weights", "shape")
        if any(getattr(args, flag, None) for flag in named):
            return
        args.pair = os.environ.get(PAIR_VARIABLE) or DEFAULT_PAIR
    if args.pair != DEFAULT_PAIR:
        target, draft = locate(args.pair)
        args.target = str(target)
        if draft is not None and args.draft is None:
            args.draft = [draft] if isinstance(args.draft, list) else draft


def add_kind_flags(group: Any) -> None:
    """Add --method and --target-layer-inference, which `load_drafter` takes."""
    group.add_argument("--method", help="drafter kind, where its files do not say")
    group.add_argument(
        "--target-layer-inference",
        type=int,
        metavar="N",
        help="target layers that a MoA drafter reuses, where its files do not say",
    )


def add_weights_flag(group: Any) -> None:
    """Add --weights, which `load_target` and `load_drafter` take."""
    group.add_argument(
        "--weights",
        choices=FORMATS,
        help="quantize matrices to eight bits while they are loaded, with a scale for each output "
        "channel; fp8 on hardware that has it; default: as --dtype",
    )


def add_draft_flags(parser: argparse.ArgumentParser, chooses: bool = True) -> None:
    """Add --mode and the flags of the draft shape; mode auto exists only if `chooses`."""
    group = parser.add_argument_group("drafting")
    about = "how to decode; default: chain"
    if chooses:
        about = (
            "how to decode: auto chooses every few rounds by what rounds cost on this machine and "
            "what is accepted; default: auto, or chain with --depth or --sampled-drafts"
        )
    group.add_argument("--mode", choices=MODES if chooses else EXPLICIT, help=about)
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
    add_tree_sizes(group)
    group.add_argument(
        "--paths", metavar="FILE.json", help="a static tree: [[0], [1], [0, 0]] by child ranks"
    )
    group.add_argument(
        "--sampled-drafts",
        action="store_true",
        help="draw candidates from the drafter instead of its top-k (chains, static trees)",
    )
    add_vocabulary_flag(group)


def add_tree_sizes(group: Any) -> None:
    """Add --breadth and --total-tokens."""
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


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """Add --cache-rows, which `Session` takes."""
    parser.add_argument_group("memory").add_argument(
        "--cache-rows",
        type=positive,
        metavar="N",
        help="rows of each cache, for prompt, answer and draft, so that one program serves all "
        "lengths; rounded up to a multiple of 128; default: 128, doubled as prompts ask for more",
    )


def load_pair(
    args: argparse.Namespace, *, split: bool = False, for_client: bool = False
) -> tuple[Target, LoadedDrafter | None]:
    """Loads the target and the drafter that the flags name; the drafter is None in mode plain.

    With `split`, a named target has no default drafter. With `for_client`, no target weights are
    loaded, and only the drafter weights that drafting reads, in every mode. Notices go to stderr.
    Raises InputError for flags that contradict each other, and for models that are missing, damaged
    or do not match.
    """
    target_name, draft_name = named_pair(args, split=split, for_client=for_client)
    if draft_name != args.draft:  # --target without --draft
        has_mode = hasattr(args, "mode") and not hasattr(args, "modes")
        off = " (--mode plain turns it off)" if has_mode else ""
        name = getattr(args, "pair", None) or target_name
        print(f"no --draft: prompt lookup drafts for {name}{off}", file=sys.stderr)
        args.draft = draft_name
    if args.threads is not None:
        use_cores(args.threads)
    if for_client:  # a hub id is fetched whole: borrowed weights may be in any file
        target = describe_target(find_folder(target_name or DEMO / "target"))
    else:
        target = open_target(target_name, **target_options(args))
    if not for_client and getattr(args, "mode", None) == "plain":
        return target, None
    options = drafter_options(args) | {"dtype": dtype_of(args), "weights": args.weights}
    options["for_client"] = for_client
    return target, open_drafter(draft_name, target, **options)


def named_pair(
    args: argparse.Namespace, *, split: bool = False, for_client: bool = False
) -> tuple[str | None, str | None]:
    """The folders, hub ids or kinds of target and drafter; None is the bundled model.

    Expands --speculative-config first. A target without a drafter gets prompt lookup, except in
    `split` decoding, whose drafter must continue an answer alone when the link is lost. Raises
    InputError for flags that contradict each other.
    """
    _apply_speculative_config(args)
    if args.draft is None and needs_no_files(args.method):
        args.draft = args.method
    drafts = for_client or getattr(args, "mode", None) != "plain"
    if args.target is None and args.draft is not None and not needs_no_files(args.draft):
        raise InputError("--draft without --target: a drafter belongs to one target; name both")
    if args.target is not None and args.draft is None and drafts:
        if (split or for_client) and getattr(args, "pair", None) is None:
            raise InputError("--target without --draft; name its drafter")
        for flag, value in drafter_options(args).items():
            if value is not None:
                shown = flag.replace("_", "-")
                raise InputError(f"--{shown} {value} describes a drafter; name it with --draft")
        return args.target, LOOKUP
    return args.target, args.draft


def open_target(folder: str | os.PathLike[str] | None, **options: Any) -> Target:
    """Loads a target for decoding; None is the bundled target.

    `options` are those of `load_target`, which raises InputError. Notices, and the loading time of
    a GGUF file, go to stderr.
    """
    start = time.perf_counter()
    target = load_target(folder or DEMO / "target", **options)
    for notice in target.notices:
        print(notice, file=sys.stderr)
    if (target.folder / GGUF_INDEX).is_file():
        seconds = time.perf_counter() - start
        print(f"loaded {target.folder.name} in {seconds:.1f} s", file=sys.stderr)
    # Done here once, so that several sessions share the weights instead of each holding a copy.
    return target._replace(params=for_decoding(Weights(target.params, None)).target)


def open_drafter(
    folder: str | os.PathLike[str] | None, target: Target, **options: Any
) -> LoadedDrafter:
    """Loads a drafter for decoding; None is the bundled drafter. Notices go to stderr.

    `options` are those of `load_drafter`, which raises InputError.
    """
    drafter = load_drafter(folder or DEMO / "draft", target, **options)
    for notice in drafter.notices:
        print(notice, file=sys.stderr)
    return drafter._replace(params=for_decoding(Weights(target.params, drafter.params)).drafter)


def target_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `load_target` from --dtype, --weights and --mesh; raises InputError."""
    return {"dtype": dtype_of(args), "weights": args.weights, "mesh": asked_mesh(args)}


def drafter_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `load_drafter` from --method and --target-layer-inference."""
    return {flag: getattr(args, flag) for flag in ("method", "target_layer_inference")}


def dtype_of(args: argparse.Namespace) -> Any:
    """The dtype that --dtype names; None leaves the choice to the loader."""
    return None if args.dtype is None else jnp.dtype(args.dtype)


def use_cores(count: int) -> None:
    """Pins this process to `count` of its cores, those with the fewest other pinned processes.

    Must run before jax starts its threads, whose number depends on the cores of the process.
    """
    if not hasattr(os, "sched_setaffinity"):  # Linux only
        return
    with open(__file__, "rb") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # concurrent starts choose in turn
        own = os.sched_getaffinity(0)
        taken = _pinned_processes(own)
        os.sched_setaffinity(0, sorted(own, key=lambda core: (taken[core], core))[:count])


def _pinned_processes(own: set[int]) -> Counter[int]:
    """Number of other processes that are pinned to a part of the cores `own`, by core."""
    found: Counter[int] = Counter()
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has ended
                cores = os.sched_getaffinity(int(name))
                if not cores >= own and Path("/proc", name, "cmdline").read_bytes():
                    found.update(cores)  # kernel threads have no command line
    return found


def shape_of(args: argparse.Namespace, own_depth: int | None) -> DraftShape:
    """The draft shape of the flags, else the drafter's own; raises InputError for invalid flags.

    Mode auto uses this shape until costs and acceptance rates are available.
    """
    tokens = args.num_speculative_tokens
    depth = args.depth if tokens is None else tokens + 1
    rest = {"sampled": args.sampled_drafts}
    if args.mode != "tree":
        for flag in ("breadth", "total_tokens", "paths"):
            if getattr(args, flag) is not None:
                shown = flag.replace("_", "-")
                raise InputError(f"--{shown} describes a tree; use it with --mode tree")
        return DraftShape(depth or own_depth or DEFAULT_DEPTH, **rest)
    if args.paths is not None:
        if (depth, args.breadth, args.total_tokens) != (None, None, None):
            raise InputError(
                "--paths describes a whole tree; leave out --depth, --breadth and --total-tokens"
            )
        return DraftShape.static(_read_paths(args.paths), **rest)
    breadth = args.breadth or DEFAULT_TREE.breadth
    total = args.total_tokens or DEFAULT_TREE.total_tokens
    return DraftShape(depth or DEFAULT_TREE.depth, breadth, total, **rest)


def asked_mode(args: argparse.Namespace) -> str:
    """The mode of the flags, or the default: auto, or chain with a depth or sampled candidates.

    With sampled candidates the tokens depend on the number of drafted tokens, so a fixed chain
    makes the answer of a seed reproducible.
    """
    if args.mode is not None:
        return args.mode
    sized = args.depth is not None or args.num_speculative_tokens is not None
    return "chain" if sized or args.sampled_drafts else AUTO


def kind_of(shape: DraftShape) -> str:
    """The explicit mode of a shape: plain, chain or tree."""
    if not shape.num_drafted:
        return "plain"
    return "chain" if shape.is_chain else "tree"


def mode_of(session: Session) -> str:
    """The mode of a session: auto if the session has a controller, else the mode of its shape."""
    return AUTO if session.controller is not None else kind_of(session.shape)


def open_session(
    args: argparse.Namespace,
    target: Target,
    drafter: LoadedDrafter | None,
    *,
    shape: DraftShape | None = None,
    vocabulary: DraftVocabulary | None = None,
    **rest: Any,
) -> Session:
    """Creates the session that the flags describe; `shape` replaces that of the flags.

    `vocabulary` comes from `infer.cli.flags.vocabulary`. `rest` are keyword arguments of `Session`:
    `cache_rows`, `least_rows`, `top_logprobs` and `choose`.
    """
    shape = shape or shape_of(args, drafter and drafter.depth)
    rest |= {"vocabulary": vocabulary}
    if drafter and asked_mode(args) == AUTO:
        rest |= {
            "ways": ways_of(shape, drafter),
            "costs": costs_of(target, drafter, vocabulary, args.weights),
        }
    return Session(target, drafter, shape, **rest)


def _read_paths(path: str) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise InputError(
            f"{path} is no JSON list of paths ({error}); write it like [[0], [1], [0, 0]]"
        ) from error


def _apply_speculative_config(args: argparse.Namespace) -> None:
    """Expands vLLM's JSON into flags; raises InputError for keys without a flag."""
    given = getattr(args, "speculative_config", None) or {}
    args.speculative_config = None
    unknown = sorted(set(given) - set(_SPECULATIVE))
    if unknown:
        raise InputError(
            f"--speculative-config: {', '.join(unknown)} has no meaning here; "
            f"choose from {', '.join(_SPECULATIVE)}"
        )
    for key, value in given.items():
        flag, kind = _SPECULATIVE[key]
        if type(value) is not kind or (kind is int and value < 1):
            wanted = "text" if kind is str else "a whole number of at least 1"
            raise InputError(f"--speculative-config: {key} is {value!r}; give {wanted}")
        for same in (flag, "depth") if kind is int else (flag,):
            if getattr(args, same, None) is not None:
                shown = same.replace("_", "-")
                raise InputError(f"--speculative-config states {key}; leave out --{shown}")
        setattr(args, flag, value)


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return found
