"""Parses XLA's optimised program text: kernels, bytes, large copies and collectives.

`cost_analysis()` of a compiled program counts the body of a loop once and has no phases, so this
module counts kernels. A kernel reads its operands and writes its results; a slice or an in-place
update counts only its part.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

LARGE = 2 * 1024**2  # bytes

MOVES = {"copy", "slice", "dynamic-slice", "concatenate", "transpose", "pad"}
# These return the same array, possibly with another dtype or shape.
SEEN_THROUGH = {"bitcast", "reshape", "convert", "dynamic-update-slice"}
FOLLOWED = {"while", "conditional", "call", "async-start", "fusion-start"}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
FREE |= {"optimization-barrier"}
SLICES = {"slice", "dynamic-slice", "gather", "slice-start"}
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # index of the operand with the new part
COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"}
COLLECTIVES |= {"collective-permute", "collective-broadcast"}

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^}]*?(S\([1-4]\))?\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(%[\w.\-]+|\{[^}]*\})"
)
_LABEL = re.compile(r'op_name="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_PALLAS = re.compile(
    r'"(?:__gpu\$xla\.gpu\.triton|tpu_custom_call)".*op_name="[^"]*/(\w+)/pallas_call"'
)
_NO_KERNEL = re.compile(r'custom_call_target="(?:ConcatBitcast|AllocateBuffer)"')
_CONDITION, _BODY = re.compile(r"\bcondition=%([\w.\-]+)"), re.compile(r"\bbody=%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_AXES = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_BATCH = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')

Dims = tuple[int, ...]


class HloArray(NamedTuple):
    """One array of an HLO shape."""

    dtype: str  # bf16, f32, s32, pred, ...
    dims: Dims
    size: int  # bytes
    on_chip: bool  # in the chip's fast memory, S(1) in libtpu's text

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)


class Instruction(NamedTuple):
    """One instruction of a computation."""

    name: str
    opcode: str
    shape: str  # of the result
    arguments: str  # text between the parentheses
    attributes: str  # text after the parentheses
    is_root: bool

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
            root, name, shape, opcode, arguments, attributes = found.groups()
            current[name] = Instruction(name, opcode, shape, arguments, attributes, bool(root))
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


Executed = tuple[Computation, Instruction, int, bool]  # holder, instruction, runs, in a loop


def executed(
    program: Program, trips: int = 1, name: str = ENTRY, times: int = 1, in_loop: bool = False
) -> Iterator[Executed]:
    """Yields the instructions that a program runs; a fusion is one instruction.

    A loop's body counts once per iteration (`trips` times for an unknown length); all branches of a
    conditional count.
    """
    at = program[name]
    for each in at.values():
        yield at, each, times, in_loop
        is_loop, count = each.opcode == "while", 1
        if is_loop:
            count = trip_count(program, at, each) or trips
        for inner in each.called if each.opcode in FOLLOWED else ():
            yield from executed(program, trips, inner, times * count, in_loop or is_loop)


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


def unknown_loops(text: str) -> int:
    """Number of loops with an unknown trip count."""
    program = parse(text)
    loops = ((at, each) for at, each, *_ in executed(program) if each.opcode == "while")
    return sum(trip_count(program, at, each) is None for at, each in loops)


# ---- kernels ------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A kernel or a memory copy; figures are per run."""

    label: str
    times: int
    in_loop: bool
    bytes: int  # read and written
    flops: int  # of matrix products
    dims: tuple[Dims, ...]  # of operands and results
    pallas: str  # name of a Pallas kernel, "" for other kernels


def kernels(text: str, trips: int = 1) -> list[Kernel]:
    """The kernels that a program runs, without collectives; `trips` as in `executed`.

    A kernel without a label gets the label of its first labelled inner instruction, or of the
    next kernel.
    """
    program, label, found = parse(text), "", []
    for at, each, times, in_loop in reversed([*executed(program, trips)]):
        if not _is_kernel(each):
            continue
        fused = program[each.called[0]] if each.opcode == "fusion" else {}
        label = each.label or next((one.label for one in fused.values() if one.label), label)
        size = _read(program, at, each) + _written(fused or at, each)
        flops = _flops(fused or at, fused.values() or [each], label)
        shapes = [array.dims for name in each.operands for array in at[name].arrays]
        dims = (*shapes, *(array.dims for array in each.arrays))
        pallas = attribute(_PALLAS, each)
        found.append(Kernel(label, times, in_loop, size, flops, dims, pallas))
    return found[::-1]


def _is_kernel(each: Instruction) -> bool:
    is_free = each.opcode in FREE | FOLLOWED or each.opcode.endswith("-done")
    is_collective = each.opcode.removesuffix("-start") in COLLECTIVES
    return not (is_free or is_collective or _NO_KERNEL.search(each.attributes))


def _read(program: Program, at: Computation, each: Instruction) -> int:
    """Bytes that a kernel reads from memory."""
    total = 0
    for index, name in enumerate(each.operands):
        for array in at[name].arrays:
            if array.on_chip:
                continue
            if each.opcode == "fusion":
                fused = program[each.called[0]]
                total += _used(program, fused, _parameter(fused, index), array.size, array.size)
            elif each.opcode in SLICES and index == 0:
                total += min(array.size, _given(each)[0].size)
            elif each.opcode not in UPDATES or index:
                total += array.size
    return total


