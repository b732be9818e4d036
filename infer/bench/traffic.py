"""The bytes that a phase must read, derived from its program, and the device's copy bandwidth.

Decoding is bound by memory: a round reads each of its weights once, and the rows of caches. Caches
count at their allocated size, because the rows that a kernel or a CPU skips depend on the
sequences. Arithmetic on the new tokens and writes of their rows are comparatively cheap and are not
counted.

Bandwidth is measured by a copy, not taken from a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moa_jax.model.experts import EXPERTS

IN_PLACE = ("dynamic_update_slice", "scatter")  # write rows and pass on the rest
SEEN_THROUGH = ("reshape",)  # returns the same array
ROWS_ONLY = ("gather",)  # reads a few rows, as of an embedding: not counted, except for experts
PARTS = ("slice", "dynamic_slice")  # return a part, which counts where it is read
COPY_BYTES = {"cpu": 256 << 20}
COPY_BYTES_ELSEWHERE = 2 << 30
COPIES = 8


def bytes_read(function: Callable[..., Any], held: Any, *rest: Any) -> int:
    """Bytes of the arrays in `held` that `function(held, *rest)` reads.

    An array counts once per operation that takes it: a drafter that predicts three levels reads
    its head three times. The most expensive branch of a conditional counts.
    """
    jaxpr = jax.make_jaxpr(function)(held, *rest).jaxpr
    leaves = jax.tree.leaves(held)
    sizes = {id(var): _size(leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=False)}
    return _read(jaxpr, sizes)


def _read(jaxpr: Any, sizes: dict[int, int]) -> int:
    """Bytes read of the variables in `sizes`; adds their aliases to `sizes`."""
    total = 0
    for eqn in jaxpr.eqns:
        name, bodies = eqn.primitive.name, _bodies(eqn)
        operands = sum(sizes.get(id(var), 0) for var in eqn.invars)
        if bodies:  # a conditional counts its most expensive branch, a scan every iteration
            costs = [_read_body(eqn, body, sizes) for body in bodies]
            total += max(costs) * eqn.params.get("length", 1)
        elif name == "pallas_call":
            total += operands
            for old, new in eqn.params["input_output_aliases"]:
                _rename(sizes, sizes, [eqn.invars[old]], [eqn.outvars[new]])
        elif name in IN_PLACE + SEEN_THROUGH:
            _rename(sizes, sizes, eqn.invars[:1], eqn.outvars)
        elif name in PARTS:
            sizes |= {id(v): _size(v.aval) for v in eqn.outvars if id(eqn.invars[0]) in sizes}
        elif name == "gather" and EXPERTS in str(eqn.source_info.name_stack):
            total += _size(eqn.outvars[0].aval)
        elif name not in ROWS_ONLY:
            total += operands
    return total


def _read_body(eqn: Any, body: Any, sizes: dict[int, int]) -> int:
    """Bytes that one run of an operation's inner program reads."""
    operands, inside = eqn.invars[len(eqn.invars) - len(body.invars) :], {}
    _rename(sizes, inside, operands, body.invars)
    for array, var in zip(operands, body.invars, strict=True):
        if id(var) in inside and array.aval.shape != var.aval.shape:
            inside[id(var)] = _size(var.aval)  # the scan slices this array
    cost = _read(body, inside)
    _rename(inside, sizes, body.outvars, eqn.outvars)
    return cost


def _bodies(eqn: Any) -> list[Any]:
    """The inner programs of an operation: branches of a conditional, the body of a call or scan.

    Programs inside a Pallas kernel are ignored.
    """
    if eqn.primitive.name == "pallas_call":
        return []
    inside = [eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params]
    return [getattr(body, "jaxpr", body) for body in eqn.params.get("branches") or inside]


def _rename(
    sizes: dict[int, int], into: dict[int, int], old: Sequence[Any], new: Sequence[Any]
) -> None:
    pairs = zip(old, new, strict=True)
    into |= {id(there): sizes[id(here)] for here, there in pairs if id(here) in sizes}


def _size(array: Any) -> int:
    return array.size * array.dtype.itemsize


def copy_bandwidth(size: int | None = None) -> float:
    """Bytes/s of the default device: the best of COPIES passes that read and write `size` bytes.

    Operations that only read may be faster, so a share of this bandwidth can exceed 1.
    """
    size = size or COPY_BYTES.get(jax.default_backend(), COPY_BYTES_ELSEWHERE)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: no new pages to map
    x = jax.block_until_ready(step(jnp.zeros(size // 4, jnp.int32)))
    seconds = []
    for _ in range(COPIES):
        begin = time.perf_counter()
        x = jax.block_until_ready(step(x))
        seconds.append(time.perf_counter() - begin)
    return 2 * size / min(seconds)
