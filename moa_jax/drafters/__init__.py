"""Drafter kinds by method name; a new kind is a new entry of `DRAFTERS`."""

from typing import Any

from moa_jax.drafters import eagle, eagle3, glide, independent, lookup, moa
from moa_jax.files.registry import DrafterKind

DRAFTERS: dict[str, DrafterKind] = {
    "moa": moa.KIND,
    "eagle3": eagle3.KIND,
    "eagle": eagle.KIND,
    "glide": glide.KIND,
    "independent": independent.INDEPENDENT,
    "independent-borrowed": independent.INDEPENDENT_BORROWED,
    "lookup": lookup.KIND,
}


def method_of(config: Any) -> str:
    """The method name of a drafter's config."""
    return next(name for name, kind in DRAFTERS.items() if type(config) is kind.config)


def needs_no_files(name: str) -> bool:
    """Whether `name` is a drafter kind that needs no files."""
    return name in DRAFTERS and DRAFTERS[name].without_files is not None
