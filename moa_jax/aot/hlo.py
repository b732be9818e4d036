"""XLA's optimised program, read as text: what loops move in memory, what chips send each other.

The program says what is moved, not how long that takes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LARGE = 2 * 1024**2  # bytes

MOVES = {"copy", "slice", "dynamic-slice", "concatenate", "transpose", "pad"}
# These give the same array back, perhaps as another type or shape.
SEEN_THROUGH = {"bitcast", "reshape", "convert", "dynamic-update-slice"}
FOLLOWED = {"while", "conditional", "call", "async-start", "fusion-start"}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)

SCATTERED = "all-reduce-scatter"  # a computation of which each chip keeps a part

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_ENTRY = re.compile(r"^ENTRY %([\w.\-]+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](?:\{[^}]*?(S\([1-4]\))?\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(%[\w.\-]+|\{[^}]*\})"
)
_CONDITION = re.compile(r"\bcondition=%([\w.\-]+)")
_BODY = re.compile(r"\bbody=%([\w.\-]+)")
_DIRECTION = re.compile(r"\bdirection=([A-Z]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_INTEGER = re.compile(r"-?\d+")
_LABEL = re.compile(r'op_name="([^"]*)"')
_CHANNEL = re.compile(r"channel_id=(\d+)")
# What a loop's counter may go through on its way from one turn to the next.
_LINEAR = {"copy", "bitcast", "convert", "reshape", "add", "subtract", "fusion"}
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
        return max((each.size for each in arrays(self.shape)), default=0)

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
        return attribute(_LABEL, self)


class HloArray(NamedTuple):
    """One array of a shape."""

    dtype: str  # bf16, f32, s32, pred, ...
    dims: tuple[int, ...]
    size: int  # bytes
    on_chip: bool  # libtpu says where it is: S(1) is the chip's own fast memory

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.dims)


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


def arrays(shape: str) -> list[HloArray]:
    """Every array of a shape, which may be a tuple."""
    found = []
    for dtype, bits, dims, on_chip in _ARRAY.findall(shape):
        sides = tuple(int(side) for side in dims.split(",") if side)
        size = math.prod(sides) * (8 if dtype == "pred" else int(bits)) // 8
        found.append(HloArray(dtype, sides, size, bool(on_chip)))
    return found


def entry(hlo: str) -> str:
    """The name of the computation that a module begins with."""
    return _ENTRY.search(hlo)[1]


# ---- loops --------------------------------------------------------------------------------


class Move(NamedTuple):
    """A large array written again by nothing but moving it."""

    name: str  # of the instruction, or of the fusion that holds it
    opcode: str
    size: int
    label: str


def large_moves(hlo: str, at_least_bytes: int = LARGE) -> list[Move]:
    """Every instruction of MOVES in a loop that gives an array of `at_least_bytes` or more.

    A fusion counts if a move is the last thing that it does. A move in the middle of a fusion is
    never stored. An update in place does not count, but a copy made for it does. Raises
    ValueError for a program without a loop.
    """
    computations = parse(hlo)
    return [
        Move(instruction.name, opcode, size, instruction.label)
        for instruction in _looped(computations)
        for opcode, size in moved(computations, instruction)
        if size >= at_least_bytes
    ]


def moved(
    computations: dict[str, Computation], instruction: Instruction
) -> Iterator[tuple[str, int]]:
    """What an instruction does nothing but move in memory: the opcode of MOVES, and bytes.

    What a TPU's compiler brings to the chip's own fast memory, ahead of its use, does not count.
    """
    given = [instruction]
    if instruction.opcode == "fusion":
        given = _given(computations[instruction.called[0]])
    for value in given:
        opcode = value.opcode.removesuffix("-done")
        if opcode in MOVES and not all(each.on_chip for each in arrays(value.shape)):
            yield opcode, value.size


def launches(hlo: str) -> Counter[str]:
    """Kernels and memory copies of one turn of the loops, by kind; inner loops count once."""
    found: Counter[str] = Counter()
    for each in _looped(parse(hlo)):
        if each.opcode in FREE | FOLLOWED or each.opcode.endswith("-done"):
            continue
        is_product = each.opcode == "fusion" and "gemm" in each.name
        found["matrix product" if is_product else each.opcode] += 1
    return found


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
    """The instructions that made the results of a fusion, whatever cast or reshaped them since."""
    root = result_of(fused)
    values = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    for index, value in enumerate(values):
        while value.opcode in SEEN_THROUGH:
            value = fused[value.operands[0]]
        values[index] = value
    return values


# ---- collectives --------------------------------------------------------------------------


class Traffic(NamedTuple):
    """What the collectives of one kind do in one run of a program."""

    count: int
    received: int  # bytes that reach each chip, at least: the group's size is not looked at


class Sent(NamedTuple):
    """One collective of a program."""

    kind: str
    times: int  # that it runs
    received: int  # bytes that reach each chip each time, at least
    at: str  # the computation that it runs in; where pieces of it run in several, the outermost


def collectives(hlo: str, within: Sequence[str] | None = None) -> tuple[dict[str, Traffic], int]:
    """Collectives by kind, loops counted in full, and the number of loops of unknown length.

    They are those of the module, or of the computations `within` it. A loop of unknown length
    counts once.
    """
    every, unknown = sent(hlo, within)
    found: dict[str, Traffic] = {}
    for each in every.values():
        before = found.get(each.kind, Traffic(0, 0))
        size = before.received + each.times * each.received
        found[each.kind] = Traffic(before.count + each.times, size)
    return found, unknown


def sent(hlo: str, within: Sequence[str] | None = None) -> tuple[dict[str, Sent], int]:
    """Collectives by their channel, and the number of loops of unknown length, as `collectives`.

    Where XLA overlaps a collective with other work, pieces of it stand in several fusions, some in
    inner loops. They share a channel, and only the outermost piece counts.
    """
    computations = parse(hlo)
    found: dict[str, Sent] = {}
    unknown = 0
    begun = _ENTRY.findall(hlo)[:1] if within is None else within
    waiting = [(name, 1) for name in begun]
    while waiting:
        name, times = waiting.pop()
        for each in computations[name].values():
            for channel, kind, size in sent_by(computations, name, each):
                if channel not in found or times < found[channel].times:
                    found[channel] = Sent(kind, times, size, name)
            if each.opcode == "while":
                trips = trips_of(computations, computations[name], each)
                unknown += trips is None
                turns = times * (1 if trips is None else trips)
                waiting += [(inner, turns) for inner in each.called]
            elif each.opcode in FOLLOWED:
                waiting += [(inner, times) for inner in each.called]
    return found, unknown


def sent_by(
    computations: dict[str, Computation], at: str, instruction: Instruction
) -> Iterator[tuple[str, str, int]]:
    """Channel, kind and bytes of the collectives in an instruction, a fusion's among them.

    XLA writes a reduce-scatter for a TPU as a fusion of an all-reduce and the cut of a part.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        channel = attribute(_CHANNEL, instruction) or f"{at} {instruction.name}"
        yield channel, kind, _received(computations[at], instruction, kind)
    elif instruction.opcode in ("fusion", "async-start"):
        for name in instruction.called:
            for inner in computations[name].values():
                for channel, kind, size in sent_by(computations, name, inner):
                    if name.startswith(SCATTERED) and kind == "all-reduce":
                        kind, size = "reduce-scatter", size - _held(instruction.shape)
                    yield channel, kind, size


