"""What the instructions of a compiled program read and write, and of which kind it is.

kind      every array is traced back to an argument: weights or caches, else activations. A
          copy, cast or cut-out cache is still a cache, and so is one that was updated.
read      what is taken of an operand: of a slice or a gather the part, of an array that is
          updated in place nothing.
written   what is given; of an update in place the new part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from moa_jax.aot import hlo
from moa_jax.aot.hlo import FOLLOWED, FREE, Computation, HloArray, Instruction

KINDS = WEIGHTS, CACHES, ACTIVATIONS = "weights", "caches", "activations"
ON_CHIP = "on chip"  # activations that never reach the chip's memory
ArrayKind = str | tuple["ArrayKind", ...]  # of an array, or of each element of a tuple

_SLICES = {"slice", "dynamic-slice", "gather", "slice-start"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # which operand holds what is new
_SAME = {"bitcast", "reshape"}  # the same bytes
_THROUGH = _SAME | {"convert", "copy"}  # within a fusion, as much of the operand as is used of it
# What these give is of the kind of what they take first.
_KEEP = {*_SLICES, *_UPDATES, *_THROUGH, "transpose", "pad", "copy-start", "while"} - {"gather"}
_NO_KERNELS = {"ConcatBitcast", "AllocateBuffer"}  # custom calls of libtpu
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}")  # which result takes over which operand


class Written(NamedTuple):
    """An array that a kernel gives."""

    array: HloArray
    kind: ArrayKind
    share: float  # that is new

    @property
    def is_whole_copy(self) -> bool:
        """Whether it is a weight or a cache that stands in memory once more."""
        return self.share == 1.0 and self.kind in (WEIGHTS, CACHES) and not self.array.on_chip


class Accesses:
    """A parsed program; `at` names the computation of an instruction."""

    def __init__(self, computations: dict[str, Computation], stays: int) -> None:
        """Activations of up to `stays` bytes stay on the chip between kernels."""
        self.computations, self.stays = computations, stays
        self.users = {name: _users(each) for name, each in computations.items()}
        every = [each for computation in computations.values() for each in computation.values()]
        self._fused = {name for e in every if e.opcode == "fusion" for name in e.called}

    def kinds(self, at: str, given: list[ArrayKind]) -> dict[str, ArrayKind]:
        """The kind of everything in a computation, from those of its parameters."""
        found: dict[str, ArrayKind] = {}
        for each in self.computations[at].values():
            found[each.name] = self._kind(each, found, given)
        return found

    def _kind(
        self, each: Instruction, found: dict[str, ArrayKind], given: list[ArrayKind]
    ) -> ArrayKind:
        of = [found.get(name, ACTIVATIONS) for name in each.operands]
        if each.opcode == "parameter":
            return given[int(each.arguments)]
        if each.opcode == "tuple":
            return tuple(of)
        if each.opcode == "get-tuple-element":
            return of[0][hlo.index_of(each)] if isinstance(of[0], tuple) else of[0]
        if each.opcode in _KEEP or each.opcode.endswith("-done"):
            return of[0]
        if each.opcode == "select":
            return next((kind for kind in of[1:] if kind != ACTIVATIONS), ACTIVATIONS)
        if each.opcode == "custom-call":
            same = {result: of[int(index)] for result, index in _ALIAS.findall(each.attributes)}
            if each.shape.startswith("("):
                arrays = range(len(hlo.arrays(each.shape)))
                return tuple(same.get(str(result), ACTIVATIONS) for result in arrays)
            free = next(iter(of), ACTIVATIONS) if is_free(each) else ACTIVATIONS
            return same.get("", free)
        if each.opcode == "fusion" or each.opcode in FOLLOWED:
            inner = each.called[0]
            kinds = self.kinds(inner, of[1:] if each.opcode == "conditional" else of)
            return kinds[hlo.result_of(self.computations[inner]).name]
        return ACTIVATIONS

    def place(self, array: HloArray, kind: ArrayKind) -> str:
        """What an access to an array counts as."""
        kind = ACTIVATIONS if isinstance(kind, tuple) else kind
        stays = kind == ACTIVATIONS and array.size <= self.stays
        return ON_CHIP if array.on_chip or stays else kind

    def read(self, at: str, each: Instruction, kinds: dict[str, ArrayKind]) -> Counter[str]:
        """Bytes that an instruction reads, by where they come from."""
        moved: Counter[str] = Counter()
        for index, name in enumerate(each.operands):
            share = self._share(at, each, index)
            for array in hlo.arrays(self.computations[at][name].shape):
                moved[self.place(array, kinds[name])] += round(share * array.size)
        return moved

    def _share(self, at: str, user: Instruction, index: int) -> float:
        """How much of its operand an instruction takes, from 0 to 1."""
        if user.opcode in _UPDATES and index == 0:
            return 0.0
        if user.opcode in _SLICES and index == 0:
            whole = hlo.arrays(self.computations[at][user.operands[0]].shape)[0]
            return min(1.0, results_of(user)[0].count / max(whole.count, 1))
        if user.opcode != "fusion":
            return 1.0
        inner = user.called[0]
        name = next(e.name for e in self.computations[inner].values() if _is_parameter(e, index))
        return self._taken(inner, name, 1.0)

    def _taken(self, at: str, name: str, as_result: float) -> float:
        """How much of a fusion's inner value is used; `as_result` of one that it gives."""
        if self.computations[at][name].is_root:
            return as_result
        total = 0.0
        for user, index in self.users[at].get(name, ()):
            if user.opcode in _UPDATES and index == 0:  # in place, and perhaps read afterwards
                total += self._taken(at, user.name, 0.0)
            elif user.opcode == "tuple":
                total += as_result
            elif user.opcode in _THROUGH:
                total += self._taken(at, user.name, as_result)
            else:
                total += self._share(at, user, index)
        return min(1.0, total)

    def written(self, at: str, each: Instruction, kinds: dict[str, ArrayKind]) -> Iterator[Written]:
        """The arrays that an instruction gives, and how much of each is new."""
        found = self._given(at, each.name, kinds)
        for array, (share, kind) in zip(results_of(each), found, strict=False):
            yield Written(array, kind, share)

    def _given(
        self, at: str, name: str, kinds: dict[str, ArrayKind]
    ) -> list[tuple[float, ArrayKind]]:
        """How much of each array of a value is new, and its kind."""
        each = self.computations[at][name]
        if each.opcode == "tuple":
            return [one for name in each.operands for one in self._given(at, name, kinds)]
        if each.opcode in _SAME:
            return self._given(at, each.operands[0], kinds)
        if each.opcode in _UPDATES and self._is_in_place(at, each.operands[0]):
            new = self.computations[at][each.operands[_UPDATES[each.opcode]]]
            return [(_count(new) / max(_count(each), 1), kinds[name])]
        if each.opcode == "get-tuple-element":
            inner = self._given(at, each.operands[0], kinds)
            return [inner[min(hlo.index_of(each), len(inner) - 1)]]
        if each.opcode == "fusion":
            inner = each.called[0]
            of = self.kinds(inner, [kinds[name] for name in each.operands])
            return self._given(inner, hlo.result_of(self.computations[inner]).name, of)
        return [(1.0, kinds[name])] * len(results_of(each))

    def _is_in_place(self, at: str, name: str) -> bool:
        """Whether an updated value is an array from outside, and not one made here."""
        each = self.computations[at][name]
        while each.opcode in _SAME:
            each = self.computations[at][each.operands[0]]
        return at not in self._fused or each.opcode in ("parameter", *_UPDATES)


