"""Parses XLA's optimised program text: kernels, large copies and collectives.

`cost_analysis()` of a compiled program counts the body of a loop once and has no phases, so this
module counts kernels.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

LARGE = 2 * 1024**2  # bytes

MOVES = {"copy", "slice", "dynamic-slice", "concatenate", "transpose", "pad"}
# These return the same array, possibly with another dtype or shape.
SEEN_THROUGH = {"bitcast", "reshape", "convert", "dynamic-update-slice"}
FOLLOWED = {"while", "conditional", "call", "async-start", "fusion-start"}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
FREE |= {"optimization-barrier"}
COPIED = {"copy-done", "slice-done"}  # at the end of an asynchronous copy its shape is known
PRODUCTS = {"dot", "convolution", "dot_general", "pallas_call"}  # in HLO, and in labels by jax
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # index of the operand with the new part
COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"}
COLLECTIVES |= {"collective-permute", "collective-broadcast"}

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^}]*?(S\([1-4]\))?\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLING = r"calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
_CALLED = re.compile(rf"(?:{_CALLING})=(%[\w.\-]+|\{{[^}}]*\}})")
_LABEL = re.compile(r'op_name="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_NO_KERNEL = re.compile(r'custom_call_target="(?:ConcatBitcast|AllocateBuffer)"')
_CONDITION, _BODY = re.compile(r"\bcondition=%([\w.\-]+)"), re.compile(r"\bbody=%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class HloArray(NamedTuple):
    """One array of an HLO shape."""

    dtype: str  # bf16, f32, s32, pred, ...
    dims: tuple[int, ...]
    size: int  # bytes
    on_chip: bool  # in the chip's fast memory, S(1) in libtpu's text


class Instruction(NamedTuple):
    """One instruction of a computation."""

    is_root: str | None  # "ROOT " for the result of the computation
    name: str
    shape: str  # of the result
    opcode: str
    arguments: str  # text between the parentheses
    attributes: str  # text after the parentheses

    @property
    def arrays(self) -> list[HloArray]:
        """The result arrays."""
        return arrays(self.shape)

    @property
    def size(self) -> int:
        """Bytes of the result; for a tuple, of its largest array."""
        return max((each.size for each in self.arrays), default=0)

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.arguments)

    @property
    def called(self) -> list[str]:
        """Names of the called computations."""
        return _NAME.findall(" ".join(_CALLED.findall(self.attributes)))

    @property
    def label(self) -> str:
        """Named scopes and the jax primitive of the instruction's origin."""
        return attribute(_LABEL, self)


Computation = dict[str, Instruction]
Program = dict[str, Computation]
ENTRY = ""  # second name of the entry computation


