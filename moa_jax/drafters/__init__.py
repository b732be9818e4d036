"""Kinds of drafters by the name of their method; a new kind is one more entry."""

from moa_jax.drafters import moa_files
from moa_jax.drafters.kinds import DrafterKind

DRAFTERS: dict[str, DrafterKind] = {"moa": moa_files.KIND}
