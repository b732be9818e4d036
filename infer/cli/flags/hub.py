"""Flags of the Hugging Face hub: --push, --private, --license, --base-model."""

from __future__ import annotations

import argparse
from pathlib import Path

from moa_jax.errors import InputError
from moa_jax.files import hub
from moa_jax.files.paths import is_stored


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; `check_flags` checks them."""
    group = parser.add_argument_group("hub")
    help_ = "upload the folder to this repository of the Hugging Face hub, and create it if missing"
    group.add_argument("--push", metavar="OWNER/NAME", type=_repository, help=help_)
    group.add_argument("--private", action="store_true", help="create a private repository")
    help_ = "licence of the weights in the model card, as the hub spells it: apache-2.0"
    group.add_argument("--license", metavar="ID", help=help_)
    help_ = "hub id of the target in the model card, if the target is a folder of this machine"
    group.add_argument("--base-model", metavar="OWNER/NAME", type=_repository, help=help_)


def check_flags(args: argparse.Namespace, folder: Path) -> None:
    """Raises InputError for an upload that cannot begin, before any work is done."""
    if args.private and args.push is None:
        raise InputError("--private describes a repository; name it with --push")
    if args.push is None:
        return
    if is_stored(folder):
        raise InputError(f"--push {args.push}: {folder} is in a store; name another --output")
    hub.check_token(args.push)


def _repository(text: str) -> str:
    if not hub.REPOSITORY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} names no repository; write OWNER/NAME")
    return text