@functools.lru_cache(maxsize=2)
def parse(text: str) -> Program:
    """The computations of a module by name; a computation maps names to instructions."""
    program: Program = {}
    current: Computation = {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = program[header[2]] = {}
            if header[1]:
                program[ENTRY] = current
        elif found := _INSTRUCTION.match(line):
            current[found[2]] = Instruction(*found.groups())
    return program


def arrays(shape: str) -> list[HloArray]:
    """All arrays of a shape, which may be a tuple."""
    found = []
    for dtype, bits, dims, on_chip in _ARRAY.findall(shape):
        sides = tuple(int(side) for side in dims.split(",") if side)
        size = math.prod(sides) * (8 if dtype == "pred" else int(bits)) // 8
        found.append(HloArray(dtype, sides, size, bool(on_chip)))
    return found


def attribute(key: re.Pattern[str], instruction: Instruction) -> str:
    """The value of an instruction's attribute, or "" if missing."""
    found = key.search(instruction.attributes)
    return found[1] if found else ""


def _root(computation: Computation) -> Instruction:
    return next(each for each in computation.values() if each.is_root)


def _results(fused: Computation) -> list[Instruction]:
    """The instructions whose values a fusion returns."""
    root = _root(fused)
    return [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]


# ---- executed instructions ----------------------------------------------------------------


def executed(
    program: Program, name: str = ENTRY, times: int = 1, in_loop: bool = False
) -> Iterator[tuple[Computation, Instruction, int, bool]]:
    """Yields holder, instruction, number of runs and `in_loop` of all that a program runs.

    A fusion is one instruction.
    A loop's body counts once per iteration, and once if their number is unknown; all branches of a
    conditional count.
    """
    at = program[name]
    for each in at.values():
        yield at, each, times, in_loop
        is_loop = each.opcode == "while"
        count = (trip_count(program, at, each) or 1) if is_loop else 1
        for inner in each.called if each.opcode in FOLLOWED else ():
            yield from executed(program, inner, times * count, in_loop or is_loop)


def trip_count(program: Program, at: Computation, loop: Instruction) -> int | None:
    """Number of iterations of a loop; None if the program does not show it.

    XLA states the trip count of some loops. libtpu's loops count from one constant to another.
    """
    if known := attribute(_TRIPS, loop):
        return int(known)
    condition, body = (program[attribute(key, loop)] for key in (_CONDITION, _BODY))
    test, after, start = _root(condition), _root(body), at[loop.operands[0]]
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, limit = (condition[name] for name in test.operands)
    if counter.opcode != "get-tuple-element" or {start.opcode, after.opcode} != {"tuple"}:
        return None
    index = int(attribute(_INDEX, counter))
    step, first = body[after.operands[index]], at[start.operands[index]]
    while first.opcode == "copy":
        first = at[first.operands[0]]
    strides = [body[name] for name in step.operands if body[name].opcode == "constant"]
    if step.opcode != "add" or len(strides) != 1 or {first.opcode, limit.opcode} != {"constant"}:
        return None
    return -(-(int(limit.arguments) - int(first.arguments)) // int(strides[0].arguments))


# ---- kernels ------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A kernel or a memory copy."""

    label: str
    times: int
    in_loop: bool
    is_product: bool  # a matrix product or a Pallas kernel, which `lowering.products` has too
    written: int  # bytes per run; a slice or an in-place update counts only its part


def kernels(text: str) -> list[Kernel]:
    """The kernels that a program runs, without collectives; `times` as in `executed`.

    A kernel without a label gets the label of its first labelled inner instruction, or of the
    next kernel.
    """
    program, label, found = parse(text), "", []
    for at, each, times, in_loop in reversed([*executed(program)]):
        if not _is_kernel(each):
            continue
        fused = program[each.called[0]] if each.opcode == "fusion" else {}
        label = each.label or next((one.label for one in fused.values() if one.label), label)
        kinds = {each.opcode, *(one.opcode for one in fused.values())}
        if each.opcode in ("custom-call", "fusion"):  # a copy may have a kernel's label
            kinds.add(each.label.rpartition("/")[2])
        is_product = bool(kinds & PRODUCTS)
        found.append(Kernel(label, times, in_loop, is_product, _written(fused or at, each)))
    return found[::-1]


def _is_kernel(each: Instruction) -> bool:
    if each.opcode.endswith(("-start", "-done")):
        return each.opcode in COPIED
    free = each.opcode in FREE | FOLLOWED | COLLECTIVES
    return not (free or _NO_KERNEL.search(each.attributes))


def _written(at: Computation, each: Instruction) -> int:
    """Bytes that a kernel writes to memory; `at` is the fused computation of a fusion."""
    total = 0
    results = _results(at) if each.opcode == "fusion" else [each] * len(each.arrays)
    for result, array in zip(results, each.arrays, strict=False):
        while each.opcode == "fusion" and result.opcode in ("bitcast", "reshape"):
            result = at[result.operands[0]]
        size = array.size
        if result.opcode in UPDATES:
            size = at[result.operands[UPDATES[result.opcode]]].size
        total += 0 if array.on_chip else size
    return total


# ---- large copies -------------------------------------------------------------------------


class Move(NamedTuple):
    """A large array that an instruction only moves or casts."""

    name: str  # of the instruction or its fusion
    opcode: str
    bytes: int
    label: str
    times: int = 1


def large_moves(text: str, at_least_bytes: int = LARGE) -> list[Move]:
    """All moves in loops with a result of `at_least_bytes` or more.

    A fusion counts if its last operation is a move; a move inside a fusion is never stored. An
    in-place update does not count, but a copy made for the update does.
    """
    program = parse(text)
    return [
        Move(each.name, opcode, size, each.label, times)
        for at, each, times, in_loop in executed(program)
        for opcode, size in _moved(program, at, each)
        if in_loop and size >= at_least_bytes
    ]


def _moved(program: Program, at: Computation, each: Instruction) -> Iterator[tuple[str, int]]:
    """Yields opcode and bytes of the arrays that an instruction only moves or casts.

    Arrays that a TPU's compiler prefetches into on-chip memory do not count. A cast counts only
    for arguments of the computation, which are weights and caches.
    """
    fused = program[each.called[0]] if each.opcode == "fusion" else {}
    for result in _results(fused) if fused else [each]:
        casts, value = False, result
        while fused and value.opcode in SEEN_THROUGH:
            casts |= value.opcode == "convert"
            value = fused[value.operands[0]]
        opcode = value.opcode.removesuffix("-done")
        if all(array.on_chip for array in value.arrays):
            continue
        if opcode in MOVES:
            yield opcode, value.size
        elif casts and opcode == "parameter":
            source = at[each.operands[int(value.arguments)]]
            while source.opcode in ("bitcast", "get-tuple-element"):
                source = at[source.operands[0]]
            if source.opcode == "parameter":
                yield "convert", result.size


# ---- collectives --------------------------------------------------------------------------


def collectives(text: str, in_loop: bool = False) -> dict[str, dict[str, int]]:
    """Number of collectives by kind and the bytes received per chip, or only those of loops.

    A loop of unknown length counts once.

    If libtpu overlaps a collective with other work, several fusions hold parts of the collective.
    These parts share a channel, and only the part with the fewest runs counts.
    """
    program = parse(text)
    found: dict[str, tuple[int, str, int]] = {}  # by channel: runs, kind, bytes of a run
    for at, each, times, is_looped in executed(program):
        if in_loop and not is_looped:
            continue
        for channel, kind, size in _sent(program, at, each):
            if channel not in found or times < found[channel][0]:
                found[channel] = times, kind, size
    totals: dict[str, dict[str, int]] = {}
    for times, kind, size in found.values():
        total = totals.setdefault(kind, {"count": 0, "bytes": 0})
        total["count"] += times
        total["bytes"] += times * size
    return totals


def _sent(program: Program, at: Computation, each: Instruction) -> Iterator[tuple[str, str, int]]:
    """Yields channel, kind and received bytes of the collectives in an instruction or fusion."""
    kind = each.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        channel = attribute(_CHANNEL, each) or f"{id(at)} {each.name}"
        yield channel, kind, _received(at, each, kind)
    elif each.opcode in ("fusion", "async-start"):
        fused = program[each.called[0]]
        for inner in fused.values():
            for channel, kind, size in _sent(program, fused, inner):
                # libtpu's reduce-scatter: an all-reduce fused with a slice
                if kind == "all-reduce" and each.called[0].startswith("all-reduce-scatter"):
                    kind, size = "reduce-scatter", size - _held(each.shape)
                yield channel, kind, size


def _received(at: Computation, each: Instruction, kind: str) -> int:
    """Least bytes that every chip of a collective receives.

    A ring of n >= 2 chips transfers (n - 1) / n of a gathered or scattered array, and twice that
    share of a summed array.
    """
    sent, result = sum(_held(at[name].shape) for name in each.operands), _held(each.shape)
    if kind in ("all-gather", "reduce-scatter"):
        is_start = each.opcode.endswith("-start")  # the result of -start also holds the operands
        return abs(result - sent - sent * is_start)
    return sent // 2 if kind.endswith("all-to-all") else sent


def _held(shape: str) -> int:
    """Bytes of all arrays in a shape."""
    return sum(each.size for each in arrays(shape))