def _users(computation: Computation) -> dict[str, list[tuple[Instruction, int]]]:
    """Who uses a value of a computation, and as which operand."""
    found: dict[str, list[tuple[Instruction, int]]] = {}
    for each in computation.values():
        for index, name in enumerate(each.operands):
            found.setdefault(name, []).append((each, index))
    return found


def results_of(each: Instruction) -> list[HloArray]:
    """The arrays that an instruction gives; what starts a copy also names its source."""
    found = hlo.arrays(each.shape)
    if each.opcode == "copy-start":
        return found[:1]
    if each.opcode == "slice-start":
        return found[1:2]
    return found[:1] if target(each).startswith("__cublas") else found  # then its workspace


def is_free(each: Instruction) -> bool:
    """Whether an instruction runs nothing."""
    is_done = each.opcode.endswith("-done") or each.opcode == "optimization-barrier"
    return each.opcode in FREE or is_done or target(each) in _NO_KERNELS


def _is_parameter(each: Instruction, index: int) -> bool:
    return each.opcode == "parameter" and int(each.arguments) == index


def target(each: Instruction) -> str:
    """What a custom call calls, nothing for any other instruction."""
    return hlo.attribute(_TARGET, each) if each.opcode == "custom-call" else ""


def _count(each: Instruction) -> int:
    return results_of(each)[0].count
