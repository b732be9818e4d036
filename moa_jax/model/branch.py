"""A branch that does not copy caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def when(wanted: jax.Array, function: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`function(carry)` if `wanted`, else `carry` itself.

    It is a loop of at most one turn: XLA updates what a loop carries in place, but copies what
    the branches of a conditional share.
    """

    def once(pair: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return jnp.array(False), function(pair[1])

    return lax.while_loop(lambda pair: pair[0], once, (wanted, carry))[1]
