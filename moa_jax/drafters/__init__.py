"""Kinds of drafters by the name of their method; a new kind is one more entry."""

from moa_jax.drafters import moa
from moa_jax.drafters.kinds import DrafterKind

DRAFTERS: dict[str, DrafterKind] = {"moa": moa.KIND}