def _used(program: Program, fused: Computation, name: str, whole: int, result: int) -> int:
    """Bytes that a fusion reads of a value of `whole` bytes; `result` if it returns the value.

    A slice reads only its part, and an in-place update reads nothing.
    """
    if fused[name].is_root:
        return result
    total = 0
    for user, index in _users(fused, name):
        if user.opcode == "tuple":
            total += result
        elif user.opcode in SLICES and index == 0:
            total += user.size
        elif user.opcode in UPDATES and index == 0:
            total += _used(program, fused, user.name, whole, 0)
        elif user.opcode in ("bitcast", "reshape", "convert", "copy"):
            total += _used(program, fused, user.name, whole, result)
        elif user.opcode == "fusion":
            inner = program[user.called[0]]
            total += _used(program, inner, _parameter(inner, index), whole, whole)
        else:
            return whole
    return min(total, whole)


def _users(fused: Computation, name: str) -> list[tuple[Instruction, int]]:
    """The instructions that use a value, with the operand's index."""
    every = ((user, index) for user in fused.values() for index in range(len(user.operands)))
    return [(user, index) for user, index in every if user.operands[index] == name]


def _parameter(fused: Computation, index: int) -> str:
    named = (each for each in fused.values() if each.opcode == "parameter")
    return next(each.name for each in named if each.arguments == str(index))


def _written(at: Computation, each: Instruction) -> int:
    """Bytes that a kernel writes to memory; `at` is the fused computation of a fusion."""
    total = 0
    results = _results(at) if each.opcode == "fusion" else [each] * len(each.arrays)
    for result, array in zip(results, _given(each), strict=False):
        while each.opcode == "fusion" and result.opcode in ("bitcast", "reshape"):
            result = at[result.operands[0]]
        size = array.size
        if result.opcode in UPDATES:
            size = at[result.operands[UPDATES[result.opcode]]].size
        total += 0 if array.on_chip else size
    return total


def _given(each: Instruction) -> list[HloArray]:
    """The arrays that an instruction writes; the result of copy-start also lists its source."""
    place = {"copy-start": 0, "slice-start": 1}.get(each.opcode)
    return each.arrays if place is None else each.arrays[place : place + 1]


def _flops(at: Computation, instructions: Iterable[Instruction], label: str) -> int:
    """FLOPs of the matrix products among a kernel's instructions.

    The product of the sizes of the operands, B x M x K and B x K x N, and of the result, B x M x N,
    is (B x M x K x N)^2 x B. A product of one row may be a multiplication followed by a sum.
    """
    found = summed = 0
    for each in instructions:
        if each.opcode in ("dot", "convolution") or "__cublas" in each.attributes:
            operands = [at[name] for name in each.operands[:2]]
            dims = [operand.arrays[0].dims for operand in (*operands, each)]
            found += 2 * math.isqrt(math.prod(map(math.prod, dims)) // _batch(each, dims))
        elif each.opcode == "multiply":
            summed = max(summed, 2 * each.arrays[0].count)
    return found or summed * label.endswith("dot_general")


def _batch(each: Instruction, dims: list[Dims]) -> int:
    """Batch size of a batched product; libtpu encodes batch axes as window axes."""
    if labels := _AXES.search(each.attributes):
        sizes = [dict(zip(*axes, strict=True)) for axes in zip(labels.groups(), dims, strict=True)]
        windows = [[size[axis] for size in sizes] for axis in sizes[0] if axis.isdigit()]
        return math.prod(window[0] for window in windows if len({*window}) == 1)
    axes = attribute(_BATCH, each).replace('"', "").split(",")
    return math.prod(dims[0][int(axis)] for axis in axes if axis)


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
    in-place update does not count, but a copy made for the update does. Raises ValueError for a
    program without a loop.
    """
    program = parse(text)
    if not (found := [each for each in executed(program) if each[-1]]):
        raise ValueError("the program has no loop")
    return [
        Move(each.name, opcode, size, each.label, times)
        for at, each, times, _ in found
        for opcode, size in _moved(program, at, each)
        if size >= at_least_bytes
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


class Collective(NamedTuple):
    """One collective of a program."""

    kind: str
    times: int
    received: int  # least bytes received per chip and run; the group's size is unknown
    is_async: bool  # overlaps with other work


def collectives(text: str, in_loop: bool = False) -> list[Collective]:
    """The collectives of a program, or only of its loops; a loop of unknown length counts once.

    If libtpu overlaps a collective with other work, several fusions hold parts of the collective.
    These parts share a channel, and only the part with the fewest runs counts.
    """
    program = parse(text)
    found: dict[str, Collective] = {}
    for at, each, times, is_looped in executed(program):
        if in_loop and not is_looped:
            continue
        for channel, kind, size, is_async in _sent(program, at, each):
            if channel not in found or times < found[channel].times:
                found[channel] = Collective(kind, times, size, is_async)
    return list(found.values())


def by_kind(found: Iterable[Collective]) -> dict[str, dict[str, int]]:
    """Number of collectives by kind, and the bytes received per chip."""
    totals: dict[str, dict[str, int]] = {}
    for each in found:
        total = totals.setdefault(each.kind, {"count": 0, "bytes": 0})
        total["count"] += each.times
        total["bytes"] += each.times * each.received
    return totals


def _sent(
    program: Program, at: Computation, each: Instruction
) -> Iterator[tuple[str, str, int, bool]]:
    """Yields channel, kind, bytes and `is_async` of the collectives in an instruction or fusion."""
    kind = each.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        channel = attribute(_CHANNEL, each) or f"{id(at)} {each.name}"
        yield channel, kind, _received(at, each, kind), kind != each.opcode
    elif each.opcode in ("fusion", "async-start"):
        fused = program[each.called[0]]
        for inner in fused.values():
            for channel, kind, size, _ in _sent(program, fused, inner):
                # libtpu's reduce-scatter: an all-reduce fused with a slice
                is_scattered = each.called[0].startswith("all-reduce-scatter")
                if is_scattered and kind == "all-reduce":
                    kind, size = "reduce-scatter", size - _held(each.shape)
                yield channel, kind, size, not is_scattered


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
