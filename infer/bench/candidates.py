"""The candidates of a run as named sessions: plain decoding, and every drafter in every mode."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from infer.cli.flags.pair import (
    BUNDLED,
    DEMO,
    EXPLICIT,
    drafter_options,
    load_pair,
    mode_of,
    open_drafter,
    open_session,
)
from infer.cli.flags.vocabulary import vocabulary_of
from infer.cli.program import names
from moa_jax import Session
from moa_jax.errors import InputError
from moa_jax.files import model_folder
from moa_jax.pretrained import LoadedDrafter, Target, functions_of

PLAIN = "plain"  # the baseline
OPTIONS = {"method": "method", "n": "target_layer_inference"}  # option of --draft -> flag
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_OPTIONS = re.compile(r"(.*?)((?:,\w+=[^,/]*)*)", re.DOTALL)


class DraftFlag(NamedTuple):
    """One --draft; `options` are keyed by flag names."""

    label: str | None
    path: str
    options: dict[str, Any]


class Candidate(NamedTuple):
    """A mode with its drafter and session; `name` also names its answer files."""

    name: str
    drafter: LoadedDrafter | None
    session: Session


def load_candidates(args: argparse.Namespace) -> tuple[Target, list[Candidate]]:
    """The target and all candidates, plain decoding first.

    Raises InputError for missing or mismatched models, for flags that describe no draft, and for
    two candidates with the same name.
    """
    modes = modes_of(args)
    given = [given_of(text) for text in args.draft or [BUNDLED]]
    target, drafters = _load(args, given)
    has_head = [functions_of(each, target.config).own_head for each in drafters]
    found = [Candidate(PLAIN, None, Session(target, cache_rows=args.cache_rows))]
    for flag, drafter, own_head in zip(given, drafters, has_head, strict=True):
        label = flag.label or _public(drafter.folder)
        vocabulary = vocabulary_of(args, target, drafter)
        if vocabulary and own_head and not all(has_head):  # otherwise `open_session` refuses it
            print(
                f"{label} has a head of its own: --draft-vocabulary is not for it", file=sys.stderr
            )
            vocabulary = None
        for mode in modes:
            flags = _flags_of(args, mode, modes)
            rest = {"vocabulary": vocabulary, "cache_rows": args.cache_rows}
            session = open_session(flags, target, drafter, **rest)
            name = f"{label}-{mode_of(session)}"
            if any(candidate.name == name for candidate in found):
                raise InputError(f"two drafters are named {name}; give one as --draft NAME=DIR")
            found.append(Candidate(name, drafter, session))
    return target, found


def modes_of(args: argparse.Namespace) -> list[str]:
    """The modes per drafter, by default chain; raises InputError for other modes.

    Mode auto is refused, because its drafts depend on the machine and its load.
    """
    if args.modes is not None and args.mode is not None:
        raise InputError("--modes and --mode exclude each other; leave out --mode")
    shown = args.modes if args.modes is not None else args.mode or "chain"
    chosen = list(dict.fromkeys(names(shown)))
    if not chosen or not set(chosen) <= {*EXPLICIT}:
        raise InputError(f"{shown} is no mode to evaluate drafts in; choose from chain, tree")
    if PLAIN in chosen:
        raise InputError("--mode plain: there is nothing to compare; use --mode chain")
    return chosen


def describe(
    args: argparse.Namespace, target: Target, candidates: list[Candidate]
) -> dict[str, Any]:
    """Models and settings that determine the answers and their times, ready for JSON."""
    narrowed = {c.name: c.session.vocabulary.file for c in candidates if c.session.vocabulary}
    folders_of = {c.drafter.folder for c in candidates if c.drafter}
    hashes = {folder: model_folder.folder_hash(folder) for folder in folders_of}
    return {
        "target": {
            "name": _public(target.folder),
            "sha256": model_folder.folder_hash(target.folder),
        },
        "models": {
            name: {
                "method": drafter and drafter.method,
                "sha256": drafter and hashes[drafter.folder],
                "mode": mode_of(session),
                "levels": session.shape.levels,
                **dataclasses.asdict(session.shape),
            }
            for name, drafter, session in candidates
        },
        "draft_vocabulary": {name: model_folder.file_hash(file) for name, file in narrowed.items()}
        or None,
        "cache_rows": candidates[0].session.cache_rows,
        "threads": args.threads,
        **({"mesh": args.mesh} if args.mesh else {}),  # older runs' files lack the key
    }


def _load(args: argparse.Namespace, given: list[DraftFlag]) -> tuple[Target, list[LoadedDrafter]]:
    """The target and all drafters; the options within one --draft override the flags."""
    common = drafter_options(args) | {"weights": args.weights}
    if args.draft is not None:
        own = DEMO / "draft" if args.target else None  # else prompt lookup
        args.draft = own if given[0].path == BUNDLED else given[0].path
    vars(args).update(given[0].options)
    target, first = load_pair(args)
    rest = [
        open_drafter(None if path == BUNDLED else path, target, **(common | options))
        for _, path, options in given[1:]
    ]
    return target, [first, *rest]


def _flags_of(args: argparse.Namespace, mode: str, modes: list[str]) -> argparse.Namespace:
    """The flags of one mode, without flags that apply only to other modes."""
    flags = argparse.Namespace(**vars(args) | {"mode": mode})
    if mode == "chain" and "tree" in modes:
        flags.breadth = flags.total_tokens = flags.paths = None
    if mode == "tree" and "chain" in modes and flags.paths is not None:
        flags.depth = flags.num_speculative_tokens = None
    return flags


def given_of(text: str) -> DraftFlag:
    """Splits [NAME=]DIR[,method=KIND][,n=N]; NAME becomes part of file names.

    An existing folder with exactly the name `text` has neither NAME nor options.
    """
    if Path(text).is_dir():
        return DraftFlag(None, text, {})
    path, options = text, ""
    if not Path(text.partition("=")[2]).is_dir():
        path, options = _OPTIONS.fullmatch(text).groups()
    name, equals, rest = path.partition("=")
    if not equals:
        return DraftFlag(None, path, _options(text, options))
    if not _NAME.fullmatch(name) or not rest:
        raise InputError(f"--draft {text}; write NAME=DIR, the name of letters, digits, . _ + -")
    return DraftFlag(name, rest, _options(text, options))


def _options(text: str, options: str) -> dict[str, Any]:
    """Parses `,method=moa,n=3` to a dict keyed by flag names."""
    found: dict[str, Any] = {}
    for key, _, value in (option.partition("=") for option in names(options)):
        if key not in OPTIONS:
            raise InputError(
                f"--draft {text}: {key} is no option; choose from {', '.join(OPTIONS)}"
            )
        if key == "n" and not value.isdecimal():
            raise InputError(f"--draft {text}: n={value} is no number of layers; write n=3")
        found[OPTIONS[key]] = int(value) if key == "n" else value
    return found


def _public(folder: Path) -> str:
    """The name of a folder for reports."""
    return BUNDLED if folder.parent == DEMO else model_folder.public_name(folder).rpartition("/")[2]
