"""The kernels that a compiled program runs: how often, in which phase, and what each moves.

Read off the optimised program's text, one computation after the other in the order of its lines:

    bytes     by kind, as `moa_jax.aot.accesses` finds them
    FLOPs     of matrix products alone, as `moa_jax.aot.products` finds them
    phase     the named scope in the kernel's label. Without a label, the scope of what it holds,
              else of what feeds it, else of what uses it.

A kernel of Pallas is what it declares (`moa_jax.aot.declared`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from moa_jax.aot import hlo
from moa_jax.aot.accesses import (
    ACTIVATIONS,
    CACHES,
    KINDS,
    ON_CHIP,
    WEIGHTS,
    Accesses,
    ArrayKind,
    is_free,
    results_of,
    target,
)
from moa_jax.aot.declared import Cost, Declared
from moa_jax.aot.hlo import FOLLOWED, Computation, Instruction, Traffic
from moa_jax.aot.products import products
from moa_jax.errors import InputError

_PALLAS = {"__gpu$xla.gpu.triton", "tpu_custom_call"}
_CALL = "/pallas_call"


class Kernel(NamedTuple):
    """A kernel or a copy in memory; figures are those of one run."""

    name: str
    opcode: str
    label: str
    bytes: Counter[str]  # by kind
    flops: int
    is_product: bool  # holds a matrix product
    is_float32: bool = False  # and all of them are
    moved: tuple[tuple[str, int], ...] = ()  # what it only moves or casts: opcode, bytes
    phase: str = ""
    times: int = 1

    @property
    def pallas(self) -> str:
        """The name of a kernel that was written by hand, "" for any other."""
        return _pallas_name(self.label) if self.label.endswith(_CALL) else ""

    @property
    def in_memory(self) -> int:
        """Bytes that reach the chip's memory."""
        return sum(self.bytes[kind] for kind in KINDS)


def _pallas_name(label: str) -> str:
    return label.removesuffix(_CALL).rpartition("/")[-1]


class Rules(NamedTuple):
    """How a program is read."""

    phases: tuple[str, ...]  # scopes that are phases
    rest: str  # the phase of everything else
    declared: Declared = {}  # noqa: RUF012
    caches: frozenset[tuple[int, ...]] = frozenset()  # shapes, for programs that make their own
    used: float = 1.0  # share of a cache's rows that hold something, for kernels that know it
    turns: int | None = None  # of loops of unknown length
    stays: int = 0  # bytes up to which an activation stays on the chip between kernels


class UnknownLength(InputError):
    """A loop within a round runs as often as its data say."""


def of_round(text: str, kind_of: Callable[[str], str], rules: Rules) -> list[Kernel]:
    """The kernels of one turn of a program's outermost loop, inner loops as often as they turn.

    `kind_of` gives the kind of an argument from its name. Raises ValueError for a program without
    one such loop, UnknownLength for an inner loop of unknown length.
    """
    reader = _Reader(hlo.parse(text), rules)
    at = hlo.entry(text)
    loop = _outermost(reader.computations, at)
    kinds = reader.accesses.kinds(at, _arguments(reader.computations[at], kind_of))
    state = [kinds[loop.operands[0]]]
    return [k for name in loop.called for k in reader.kernels(name, state, 1, rules.rest)]


def collectives_of_round(text: str) -> dict[str, Traffic]:
    """What chips send each other in one turn of that loop, by kind of collective.

    Raises ValueError for a program without one such loop.
    """
    loop = _outermost(hlo.parse(text), hlo.entry(text))
    return hlo.collectives(text, loop.called)[0]


def _outermost(computations: dict[str, Computation], at: str) -> Instruction:
    """The one loop of a computation whose length is not known."""
    loops = [each for each in computations[at].values() if each.opcode == "while"]
    loops = [each for each in loops if hlo.trips_of(computations, computations[at], each) is None]
    if len(loops) != 1:
        raise ValueError(f"this program has {len(loops)} loops of unknown length, not one")
    return loops[0]


