"""What a round of each draft takes: milliseconds that were measured once, kept in a folder.

    {"place": {"device_kind": "NVIDIA H200", "dtype": "bfloat16", "weights": null, "cores": 16,
               "pair": "5be1..."},
     "jax": "0.10.2",
     "costs": [{"batch": 1, "depth": 5, "breadth": 1, "total_tokens": null, "ms": 4.3,
                "rows": 512}]}

There is one such file, `costs-<hash>.json`, for each pair on each device. It is a cache: one that
says nothing of this place is measured anew. `rows` are those of the caches, and they and jax's
version are for people to read. Chains and dynamic trees have costs, static trees have none.
Candidates that are drawn cost what the likeliest ones do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax

from moa_jax.config import DrafterConfig, DraftShape, TargetConfig
from moa_jax.errors import InputError
from moa_jax.files.model_folder import json_hash
from moa_jax.files.whole_files import read_json, write_json


class Place(NamedTuple):
    """What was measured: a pair, as it is stored, on a device."""

    device_kind: str
    dtype: str
    weights: str | None  # their format; None where they are not quantized
    pair: str  # of `pair_of`
    cores: int  # that the process may use


class _Cost(NamedTuple):
    ms: float
    rows: int | None


class Costs:
    """Milliseconds of a round by batch and shape, of one place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._costs: dict[tuple[int, DraftShape], _Cost] = {}
        self._put: set[tuple[int, DraftShape]] = set()  # measured by this process

    def ms(self, batch: int, shape: DraftShape) -> float | None:
        """Milliseconds of a round of the whole batch, None where they are not known."""
        cost = self._costs.get((batch, priced_as(shape)))
        return cost and cost.ms

    def put(self, batch: int, shape: DraftShape, ms: float, rows: int | None = None) -> None:
        """Takes a measurement in place of an earlier one; `rows` are those of the caches.

        One of a shape whose costs are not kept is left out. Raises ValueError for a time that is
        not above 0.
        """
        if not 0 < ms < math.inf:
            raise ValueError(f"a round of {ms} ms")
        if priced_as(shape) == shape:
            self._costs[batch, shape] = _Cost(float(ms), rows)
            self._put.add((batch, shape))

    def for_batch(self, batch: int) -> dict[DraftShape, float]:
        """Milliseconds of all shapes that are known for a batch of this size."""
        found = list(self._costs.items())  # another thread may be measuring
        return {shape: cost.ms for (size, shape), cost in found if size == batch}

    def merge(self, other: Costs) -> None:
        """Takes over what another table of the same place has and this process did not measure."""
        for key, cost in list(other._costs.items()):
            if key not in self._put:
                self._costs[key] = cost

    def entries(self) -> list[dict[str, Any]]:
        """The costs as the file lists them, the smallest batches and shapes first."""
        found = [
            {
                "batch": batch,
                "depth": shape.depth,
                "breadth": shape.breadth,
                "total_tokens": shape.total_tokens,
                "ms": cost.ms,
                "rows": cost.rows,
            }
            for (batch, shape), cost in list(self._costs.items())
        ]
        return sorted(found, key=lambda e: (e["batch"], e["breadth"], e["depth"], e["ms"]))


def priced_as(shape: DraftShape) -> DraftShape | None:
    """The shape that a shape's costs are kept under; None where they are not kept."""
    if shape.paths:
        return None
    return dataclasses.replace(shape, sampled=False)


def pair_of(
    target: TargetConfig,
    method: str | None = None,
    drafter: DrafterConfig | None = None,
    vocabulary_size: int | None = None,
) -> str:
    """The sha256 of what fixes the sizes of a pair's programs.

    Costs depend on sizes alone: a drafter that is trained further keeps its costs.
    `vocabulary_size` is that of a draft vocabulary; None is the target's whole one.
    """
    return json_hash(
        {
            "target": dataclasses.asdict(target),
            "method": method,
            "drafter": drafter and dataclasses.asdict(drafter),
            "vocabulary_size": vocabulary_size,
        }
    )


def costs_file(folder: Path, place: Place) -> Path:
    """Where the costs of a place are kept."""
    return folder / f"costs-{json_hash(place._asdict())[:16]}.json"


def load_costs(folder: Path | None, place: Place) -> tuple[Costs, str | None]:
    """The costs of a place, and a line for the user where its file was of no use.

    They are empty where nothing was measured, and where there is no folder.
    """
    costs = Costs(place)
    if folder is None:
        return costs, None
    path = costs_file(folder, place)
    try:
        if not path.exists():
            return costs, None
        content = read_json(path)
        if content["place"] != place._asdict():
            return costs, f"{path} is of another pair or device: costs are measured anew"
        for entry in content["costs"]:
            key, cost = _read(entry)
            costs._costs[key] = cost
    except (InputError, OSError, LookupError, TypeError, ValueError, ArithmeticError):
        return Costs(place), f"{path} is damaged: costs are measured anew"
    return costs, None


def save_costs(folder: Path | None, costs: Costs) -> None:
    """Writes the costs as a whole, with those that another process has written in the meantime.

    Where both measured the same, ours stay. Without a folder that can be written nothing is kept.
    """
    if folder is None:
        return
    costs.merge(load_costs(folder, costs.place)[0])
    content = {
        "place": costs.place._asdict(),
        "jax": jax.__version__,
        "costs": costs.entries(),
    }
    with contextlib.suppress(OSError):  # as the compiled programs beside it, they are a cache
        folder.mkdir(parents=True, exist_ok=True)
        write_json(costs_file(folder, costs.place), content)


def _read(entry: Any) -> tuple[tuple[int, DraftShape], _Cost]:
    """One entry of a file; raises KeyError, TypeError or ValueError for what is none."""
    batch, ms, rows = entry["batch"], entry["ms"], entry["rows"]
    sizes = [batch, entry["depth"], entry["breadth"]]
    sizes += [size for size in (entry["total_tokens"], rows) if size is not None]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError("a size is no whole number")
    if type(ms) not in (int, float) or not 0 < ms < math.inf:
        raise ValueError("a cost is no time")
    shape = DraftShape(entry["depth"], entry["breadth"], entry["total_tokens"])
    return (batch, shape), _Cost(float(ms), rows)
