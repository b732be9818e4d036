"""Milliseconds of a round by batch, draft shape and cache length, stored once per machine.

    {"key": {"device_kind": "NVIDIA H200", "dtype": "bfloat16", "weights": null, "cores": 16,
             "pair": "5be1...", "moa_jax": "0.1.0, code 21f0...", "jax": "0.10.2",
             "jaxlib": "0.10.2", "driver": "PJRT ... cuda 13"},
     "costs": [{"batch": 1, "depth": 5, "breadth": 1, "total_tokens": null, "paths": [],
                "length": 128, "ms": 4.3}]}

A folder has one file per key. Between calibrated lengths a cost is linear. Sampled candidates cost
as much as the most likely ones. Steps of a running program correct calibrated costs:

    chain of 3    calibrated 2.0 ms    steps take 3.0 ms      corrected to 3.0 ms
    plain         calibrated 1.0 ms    not measured lately    follows slowly, to 1.5 ms

A shape that does not run follows the shapes that run: a machine that is now slower is slower for
all shapes, and a shape that was last measured on a busy machine is not avoided for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np

from moa_jax.config import DrafterConfig, DraftShape, TargetConfig
from moa_jax.errors import InputError
from moa_jax.files.model_folder import json_hash
from moa_jax.files.whole_files import read_json, write_json
from moa_jax.speculation.controller import STALLED
from moa_jax.version import __version__

# Exceptions of a damaged file of costs.
DAMAGED = (InputError, OSError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
# Weight of a step in the moving geometric mean: a machine that changes is followed within two
# dozen steps, and one step that is stalled tenfold changes a cost by 4 percent. The first dozen
# steps weigh more: the calibrated cost counts as one step. Shapes that do not run follow at the
# square of this weight, 16 times as slowly.
STEP_WEIGHT = 1 / 16


class CostKey(NamedTuple):
    """Pair, device and versions whose costs one file has."""

    device_kind: str
    dtype: str
    weights: str | None  # format of quantized weights
    pair: str  # from `pair_hash`
    cores: int  # that the process may use
    program: str = "session"  # or "engine", whose programs take longer
    moa_jax: str = __version__
    jax: str = jax.__version__
    jaxlib: str = jaxlib.__version__
    driver: str = ""  # `platform_version` of the device's client


class CostTable:
    """Costs of one pair on one machine. Another thread may calibrate while one reads."""

    def __init__(self, key: CostKey | None = None) -> None:
        """A table without a key is not stored."""
        self.key = key
        self._ms: dict[tuple[int, DraftShape], dict[int, float]] = {}  # by cache length
        self._calibrated: set[tuple[int, DraftShape, int]] = set()  # by this process
        self._slowdown: dict[tuple[int, DraftShape], float] = {}  # over the calibrated cost
        self._steps = Counter[tuple[int, DraftShape]]()  # that have corrected a cost

    def ms(self, batch: int, shape: DraftShape, length: int) -> float | None:
        """Milliseconds of a round of the whole batch; None if the shape is not calibrated."""
        cell = batch, _unsampled(shape)
        calibrated = self._calibrated_ms(cell, length)
        return calibrated and calibrated * self._slowdown.get(cell, 1.0)

    def has(self, batch: int, shape: DraftShape, length: int) -> bool:
        """Whether the shape is calibrated at this length."""
        return length in self._ms.get((batch, _unsampled(shape)), {})

    def put(self, batch: int, shape: DraftShape, length: int, ms: float) -> None:
        """Stores a calibrated cost; raises ValueError if `ms` is not above 0 and finite."""
        if not 0 < ms < math.inf:
            raise ValueError(f"cannot store a round of {ms} ms; measure a time above 0")
        cell = batch, _unsampled(shape)
        self._ms[cell] = self._ms.get(cell, {}) | {length: float(ms)}
        self._calibrated.add((*cell, length))

    def update(self, batch: int, shape: DraftShape, length: int, ms: float) -> None:
        """Corrects the costs of a batch by a step that ran alone, without a compiler beside it."""
        cell = batch, _unsampled(shape)
        calibrated = self._calibrated_ms(cell, length)
        if calibrated is None or not 0 < ms < math.inf:
            return
        now = self._slowdown.get(cell, 1.0)
        others = [other for other in list(self._ms) if other[0] == batch and other != cell]
        for other in others:
            before = self._slowdown.get(other, 1.0)
            self._slowdown[other] = before * (now / before) ** (STEP_WEIGHT**2)
        self._steps[cell] += 1
        weight = max(STEP_WEIGHT, 1 / (1 + self._steps[cell]))
        self._slowdown[cell] = now * min(ms / calibrated / now, STALLED) ** weight

    def merge(self, other: CostTable) -> None:
        """Adds costs of another table, except those that this process has calibrated."""
        for cell, costs in list(other._ms.items()):
            ours = self._ms.get(cell, {})
            kept = {
                length: ms for length, ms in ours.items() if (*cell, length) in self._calibrated
            }
            self._ms[cell] = ours | costs | kept

    def entries(self) -> list[dict[str, Any]]:
        """Calibrated costs in the file's format, smallest batches and shapes first."""
        found = []
        for (batch, shape), costs in list(self._ms.items()):
            sizes = dataclasses.asdict(shape)
            del sizes["sampled"]
            found += [{"batch": batch, "length": n, "ms": ms} | sizes for n, ms in costs.items()]
        order = ("batch", "breadth", "depth", "length", "ms")
        return sorted(found, key=lambda entry: [entry[name] for name in order])

    def _calibrated_ms(self, cell: tuple[int, DraftShape], length: int) -> float | None:
        if not (costs := self._ms.get(cell)):
            return None
        lengths = sorted(costs)
        return float(np.interp(length, lengths, [costs[each] for each in lengths]))


