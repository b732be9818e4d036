"""The start of a run: checks of its data before any work, and the line that describes the run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from infer.cli.program import duration, stage
from moa_jax.config import DataConfig
from moa_jax.data import sources
from moa_jax.data.files import kind_of
from moa_jax.errors import InputError
from moa_jax.files.paths import is_stored
from moa_jax.runtime.multihost import is_first
from moa_jax.training.metrics import Record


def working_on(label: str) -> contextlib.AbstractContextManager[None]:
    """On process 0 a context that prints `label` after each ten seconds without a line."""
    return stage(label, quiet=not is_first())


def check_data(data: DataConfig) -> str | None:
    """Checks the paths of both splits; returns a line if one file is in both, else None.

    Raises InputError for an empty list, for a file that is missing, unreadable or of an unknown
    kind, and for a `hub:` name without a split. No dataset of another package is opened.
    """
    both = set(_files(data, "train")) & set(_files(data, "validation"))
    if not both:
        return None
    name = min(both) + (f" and {len(both) - 1} more" if len(both) > 1 else "")
    return (
        f"validation reads training data ({name}): its figures do not show the quality on other "
        "text; set data.validation to records that are held out"
    )


def _files(data: DataConfig, split: str) -> list[str]:
    """The resolved names of a split's files, and the names of its datasets."""
    found: list[str] = []
    if not getattr(data, split):
        raise InputError(f"data.{split} is empty; name a file, a folder or a dataset")
    for path in getattr(data, split):
        try:
            files = sources.files_of(path)
            if path.startswith(("hub:", "tfds:")):  # its files do not name the split
                found.append(path)
                continue
            for file in files:
                kind_of(file)
                if not is_stored(file) and not os.access(file, os.R_OK):
                    raise InputError(f"{file} cannot be read; change its permissions")
        except InputError as error:
            raise InputError(f"data.{split}: {error}") from error
        found += [str(file if is_stored(file) else file.resolve()) for file in files]
    return found


def layout(devices: Sequence[Any], mesh: Mesh | None = None, target: str | None = None) -> str:
    """The devices, processes, mesh and placement of the target, as the line of the start has them.

    `target` is "copied" or "cut" over the mesh axis `fsdp`, as in `TrainStep.target_place`.
    """
    count, processes = len(devices), jax.process_count()
    parts = [f"{count} device{'s' * (count > 1)} ({devices[0].device_kind})"]
    if processes > 1:
        parts[0] += f" of {processes} processes"
    if mesh is not None:
        parts.append("mesh " + " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()))
    if mesh is not None and target is not None:
        share = mesh.shape["tensor"] * (1 if target == "copied" else mesh.shape["fsdp"])
        where = "each device" if share == 1 else f"each {share} devices"
        parts.append(f"a copy of the target on {where}")
    return ", ".join(parts)


def describe(step: int, total: int, on: str, earlier: list[Record], is_resumed: bool) -> str:
    """One line on a start or resume; `earlier` has the records of speed.jsonl up to `step`."""
    starts = [record for record in earlier if record["kind"] == "start"]
    before = starts[-1].get("layout") if starts and is_resumed else None
    there = f" on {on}" if on else ""
    if before and before != on:
        there += f" (before: {before})"
    left = f"{total - step} steps left"
    if is_resumed and before == on and (seconds := seconds_per_step(earlier)):
        left += f", about {duration((total - step) * seconds)} at the speed so far"
    verb = "resumes after" if is_resumed else "starts at"
    return f"{verb} step {step} of {total}{there}; {left}"


def seconds_per_step(earlier: list[Record]) -> float | None:
    """Wall time per step since the newest start, evaluations included; None if not known yet."""
    starts = [index for index, record in enumerate(earlier) if record["kind"] == "start"]
    timed = [r for r in earlier[starts[-1] :] if r["kind"] == "speed"] if starts else []
    steps = timed[-1]["step"] - timed[0]["step"] if timed else 0
    return (timed[-1]["time"] - timed[0]["time"]) / steps if steps > 0 else None
