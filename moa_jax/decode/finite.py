"""Logits that are not finite: the token that marks them, and their likely cause.

The target chooses NO_TOKEN if the maximum of its scores is not finite (`topk.finite_argmax`).
After a prompt the target also chooses NO_TOKEN if any logit is not finite. NO_TOKEN ends its row,
and the host raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moa_jax.drafters.api import NO_TOKEN
from moa_jax.errors import InputError
from moa_jax.files.model_folder import public_name
from moa_jax.model import convert, sharding
from moa_jax.pretrained import Target


class NotFinite(InputError):
    """The target's logits hold NaN or infinity."""


def check(target: Target, what: str, length: int, token_ids: Sequence[int]) -> None:
    """Raises NotFinite if new tokens, which follow `length` tokens of `what`, hold NO_TOKEN."""
    if NO_TOKEN in token_ids:
        raise not_finite(target, what, length + list(token_ids).index(NO_TOKEN))


def not_finite(target: Target, what: str, length: int) -> NotFinite:
    """Returns the error for logits after `length` tokens of `what`, a prompt and its answer."""
    where = f"the logits of {what} after {length} tokens"
    return NotFinite(f"{where} hold NaN or infinity: {_cause(target)}")


def _cause(target: Target) -> str:
    """Names the first stored tensors whose array is not finite, else the likely overflow."""
    if not sharding.spans_processes(sharding.mesh_of(target.params)):  # all would have to check
        for path, packing in convert.target_table(target.config).items():
            leaves = jax.tree.leaves(convert.leaf_at(target.params, path))
            if not all(bool(_is_finite(leaf)) for leaf in leaves):
                names = " + ".join(packing.names)
                model = public_name(target.folder)  # error messages of a server hide paths
                return f"{names} of {model} holds such values, so fetch the model again"
    dtype = target.params["embed"].dtype
    wider = "load it with dtype float32" if dtype != jnp.float32 else "check the weights"
    return f"the target's activations overflow in {dtype}, so {wider}"


@jax.jit
def _is_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()