def pair_hash(
    target: TargetConfig,
    method: str | None = None,
    drafter: DrafterConfig | None = None,
    vocabulary_size: int | None = None,
) -> str:
    """Returns the sha256 of the sizes of a pair's programs; training a drafter further keeps it.

    `vocabulary_size` is that of a draft vocabulary; None is the target's vocabulary.
    """
    return json_hash(
        {
            "target": dataclasses.asdict(target),
            "method": method,
            "drafter": drafter and dataclasses.asdict(drafter),
            "vocabulary_size": vocabulary_size,
        }
    )


def cost_file(folder: Path, key: CostKey) -> Path:
    """The path of a key's costs."""
    return folder / f"costs-{json_hash(key._asdict())[:16]}.json"


def load_costs(folder: Path | None, key: CostKey) -> tuple[CostTable, str | None]:
    """Returns a key's costs, and a line for the user if its file cannot be used.

    The table is empty without a file, and without a folder.
    """
    table = CostTable(key)
    if folder is None:
        return table, None
    path = cost_file(folder, key)
    try:
        if not path.exists():
            return table, None
        content = read_json(path)
        if content["key"] != key._asdict():
            return table, f"{path} is of another pair or device: costs are measured anew"
        for entry in content["costs"]:
            table.put(*_read(entry))
        table._calibrated.clear()
    except DAMAGED:
        return CostTable(key), f"{path} is damaged: costs are measured anew"
    return table, None


def save_costs(folder: Path | None, table: CostTable) -> None:
    """Writes a table atomically, with costs that other processes have stored meanwhile.

    Costs that this process has calibrated replace theirs. Does nothing without a key or a folder
    that can be written, since costs are a cache.
    """
    if folder is None or table.key is None:
        return
    table.merge(load_costs(folder, table.key)[0])
    content = {"key": table.key._asdict(), "costs": table.entries()}
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(cost_file(folder, table.key), content)


def _unsampled(shape: DraftShape) -> DraftShape:
    return dataclasses.replace(shape, sampled=False)


def _read(entry: Any) -> tuple[int, DraftShape, int, float]:
    """Returns the arguments of `CostTable.put`; raises KeyError, TypeError or ValueError."""
    batch, length, ms = entry["batch"], entry["length"], entry["ms"]
    sizes = [batch, length, entry["depth"], entry["breadth"]]
    if entry["total_tokens"] is not None:
        sizes.append(entry["total_tokens"])
    if any(type(size) is not int or not 0 < size < 2**31 for size in sizes) or type(ms) not in (
        int,
        float,
    ):
        raise ValueError("not a cost")
    paths = tuple(map(tuple, entry["paths"]))
    shape = DraftShape(entry["depth"], entry["breadth"], entry["total_tokens"], paths)
    return batch, shape, length, float(ms)
