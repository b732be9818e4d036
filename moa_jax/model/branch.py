"""A branch that leaves caches where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def when(wanted: jax.Array, function: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`function(carry)` if `wanted`, else `carry` as it is.

    A loop of no or one turn: XLA updates what a loop carries in place, and copies what the
    branches of a conditional share.
    """

    def once(pair: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return jnp.array(False), function(pair[1])

    return lax.while_loop(lambda pair: pair[0], once, (wanted, carry))[1]
