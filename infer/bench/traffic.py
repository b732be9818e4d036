"""Bytes that a phase must read, taken from the program itself, and how fast this device copies.

Decoding is bound by memory: a round reads every weight it uses once and the rows of caches.
Caches count whole, as they are allocated: the rows that a kernel or a CPU leaves out depend on the
sequences. Arithmetic on the new tokens, and their rows that are written, are small beside that and
not counted.

Bandwidth is measured, by a copy, and not taken from a data sheet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

IN_PLACE = ("dynamic_update_slice", "scatter")  # write rows; the rest is only passed on
SEEN_THROUGH = ("reshape",)  # gives the same array
ROWS_ONLY = ("gather",)  # read rows, as of an embedding: not counted
PARTS = ("slice", "dynamic_slice")  # give a part, which is counted where it is read
COPY_BYTES = {"cpu": 256 << 20}
COPY_BYTES_ELSEWHERE = 2 << 30
COPIES = 8


def bytes_read(function: Callable[..., Any], held: Any, *rest: Any) -> int:
    """Bytes of the arrays in `held` that `function(held, *rest)` reads.

    An array counts once for every operation that takes it: a drafter that predicts three
    levels reads its head three times. Of a conditional the costliest branch counts.
    """
    jaxpr = jax.make_jaxpr(function)(held, *rest).jaxpr
    leaves = jax.tree.leaves(held)
    sizes = {id(var): _size(leaf) for var, leaf in zip(jaxpr.invars, leaves, strict=False)}
    return _read(jaxpr, sizes)


def _read(jaxpr: Any, sizes: dict[int, int]) -> int:
    """Bytes read of the variables in `sizes`, which gains the names under which they go on."""
    total = 0
    for eqn in jaxpr.eqns:
        name, bodies = eqn.primitive.name, _bodies(eqn)
        operands = sum(sizes.get(id(var), 0) for var in eqn.invars)
        if bodies:  # of a conditional the costliest branch counts, of a scan each turn
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
        elif name not in ROWS_ONLY:
            total += operands
    return total


def _read_body(eqn: Any, body: Any, sizes: dict[int, int]) -> int:
    """Bytes that one turn of a program inside an operation reads."""
    operands, inside = eqn.invars[len(eqn.invars) - len(body.invars) :], {}
    _rename(sizes, inside, operands, body.invars)
    for array, var in zip(operands, body.invars, strict=True):
        if id(var) in inside and array.aval.shape != var.aval.shape:
            inside[id(var)] = _size(var.aval)  # a scan goes along this array
    cost = _read(body, inside)
    _rename(inside, sizes, body.outvars, eqn.outvars)
    return cost


def _bodies(eqn: Any) -> list[Any]:
    """The programs inside an operation: branches of a conditional, the body of a call or scan.

    Those inside a kernel are not looked at.
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
    """Bytes/s of the default device: the best of several passes that read and write `size` bytes.

    Sums that only read may go faster, so a share of this bandwidth can exceed 1.
    """
    size = size or COPY_BYTES.get(jax.default_backend(), COPY_BYTES_ELSEWHERE)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: no pages to be fetched anew
    x = jax.block_until_ready(step(jnp.zeros(size // 4, jnp.int32)))
    seconds = []
    for _ in range(COPIES):
        begin = time.perf_counter()
        x = jax.block_until_ready(step(x))
        seconds.append(time.perf_counter() - begin)
    return 2 * size / min(seconds)
