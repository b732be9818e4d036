"""Who is compared: plain decoding, and each drafter in each mode, as sessions with names."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from infer.flags.pair import (
    BUNDLED,
    DEMO,
    EXPLICIT,
    drafter_options,
    load_pair,
    mode_of,
    open_drafter,
    open_session,
)
from infer.flags.vocabulary import vocabulary_of
from infer.program import names
from moa_jax import Session
from moa_jax.decode.vocabulary import DraftVocabulary
from moa_jax.errors import InputError
from moa_jax.files import folders
from moa_jax.pretrained import LoadedDrafter, Target, functions_of

PLAIN = "plain"  # the name of the decoding that all others are measured beside
OPTIONS = {"method": "method", "n": "target_layer_inference"}  # of one --draft: flag
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
_OPTIONS = re.compile(r"(.*?)((?:,\w+=[^,/]*)*)", re.DOTALL)


class DraftFlag(NamedTuple):
    """What one --draft says."""

    label: str | None
    path: str
    options: dict[str, Any]  # by the names of flags


class Contender(NamedTuple):
    """A way of decoding; `name` also names its answer files."""

    name: str
    drafter: LoadedDrafter | None
    session: Session


def load_contenders(args: argparse.Namespace) -> tuple[Target, list[Contender]]:
    """The target and all ways to decode it, the plain one first.

    Raises InputError for models that are missing or not made for each other, for flags that
    describe no draft, and for two contenders of the same name.
    """
    modes = modes_of(args)
    given = [given_of(text) for text in args.draft or [BUNDLED]]
    target, drafters = _load(args, given)
    labels = [g.label or _public(d.folder) for g, d in zip(given, drafters, strict=True)]
    vocabularies = _vocabularies(args, target, labels, drafters)
    found = [Contender(PLAIN, None, Session(target, cache_rows=args.cache_rows))]
    for label, drafter, vocabulary in zip(labels, drafters, vocabularies, strict=True):
        for mode in modes:
            flags = _flags_of(args, mode, modes)
            rest = {"vocabulary": vocabulary, "cache_rows": args.cache_rows}
            session = open_session(flags, target, drafter, **rest)
            name = f"{label}-{mode_of(session)}"
            if any(contender.name == name for contender in found):
                raise InputError(f"two drafters are named {name}: give one as --draft NAME=DIR")
            found.append(Contender(name, drafter, session))
    return target, found


def modes_of(args: argparse.Namespace) -> list[str]:
    """The modes of each drafter, by default a chain.

    Mode auto is none of them: what it drafts depends on the machine and on its load.
    """
    if args.modes is None:
        chosen = [args.mode or "chain"]
    elif args.mode is not None:
        raise InputError("--modes says all modes: leave out --mode")
    else:
        chosen = list(dict.fromkeys(names(args.modes)))
    wrong = [mode for mode in chosen if mode not in EXPLICIT]
    if wrong or not chosen:
        shown = args.modes or args.mode
        raise InputError(f"{shown} is no mode to evaluate drafts in: choose from chain, tree")
    if PLAIN in chosen:
        raise InputError("--mode plain: there is nothing to compare, use --mode chain")
    return chosen


def describe(
    args: argparse.Namespace, target: Target, contenders: list[Contender]
) -> dict[str, Any]:
    """What decides the answers and their times, apart from the questions, ready for JSON."""
    drafters = {c.name: c.drafter for c in contenders if c.drafter is not None}
    files = {c.name: c.session.vocabulary.file for c in contenders if c.session.vocabulary}
    narrowed = {name: folders.file_hash(file) for name, file in files.items()}
    hashes = {id(d): folders.folder_hash(d.folder) for d in drafters.values()}
    return {
        "target": {"name": _public(target.folder), "sha256": folders.folder_hash(target.folder)},
        "models": {
            contender.name: {
                "method": contender.drafter and contender.drafter.method,
                "sha256": contender.drafter and hashes[id(contender.drafter)],
                "mode": mode_of(contender.session),
                "levels": contender.session.shape.levels,
                **dataclasses.asdict(contender.session.shape),
            }
            for contender in contenders
        },
        "draft_vocabulary": narrowed or None,
        "cache_rows": contenders[0].session.cache_rows,
        "threads": args.threads,
        **({"mesh": args.mesh} if args.mesh else {}),  # absent in the files of older runs
    }


def _load(args: argparse.Namespace, given: list[DraftFlag]) -> tuple[Target, list[LoadedDrafter]]:
    """The target and all drafters; the options within one --draft override the flags."""
    common = drafter_options(args) | {"weights": args.weights}
    if args.draft is not None:
        own = DEMO / "draft" if args.target else None  # a target alone would get prompt lookup
        args.draft = own if given[0].path == BUNDLED else given[0].path
    vars(args).update(given[0].options)
    target, first = load_pair(args)
    drafters = [first]
    for _, path, options in given[1:]:
        folder = None if path == BUNDLED else path
        drafters.append(open_drafter(folder, target, **(common | options)))
    return target, drafters


def _vocabularies(
    args: argparse.Namespace, target: Target, labels: list[str], drafters: list[LoadedDrafter]
) -> list[DraftVocabulary | None]:
    """What each drafter drafts from: --draft-vocabulary, else what its own folder brings.

    Those with a head of their own are passed over where others can use the file of the flag.
    Where none can, all get it, and opening their session refuses it.
    """
    found = [vocabulary_of(args, target, drafter) for drafter in drafters]
    able = [not functions_of(drafter, target.config).own_head for drafter in drafters]
    if not any(able):
        return found
    for index, label in enumerate(labels):
        if found[index] and not able[index]:
            print(
                f"{label} has a head of its own: --draft-vocabulary is not for it", file=sys.stderr
            )
            found[index] = None
    return found


def _flags_of(
    args: argparse.Namespace, mode: str | None, modes: list[str | None]
) -> argparse.Namespace:
    """The flags for one of several modes, without those that describe only the others."""
    flags = argparse.Namespace(**vars(args))
    flags.mode = mode
    if mode == "chain" and "tree" in modes:
        flags.breadth = flags.total_tokens = flags.paths = None
    if mode == "tree" and "chain" in modes and flags.paths is not None:
        flags.depth = flags.num_speculative_tokens = None
    return flags


def given_of(text: str) -> DraftFlag:
    """Split [NAME=]DIR[,method=KIND][,n=N]; the name becomes part of a file's name.

    A text that is a folder as it stands has neither name nor options.
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
        raise InputError(f"--draft {text}: write NAME=DIR, the name of letters, digits, . _ + -")
    return DraftFlag(name, rest, _options(text, options))


def _options(text: str, options: str) -> dict[str, Any]:
    """`,method=moa,n=3` by the names of flags."""
    found: dict[str, Any] = {}
    for key, _, value in (option.partition("=") for option in names(options)):
        if key not in OPTIONS:
            raise InputError(f"--draft {text}: {key} is no option, known are {', '.join(OPTIONS)}")
        if key == "n" and not value.isdecimal():
            raise InputError(f"--draft {text}: n={value} is no number of layers, write n=3")
        found[OPTIONS[key]] = int(value) if key == "n" else value
    return found


def _public(folder: Path) -> str:
    if folder.parent == DEMO:
        return BUNDLED
    return folders.public_name(folder).rpartition("/")[2]
