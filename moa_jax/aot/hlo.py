"""XLA's optimised program, read as text: what loops move in memory, what chips send each other.

The program says what is moved, not how long that takes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

LARGE = 2 * 1024**2  # bytes

MOVES = {"copy", "slice", "dynamic-slice", "concatenate", "transpose"}
# A value is the same memory, or as much of it in another type, before and after these.
SEEN_THROUGH = {"bitcast", "reshape", "convert", "dynamic-update-slice"}
FOLLOWED = {"while", "conditional", "call", "async-start", "fusion-start"}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_ENTRY = re.compile(r"^ENTRY %([\w.\-]+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(%[\w.\-]+|\{[^}]*\})"
)
_CONDITION = re.compile(r"condition=%([\w.\-]+)")
_LABEL = re.compile(r'op_name="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    shape: str  # of what it gives
    arguments: str  # between its brackets
    attributes: str  # after them
    is_root: bool

    @property
    def size(self) -> int:
        """Bytes of what it gives; of a tuple, those of its largest array."""
        return max(_sizes(self.shape), default=0)

    @property
    def operands(self) -> list[str]:
        return _NAME.findall(self.arguments)

    @property
    def called(self) -> list[str]:
        """Computations."""
        return _NAME.findall(" ".join(_CALLED.findall(self.attributes)))

    @property
    def label(self) -> str:
        """Where it comes from: named scopes and the jax primitive."""
        found = _LABEL.search(self.attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]


def parse(hlo: str) -> dict[str, Computation]:
    """The computations of a module by name, each with its instructions by name."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[1]] = {}
        elif found := _INSTRUCTION.match(line):
            root, name, shape, opcode, arguments, attributes = found.groups()
            current[name] = Instruction(name, opcode, shape, arguments, attributes, bool(root))
    return computations


def _sizes(shape: str) -> list[int]:
    """Bytes of each array of a shape, which may be a tuple."""
    sizes = []
    for kind, bits, dims in _ARRAY.findall(shape):
        count = 1
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        sizes.append(count if kind == "pred" else count * int(bits) // 8)
    return sizes


# ---- loops --------------------------------------------------------------------------------


class Move(NamedTuple):
    """A large array written again by nothing but moving it."""

    name: str  # of the instruction, or of the fusion that holds it
    opcode: str
    size: int
    label: str


def large_moves(hlo: str, at_least_bytes: int = LARGE) -> list[Move]:
    """Copies, slices, concatenations and transpositions in loops that give an array so large.

    A fusion counts if that is what it gives in the end; moves whose result is used up within
    it are never stored. Updates in place do not count, what they are made to update does.
    Raises ValueError for a program without a loop.
    """
    computations = parse(hlo)
    found = []
    for instruction in _looped(computations):
        given = [instruction]
        if instruction.opcode == "fusion":
            given = _given(computations[instruction.called[0]])
        for value in given:
            opcode = value.opcode.removesuffix("-done")
            if opcode in MOVES and value.size >= at_least_bytes:
                found.append(Move(instruction.name, opcode, value.size, instruction.label))
    return found


def launches(hlo: str) -> Counter[str]:
    """Kernels and memory copies of one turn of the loops, by kind; inner loops count once."""
    steps = (each for each in _looped(parse(hlo)) if each.opcode not in FREE | FOLLOWED)
    return Counter(_kind(each) for each in steps if not each.opcode.endswith("-done"))


def _looped(computations: dict[str, Computation]) -> Iterator[Instruction]:
    """All instructions that run within loops; those inside fusions belong to the fusion."""
    every = [each for computation in computations.values() for each in computation.values()]
    waiting = [name for each in every if each.opcode == "while" for name in each.called]
    if not waiting:
        raise ValueError("this program has no loop")
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for instruction in computations[name].values():
            yield instruction
            if instruction.opcode in FOLLOWED:
                waiting += instruction.called


def _given(fused: Computation) -> list[Instruction]:
    """What made the results of a fusion: its roots, seen through what leaves arrays as they are."""
    (root,) = (each for each in fused.values() if each.is_root)
    values = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return [_origin(fused, value) for value in values]


def _origin(fused: Computation, value: Instruction) -> Instruction:
    while value.opcode in SEEN_THROUGH:
        value = fused[value.operands[0]]
    return value


def _kind(instruction: Instruction) -> str:
    if instruction.opcode != "fusion":
        return instruction.opcode
    return "matrix product" if "gemm" in instruction.name else "fusion"


# ---- collectives --------------------------------------------------------------------------


class Traffic(NamedTuple):
    """What the collectives of one kind do in one run of a program."""

    count: int
    received: int  # bytes that reach each chip, at least: the group's size is not looked at


def collectives(hlo: str) -> tuple[dict[str, Traffic], int]:
    """Collectives by kind, loops counted in full, and the number of loops of unknown length.

    Those loops count once. Where XLA overlaps a collective with other work, pieces of it stand in
    several fusions, also of inner loops; they share a channel, and the outermost one counts.
    """
    computations = parse(hlo)
    channels: dict[str, tuple[str, int, int]] = {}  # kind, times, bytes received each time
    unknown = 0
    waiting = [(match[1], 1) for match in [_ENTRY.search(hlo)] if match]
    while waiting:
        name, times = waiting.pop()
        for computation, each in _with_fused(computations, name):
            kind = each.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                channel = _CHANNEL.search(each.attributes)
                key = channel[1] if channel else f"{name} {each.name}"
                received = _received(computation, each, kind)
                if key not in channels or times < channels[key][1]:
                    channels[key] = (kind, times, received)
            elif each.opcode == "while":
                trips = _trips(computations, each)
                unknown += trips is None
                waiting += [(inner, times * (trips or 1)) for inner in each.called]
            elif each.opcode in FOLLOWED:
                waiting += [(inner, times) for inner in each.called]
    found: dict[str, Traffic] = {}
    for kind, times, received in channels.values():
        before = found.get(kind, Traffic(0, 0))
        found[kind] = Traffic(before.count + times, before.received + times * received)
    return found, unknown


def _with_fused(
    computations: dict[str, Computation], name: str
) -> Iterator[tuple[Computation, Instruction]]:
    """The instructions of a computation and of its fusions, each with where it stands."""
    for instruction in computations[name].values():
        yield computations[name], instruction
        if instruction.opcode == "fusion":
            for inner in instruction.called:
                yield from _with_fused(computations, inner)


def _received(computation: Computation, instruction: Instruction, kind: str) -> int:
    """Bytes that a collective brings to each of its chips, at least.

    A ring of n chips brings (n - 1) / n of what is gathered or scattered, and twice that of
    what is summed; n is at least 2.
    """
    given = sum(sum(_sizes(computation[name].shape)) for name in instruction.operands)
    taken = sum(_sizes(instruction.shape))
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "reduce-scatter"):
        taken -= given  # the result of a start holds the operands too
    if kind in ("all-gather", "reduce-scatter"):
        return abs(taken - given)
    return given // 2 if kind.endswith("all-to-all") else given


def _trips(computations: dict[str, Computation], loop: Instruction) -> int | None:
    """How often a loop runs, where XLA says so or its condition compares with one constant."""
    if known := _TRIPS.search(loop.attributes):
        return int(known[1])
    condition = _CONDITION.search(loop.attributes)
    steps = [each for _, each in _with_fused(computations, condition[1])] if condition else []
    limits = [each for each in steps if each.opcode == "constant" and each.shape[1:3] == "32"]
    compared = any(each.opcode == "compare" for each in steps)
    return int(limits[0].arguments) if compared and len(limits) == 1 else None
