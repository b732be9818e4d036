"""What Pallas kernels declare that they cost: `cost_estimate` of every `pallas_call` of a trace.

Compilers know nothing of what a kernel does inside, and the optimised program for a GPU does not
keep what was declared. So it is read off the traced program, and found again by the kernel's
name and the shapes of its operands and results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moa_jax.training.flops import programs_in

Dims = tuple[tuple[int, ...], ...]  # of all operands, then of all results


class Cost(NamedTuple):
    """One run of a kernel on arrays whose every row is used."""

    flops: int
    size: int  # bytes read and written


Declared = dict[tuple[str, Dims], Cost | None]  # None: the kernel does not say


def declared(jaxpr: Any) -> Declared:
    """The declared costs of all kernels of a traced program, whatever they are nested in."""
    found: Declared = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            dims = tuple(tuple(each.aval.shape) for each in (*eqn.invars, *eqn.outvars))
            cost = eqn.params["cost_estimate"]
            found[eqn.params["name"], dims] = cost and Cost(cost.flops, cost.bytes_accessed)
        else:
            for inner in programs_in(eqn.params):
                found |= declared(inner)
    return found
