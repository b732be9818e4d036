"""Compares the files that all processes of a run must share, before models are loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

from infer.cli.flags import cluster
from infer.cli.flags.pair import DEMO, named_pair
from infer.cli.flags.vocabulary import NONE
from moa_jax.data import sources
from moa_jax.decode.draft_vocabulary import FILE
from moa_jax.drafters import needs_no_files
from moa_jax.files.client_files import model_hash
from moa_jax.files.model_folder import TOKENIZER_PATTERNS, file_hash, find_folder
from moa_jax.runtime import multihost

SETTINGS = ("generation_config.json", *TOKENIZER_PATTERNS)  # files of a target, besides its weights
SHOWN = 12  # hexadecimal digits of a hash


def check_same_flags(args: argparse.Namespace) -> None:
    """Raises InputError if a process has other flags, files or versions than process 0.

    Weights are compared by samples, all other files by every byte. Also raises InputError for
    flags that contradict each other, and for missing or damaged folders.
    """
    if multihost.count() > 1:
        shown = vars(args).copy()  # before --speculative-config is expanded
        cluster.check_alike(argparse.Namespace(**shown), files_of(args))


def files_of(args: argparse.Namespace) -> dict[str, str]:
    """Hashes of the files that the flags name, by description."""
    target, draft = named_pair(args)
    folder = find_folder(target or DEMO / "target")
    found = {"the target's model": model_hash(folder)}
    for path in sorted({path for pattern in SETTINGS for path in folder.glob(pattern)}):
        found[f"{path.name} of the target"] = file_hash(path)
    has_no_files = draft is not None and needs_no_files(draft) and not Path(draft).is_dir()
    if args.mode != "plain" and not has_no_files:
        folder = find_folder(draft or DEMO / "draft")
        found["the drafter's model"] = model_hash(folder)
        if args.draft_vocabulary is None and (folder / FILE).is_file():
            found[f"{FILE} of the drafter"] = file_hash(folder / FILE)
    if args.draft_vocabulary not in (None, NONE):
        path = Path(args.draft_vocabulary).expanduser()
        found["the file of --draft-vocabulary"] = file_hash(path)
    if args.paths is not None:
        found["the file of --paths"] = file_hash(Path(args.paths))
    for path in sources.files_of(args.prompts) if getattr(args, "prompts", None) else ():
        found[f"{path} of --prompts"] = file_hash(path)
    return {name: f"sha256 {each[:SHOWN]}" for name, each in found.items() if each is not None}