def _received(computation: Computation, instruction: Instruction, kind: str) -> int:
    """Bytes that a collective brings to each of its chips, at least.

    A ring of n chips brings (n - 1) / n of what is gathered or scattered, and twice that of
    what is summed; n is at least 2.
    """
    given = sum(_held(computation[name].shape) for name in instruction.operands)
    taken = _held(instruction.shape)
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "reduce-scatter"):
        taken -= given  # the result of a start holds the operands too
    if kind in ("all-gather", "reduce-scatter"):
        return abs(taken - given)
    return given // 2 if kind.endswith("all-to-all") else given


def _held(shape: str) -> int:
    """Bytes of all arrays of a shape."""
    return sum(each.size for each in arrays(shape))


# ---- how often a loop runs ----------------------------------------------------------------


class _Linear(NamedTuple):
    """An integer in a loop: `slope` times an element of the loop's state, plus `offset`."""

    offset: int
    slope: int = 0
    element: int | None = None

    def minus(self, other: _Linear, sign: int = 1) -> _Linear | None:
        """The difference, the sum for a sign of -1; None where it needs two elements."""
        if self.slope and other.slope and self.element != other.element:
            return None
        element = self.element if self.slope else other.element
        return _Linear(self.offset - sign * other.offset, self.slope - sign * other.slope, element)