def of_program(text: str, kind_of: Callable[[str], str], rules: Rules) -> list[Kernel]:
    """The kernels of one run of a program; raises UnknownLength as `of_round`."""
    reader = _Reader(hlo.parse(text), rules)
    at = hlo.entry(text)
    given = _arguments(reader.computations[at], kind_of)
    return list(reader.kernels(at, given, 1, rules.rest))


def _arguments(entry: Computation, kind_of: Callable[[str], str]) -> list[ArrayKind]:
    parameters = {int(e.arguments): e for e in entry.values() if e.opcode == "parameter"}
    return [kind_of(parameters[index].label) for index in sorted(parameters)]


class _Reader:
    """A parsed program and how to read it; `at` names the computation of an instruction."""

    def __init__(self, computations: dict[str, Computation], rules: Rules) -> None:
        self.computations, self.rules = computations, rules
        self.accesses = Accesses(computations, rules.stays)

    # ---- what runs, and how often -----------------------------------------------------------

    def kernels(self, at: str, given: list[ArrayKind], times: int, rest: str) -> Iterator[Kernel]:
        """The kernels of a computation; `rest` is the phase of those that show none."""
        kinds, phases = self.accesses.kinds(at, given), self._phases(at)
        for each in self.computations[at].values():
            phase = phases.get(each.name) or rest
            of = [kinds[name] for name in each.operands]
            if each.opcode == "while":
                yield from self._loop(at, each, of, times, phase)
            elif each.opcode == "conditional":
                branches = zip(each.called, of[1:], strict=True)
                found = [list(self.kernels(name, [k], times, phase)) for name, k in branches]
                yield from max(found, key=lambda branch: sum(k.in_memory for k in branch))
            elif each.opcode in FOLLOWED:
                for name in each.called:
                    yield from self.kernels(name, of, times, phase)
            elif not is_free(each):
                yield self._kernel(at, each, kinds)._replace(phase=phase, times=times)

    def _loop(
        self, at: str, loop: Instruction, state: list[ArrayKind], times: int, phase: str
    ) -> Iterator[Kernel]:
        turns = hlo.trips_of(self.computations, self.computations[at], loop)
        turns = self.rules.turns if turns is None else turns
        if turns is None:
            raise UnknownLength(
                f"the loop {loop.label or loop.name} runs as often as its data say, so a round has "
                "no fixed cost: let it turn a number of times that is known when it is compiled"
            )
        # Where the number of turns is written down, no condition is looked at.
        for name in [hlo.body_of(loop)] if hlo.has_known_trips(loop) else loop.called:
            yield from self.kernels(name, state, times * turns, phase)

    def _kernel(self, at: str, each: Instruction, kinds: dict[str, ArrayKind]) -> Kernel:
        label = each.label or next(filter(None, self._labels(each)), "")
        if target(each) in _PALLAS:
            moved, flops = self._declared(at, each, label, kinds)
            dtypes = {hlo.arrays(self.computations[at][n].shape)[0].dtype for n in each.operands}
            is_float32 = "f32" in dtypes and "bf16" not in dtypes
            return Kernel(each.name, each.opcode, label, moved, flops, flops > 0, is_float32)
        moved = self.accesses.read(at, each, kinds)
        written = list(self.accesses.written(at, each, kinds))
        for new in written:
            moved[self.accesses.place(new.array, new.kind)] += round(new.share * new.array.size)
        cast = [("convert", new.array.size) for new in written if new.is_whole_copy]
        found = list(products(self.computations, at, each))
        return Kernel(
            each.name,
            each.opcode,
            label,
            +moved,
            sum(product.flops for product in found),
            is_product=bool(found),
            is_float32=bool(found) and all(product.is_float32 for product in found),
            moved=tuple(self._moved(each) or cast),
        )

    def _moved(self, each: Instruction) -> list[tuple[str, int]]:
        if not each.opcode.endswith("-start"):
            return list(hlo.moved(self.computations, each))
        opcode = each.opcode.removesuffix("-start")
        return [(opcode, array.size) for array in results_of(each) if not array.on_chip]

    # ---- Pallas -----------------------------------------------------------------------------

    def _declared(
        self, at: str, call: Instruction, label: str, kinds: dict[str, ArrayKind]
    ) -> tuple[Counter[str], int]:
        """Bytes by kind and FLOPs of a Pallas kernel, as it declares them.

        What it declares holds for caches whose every row is used. Of others it reads the used
        rows only, and all of its products are with these rows.
        """
        cost = self._cost(at, call, label)
        moved: Counter[str] = Counter()
        caches, rest = [], cost.size
        for name in call.operands:
            kind, (array,) = kinds[name], hlo.arrays(self.computations[at][name].shape)
            if kind == WEIGHTS:
                moved[self.accesses.place(array, kind)] += min(array.size, rest)
                rest -= min(array.size, rest)
            elif kind == CACHES or array.dims in self.rules.caches:
                caches.append(array)
        if caches:  # it reads them a whole number of times, or some of their rows
            dims, whole = [array.dims for array in caches], sum(array.size for array in caches)
            others = [self.computations[at][name].shape for name in call.operands] + [call.shape]
            others = [array for shape in others for array in hlo.arrays(shape)]
            read = max(rest - sum(a.size for a in others if a.dims not in dims), 0)
            read = read // whole * whole or read
            rest -= read
            moved[self.accesses.place(caches[0], CACHES)] += round(self.rules.used * read)
        moved[ON_CHIP if rest <= self.rules.stays else ACTIVATIONS] += rest
        return +moved, round((self.rules.used if caches else 1.0) * cost.flops)

    def _cost(self, at: str, call: Instruction, label: str) -> Cost:
        shapes = [self.computations[at][name].shape for name in call.operands] + [call.shape]
        dims = tuple(array.dims for shape in shapes for array in hlo.arrays(shape))
        kernel = _pallas_name(label)
        if (cost := self.rules.declared.get((kernel, dims))) is None:
            raise InputError(
                f"the Pallas kernel {kernel!r} does not say what it costs: give its pallas_call a "
                "cost_estimate"
            )
        return cost

    # ---- phases -----------------------------------------------------------------------------

    def _phases(self, at: str) -> dict[str, str | None]:
        """The phase of everything in a computation, None where nothing shows it."""
        computation, users = self.computations[at], self.accesses.users[at]
        found = {each.name: self._own_phase(each) for each in computation.values()}
        for each in computation.values():
            if each.opcode != "tuple":
                of = (found.get(name) for name in each.operands)
                found[each.name] = found[each.name] or _commonest(of)
        later: dict[int, str | None] = {}  # by element of a loop's state: who uses it next turn
        for _ in range(2):
            for each in reversed(computation.values()):
                of = (
                    later.get(index) if user.opcode == "tuple" else found[user.name]
                    for user, index in users.get(each.name, ())
                )
                found[each.name] = found[each.name] or _commonest(of)
            elements = (e for e in computation.values() if e.opcode == "get-tuple-element")
            later = {hlo.index_of(e): found[e.name] for e in elements}
        return found

    def _own_phase(self, each: Instruction) -> str | None:
        if each.opcode in ("parameter", "get-tuple-element", "constant", "tuple"):
            return None  # what passes through a computation belongs to no phase
        if each.label:
            return self._scope(each.label) or self.rules.rest
        return _commonest(self._scope(label) for label in self._labels(each))

    def _scope(self, label: str) -> str | None:
        return next((part for part in label.split("/") if part in self.rules.phases), None)

    def _labels(self, each: Instruction) -> Iterator[str]:
        """The labels of what a fusion holds."""
        for name in each.called if each.opcode == "fusion" else ():
            for inner in self.computations[name].values():
                if inner.label:
                    yield inner.label
                yield from self._labels(inner)


def _commonest(values: Iterator[str | None]) -> str | None:
    found = Counter(value for value in values if value)
    return found.most_common(1)[0][0] if found else None
