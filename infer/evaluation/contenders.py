"""Who is compared: plain decoding, and each drafter in each mode, as sessions with names."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from infer.cli import names
from infer.pair import DEMO, MODES, load_pair, mode_of, open_session
from moa_jax import Session, folders, load_drafter
from moa_jax.config import DraftShape
from moa_jax.errors import InputError
from moa_jax.pretrained import LoadedDrafter, Target

BUNDLED = "bundled"  # a name for the bundled drafter's folder
PLAIN = "plain"  # the name of the decoding that all others are measured beside
FILES_OF_MODEL = (
    "*.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "chat_template*",
)
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


class Contender(NamedTuple):
    """A way of decoding; `name` also names its answer files."""

    name: str
    drafter: LoadedDrafter | None
    session: Session


def load_contenders(args: argparse.Namespace) -> tuple[Target, list[Contender]]:
    """The target and all ways to decode it, the plain one first.

    Raises InputError for models that are missing or not made for each other, for flags that
    make no draft, and for two contenders of one name.
    """
    modes = modes_of(args)
    named = [_named(text) for text in args.draft or [BUNDLED]]
    args.draft = None if named[0][1] == BUNDLED else named[0][1]
    target, first = load_pair(args)
    drafters = [first]
    for _, path in named[1:]:
        drafter = load_drafter(
            DEMO / "draft" if path == BUNDLED else path,
            target,
            method=args.method,
            target_layer_inference=args.target_layer_inference,
        )
        print(*drafter.notices, sep="\n", end="\n" if drafter.notices else "", file=sys.stderr)
        drafters.append(drafter)
    found = [Contender(PLAIN, None, Session(target, cache_rows=args.cache_rows))]
    for (label, _), drafter in zip(named, drafters, strict=True):
        for mode in modes:
            session = open_session(
                _flags_of(args, mode, modes), target, drafter, cache_rows=args.cache_rows
            )
            name = f"{label or _public(drafter.folder)}-{mode_of(session.shape)}"
            if any(contender.name == name for contender in found):
                raise InputError(f"two drafters are named {name}: give one as --draft NAME=DIR")
            found.append(Contender(name, drafter, session))
    return target, found


def modes_of(args: argparse.Namespace) -> list[str | None]:
    """The modes of each drafter; None leaves the choice to --tuned, else it is a chain."""
    if args.modes is None:
        chosen = [args.mode]
    elif args.mode is not None or args.tuned:
        raise InputError("--modes says all modes: leave out --mode and --tuned")
    else:
        chosen = list(dict.fromkeys(names(args.modes)))
    wrong = [mode for mode in chosen if mode is not None and mode not in MODES]
    if wrong or not chosen:
        raise InputError(f"--modes {args.modes}: choose from chain, tree")
    if PLAIN in chosen:
        raise InputError("--mode plain: there is nothing to compare, use --mode chain")
    return chosen


def describe(
    args: argparse.Namespace, target: Target, contenders: list[Contender]
) -> dict[str, Any]:
    """What decides the answers and their times, but for the questions, as JSON has it."""
    drafters = {c.name: c.drafter for c in contenders if c.drafter is not None}
    hashes = {id(d): _sha256(d.folder) for d in drafters.values()}
    return {
        "target": {"name": _public(target.folder), "sha256": _sha256(target.folder)},
        "models": {
            contender.name: {
                "method": contender.drafter and contender.drafter.method,
                "sha256": contender.drafter and hashes[id(contender.drafter)],
                **_shape(contender.session.shape),
            }
            for contender in contenders
        },
        "draft_vocabulary": args.draft_vocabulary
        and folders.file_hash(Path(args.draft_vocabulary)),
        "cache_rows": args.cache_rows,
        "threads": args.threads,
    }


def _flags_of(
    args: argparse.Namespace, mode: str | None, modes: list[str | None]
) -> argparse.Namespace:
    """The flags for one of several modes: a chain is not told what describes the trees."""
    flags = argparse.Namespace(**vars(args))
    flags.mode = mode
    if mode == "chain" and "tree" in modes:
        flags.breadth = flags.total_tokens = flags.paths = None
    if mode == "tree" and "chain" in modes and flags.paths is not None:
        flags.depth = flags.num_speculative_tokens = None
    return flags


def _named(text: str) -> tuple[str | None, str]:
    """NAME=DIR in two; a name is also part of a file's name."""
    name, equals, path = text.partition("=")
    if not equals or Path(text).is_dir():
        return None, text
    if not _NAME.fullmatch(name) or not path:
        raise InputError(f"--draft {text}: write NAME=DIR, the name of letters, digits, . _ + -")
    return name, path


def _public(folder: Path) -> str:
    if folder.parent == DEMO:
        return BUNDLED
    return folders.public_name(folder).rpartition("/")[2]


def _shape(shape: DraftShape) -> dict[str, Any]:
    return {"mode": mode_of(shape), "levels": shape.levels, **dataclasses.asdict(shape)}


def _sha256(folder: Path) -> str:
    """Of the names and contents of a model's files."""
    paths = {path for pattern in FILES_OF_MODEL for path in folder.glob(pattern)}
    found = [f"{path.name} {folders.file_hash(path)}" for path in sorted(paths)]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