def trips_of(
    computations: dict[str, Computation], where: Computation, loop: Instruction
) -> int | None:
    """How often a loop of computation `where` runs, None where the program does not show it.

    XLA writes the count down for some loops. libtpu's windowed loops are read here: a counter
    starts at a constant, the body adds a constant, and the condition compares it with a constant.
    """
    if known := _TRIPS.search(loop.attributes):
        return int(known[1])
    condition, body = (computations[attribute(key, loop)] for key in (_CONDITION, _BODY))
    test, direction = _test(computations, condition)
    state, after = where[loop.operands[0]], result_of(body)
    if test is None or test.element is None or not state.opcode == after.opcode == "tuple":
        return None
    start = _linear(computations, where, state.operands[test.element])
    step = _linear(computations, body, after.operands[test.element])
    if start is None or start.slope or step is None or step[1:] != (1, test.element):
        return None
    return _turns(test.slope * start.offset + test.offset, test.slope * step.offset, direction)


def _test(
    computations: dict[str, Computation], condition: Computation
) -> tuple[_Linear | None, str]:
    """The number that a loop compares with 0 before each turn, and the direction."""
    test, given = result_of(condition), None
    if test.opcode == "fusion":  # the comparison stands inside it
        given = [_linear(computations, condition, name) for name in test.operands]
        condition = computations[test.called[0]]
        test = result_of(condition)
    if test.opcode != "compare":
        return None, ""
    left, right = (_linear(computations, condition, name, given) for name in test.operands)
    difference = None if left is None or right is None else left.minus(right)
    return difference, attribute(_DIRECTION, test)


def _turns(first: int, change: int, direction: str) -> int | None:
    """How many of first, first + change, ... in a row compare with 0 as `direction` says."""
    if direction in ("GT", "GE"):
        first, change, direction = -first, -change, {"GT": "LT", "GE": "LE"}[direction]
    if direction == "LE":
        first, direction = first - 1, "LT"
    if direction == "LT" and first >= 0:
        return 0
    exact = change and first % change == 0 and -first // change >= 0
    if (direction == "LT" and change > 0) or (direction == "NE" and exact):
        return -(first // change)
    return None  # it ends when a number overflows, or otherwise, or never


def has_known_trips(loop: Instruction) -> bool:
    """Whether XLA wrote down how often a loop runs."""
    return bool(_TRIPS.search(loop.attributes))


def body_of(loop: Instruction) -> str:
    """The computation that a loop repeats."""
    return attribute(_BODY, loop)


def index_of(element: Instruction) -> int:
    """Which element of a tuple is taken."""
    return int(attribute(_INDEX, element))


def _linear(
    computations: dict[str, Computation],
    where: Computation,
    name: str,
    given: list[_Linear | None] | None = None,
) -> _Linear | None:
    """Value `name` of a computation; its parameters are `given`, or the state of its loop."""
    each = where[name]
    if each.opcode == "constant" and _INTEGER.fullmatch(each.arguments):
        return _Linear(int(each.arguments))
    if each.opcode == "parameter" and given is not None:
        return given[int(each.arguments)]
    if each.opcode == "get-tuple-element" and given is None:
        is_state = where[each.operands[0]].opcode == "parameter"
        return _Linear(0, 1, int(attribute(_INDEX, each))) if is_state else None
    if each.opcode not in _LINEAR:  # operands may be shared: do not walk them in vain
        return None
    values = [_linear(computations, where, operand, given) for operand in each.operands]
    if not values or None in values:
        return None
    if each.opcode in ("add", "subtract"):
        return values[0].minus(values[1], 1 if each.opcode == "subtract" else -1)
    if each.opcode == "fusion":
        fused = computations[each.called[0]]
        return _linear(computations, fused, result_of(fused).name, values)
    return values[0]


def result_of(computation: Computation) -> Instruction:
    """What a computation gives."""
    (root,) = (each for each in computation.values() if each.is_root)
    return root


def attribute(key: re.Pattern[str], instruction: Instruction) -> str:
    """One of an instruction's attributes."""
    found = key.search(instruction.attributes)
    return found[1] if found else ""
