"""Flags for drafting and for the encoding of rows, shared by infer.client and infer.bench."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from infer.cli.program import above_zero, names, positive
from infer.split_client.state import ClientOptions
from moa_jax.split.client_drafter import MOST_STEPS
from moa_jax.split.protocol import Codec


def add_pace_flags(group: Any, slowdown: float = 1.0) -> None:
    """Add --lengths, --no-ahead and --client-slowdown."""
    group.add_argument(
        "--lengths",
        type=_lengths,
        default=ClientOptions().lengths,
        metavar="K,K",
        help="lengths of a chain to choose from by measured speed; one number fixes it",
    )
    group.add_argument(
        "--no-ahead", action="store_true", help="do not draft while a reply is under way"
    )
    group.add_argument(
        "--client-slowdown",
        type=_slowdown,
        default=slowdown,
        metavar="X",
        help="make drafting take this many times as long, to play a slower device; "
        f"default: {slowdown:g}",
    )


def add_row_flags(group: Any) -> None:
    """Add --codec and --compress."""
    group.add_argument(
        "--codec",
        choices=get_args(Codec),
        default="bfloat16",
        help="how rows of verified tokens are sent; it changes what is accepted, never the text",
    )
    group.add_argument("--compress", action="store_true", help="also compress rows with zlib")


def _lengths(text: str) -> tuple[int, ...]:
    lengths = tuple(sorted(set(map(positive, names(text)))))
    if not lengths or lengths[-1] > MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r}; give numbers from 1 to {MOST_STEPS}")
    return lengths


def _slowdown(text: str) -> float:
    value = above_zero(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}; choose 1 or more")
    return value
