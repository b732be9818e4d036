"""Matrix products in an optimised program, whatever an accelerator's compiler made of them.

    GPUs    `dot`, most of them within fusions; calls of cuBLAS
    TPUs    `convolution`
    both    for a single token also a multiplication whose results are summed

A multiplication and its addition are two operations.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from moa_jax.aot import hlo
from moa_jax.aot.hlo import Computation, Instruction

_CALL_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([\d,"]*)\]')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABEL = "dot_general"  # of what jax traced as a product
_SEEN_THROUGH = {"convert", "bitcast", "reshape", "copy"}
_CUBLAS = re.compile(r'custom_call_target="__cublas')
_AXES = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")


class Product(NamedTuple):
    """One matrix product."""

    flops: int
    is_float32: bool  # both of its operands are


def products(computations: dict[str, Computation], at: str, each: Instruction) -> Iterator[Product]:
    """The matrix products that an instruction of computation `at` runs."""
    where = computations[at]
    if each.opcode == "fusion":
        for name in each.called:
            for inner in computations[name].values():
                yield from products(computations, name, inner)
        return
    terms = _terms(where, each)
    if terms is not None:
        kinds = {hlo.arrays(where[name].shape)[0].dtype for name in each.operands[:2]}
        yield Product(2 * terms, kinds == {"f32"})


def _terms(where: Computation, each: Instruction) -> int | None:
    """Multiplications of an instruction, None if it is no matrix product."""
    if each.opcode == "dot":
        return _count(each) * _contracted(where, each, _CONTRACTED)
    if each.opcode == "custom-call" and _CUBLAS.search(each.attributes):
        return _count(each) * _contracted(where, each, _CALL_CONTRACTED)
    if each.opcode == "convolution":
        return _convolved(where, each)
    if each.opcode in ("multiply", "reduce") and each.label.endswith(_LABEL):
        return _multiplied(where, each)
    return None


def _multiplied(where: Computation, each: Instruction) -> int | None:
    """Elements of a multiplication, or of one that this sum is of and that has no such label."""
    if each.opcode == "multiply":
        return _count(each)
    summed = where[each.operands[0]]
    while summed.opcode in _SEEN_THROUGH:
        summed = where[summed.operands[0]]
    is_new = summed.opcode == "multiply" and not summed.label.endswith(_LABEL)
    return _count(summed) if is_new else None


def _contracted(where: Computation, each: Instruction, key: re.Pattern[str]) -> int:
    dims = hlo.arrays(where[each.operands[0]].shape)[0].dims
    axes = hlo.attribute(key, each).replace('"', "")
    return math.prod(dims[int(axis)] for axis in axes.split(",") if axis)


def _convolved(where: Computation, each: Instruction) -> int:
    """Multiplications of a convolution; places of its window in padding or in holes have none.

    libtpu writes a batch of products, or heads, as axes of a window that meets each once.
    """
    given, taken, made = _AXES.search(each.attributes).groups()
    lhs, kernel = (hlo.arrays(where[name].shape)[0].dims for name in each.operands[:2])
    out = hlo.arrays(each.shape)[0].dims
    terms = kernel[taken.index("i")]
    terms *= math.prod(size for size, axis in zip(out, made, strict=True) if not axis.isdigit())
    window = dict(part.split("=") for part in hlo.attribute(_WINDOW, each).split())
    for axis in filter(str.isdigit, made):
        sizes = (lhs[given.index(axis)], kernel[taken.index(axis)], out[made.index(axis)])
        stride, hole, spread = (
            int(window[key].split("x")[int(axis)]) if key in window else 1
            for key in ("stride", "lhs_dilate", "rhs_dilate")
        )
        pad = window["pad"].split("x")[int(axis)] if "pad" in window else "0_0"
        terms *= _meetings(*sizes, stride, hole, spread, int(pad.split("_")[0]))
    return terms


@functools.cache
def _meetings(
    length: int, size: int, places: int, stride: int, hole: int, spread: int, pad: int
) -> int:
    """How often a window of `size`, at `places`, meets one of `length` elements, `hole` apart."""
    starts = (place * stride - pad for place in range(places))
    at = (start + tap * spread for start in starts for tap in range(size))
    return sum(0 <= index < length * hole and index % hole == 0 for index in at)


def _count(each: Instruction) -> int:
    return hlo.arrays(each.shape)[0].count
