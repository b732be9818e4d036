"""Kinds of drafters by the name of their method; a new kind is one more entry."""

from typing import Any

from moa_jax.drafters import moa
from moa_jax.drafters.kinds import DrafterKind

DRAFTERS: dict[str, DrafterKind] = {"moa": moa.KIND}


def method_of(config: Any) -> str:
    """The name of the kind that a drafter's config belongs to."""
    return next(name for name, kind in DRAFTERS.items() if type(config) is kind.config)
