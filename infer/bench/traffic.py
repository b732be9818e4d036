"""Bytes that a phase must read, taken from the program itself, and how fast this device copies.

Decoding is bound by memory: a round reads every weight it uses once and the rows of caches.
Caches count whole, as they are allocated: how many rows a kernel, or a CPU with several long texts,
leaves out depends on the texts. Arithmetic on the new tokens, and their rows
that are written, are small beside that and not counted.

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
        if bodies:
            costs = []
            for body in bodies:
                operands = eqn.invars[-len(body.invars) :] if body.invars else []
                inside = _renamed(sizes, operands, body.invars)
                if name == "scan":  # of the arrays it goes along, each turn gets a part
                    pairs = zip(operands, body.invars, strict=True)
                    parts = [each for array, each in pairs if array.aval.shape != each.aval.shape]
                    parts = [each for each in parts if id(each) in inside]
                    inside |= {id(part): _size(part.aval) for part in parts}
                costs.append(_read(body, inside))
                sizes |= _renamed(inside, body.outvars, eqn.outvars)
            total += max(costs) * eqn.params.get("length", 1)  # of a scan
        elif name == "pallas_call":
            total += sum(sizes.get(id(var), 0) for var in eqn.invars)
            taken_over = eqn.params["input_output_aliases"]
            old, new = ([pair[i] for pair in taken_over] for i in (0, 1))
            pick = lambda variables, places: [variables[place] for place in places]
            sizes |= _renamed(sizes, pick(eqn.invars, old), pick(eqn.outvars, new))
        elif name in IN_PLACE + SEEN_THROUGH:
            sizes |= _renamed(sizes, eqn.invars[:1], eqn.outvars)
        elif name in PARTS:
            sizes |= {id(v): _size(v.aval) for v in eqn.outvars if id(eqn.invars[0]) in sizes}
        elif name not in ROWS_ONLY:
            total += sum(sizes.get(id(var), 0) for var in eqn.invars)
    return total


def _bodies(eqn: Any) -> list[Any]:
    """The programs inside an operation: branches of a conditional, the body of a call.

    What is inside a kernel is its own business.
    """
    if eqn.primitive.name == "pallas_call":
        return []
    found = eqn.params.get("branches") or [
        eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params
    ]
    return [getattr(body, "jaxpr", body) for body in found]


def _renamed(sizes: dict[int, int], old: Sequence[Any], new: Sequence[Any]) -> dict[int, int]:
    pairs = zip(old, new, strict=True)
    return {id(there): sizes[id(here)] for here, there in pairs if id(here) in sizes}


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
