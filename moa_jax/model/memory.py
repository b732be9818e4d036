"""Free memory of a device, compared with the arrays of a program before these are allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from moa_jax.errors import InputError

GIB = 1024**3
MEMINFO, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup")
# The files that bound a process's memory, by the controllers that its line in CGROUPS names.
CGROUP_LIMITS = {
    "": Path("/sys/fs/cgroup/memory.max"),
    "memory": Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
}


def check_memory(num_bytes: int, what: str, advice: str, num_devices: int = 1) -> None:
    """Raises InputError where `num_bytes`, divided among devices at best, exceed one's free bytes.

    `what` needs these bytes, and `advice` names what lowers them.
    """
    needed, there = num_bytes // num_devices, free_bytes()
    if there is not None and needed > there:
        raise InputError(
            f"{what} need {needed / GIB:.3g} GiB of memory, and {jax.default_backend()} has "
            f"{there / GIB:.3g} GiB: {advice}"
        )


def free_bytes() -> int | None:
    """Bytes that a device of this process can give at most; None where that is not known."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if jax.default_backend() != "cpu" or not MEMINFO.is_file():
        return None
    facts = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    kilobytes = sum(int(facts.get(name, "0").split()[0]) for name in ("MemAvailable", "SwapFree"))
    return min([1024 * kilobytes, *_cgroup_limits()]) if "MemAvailable" in facts else None


def num_bytes_of(shapes: Any) -> int:
    """Bytes of arrays, for which `ShapeDtypeStruct`s may stand in."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _cgroup_limits() -> list[int]:
    """Bytes that the control groups of this process allow."""
    found: list[int] = []
    lines = CGROUPS.read_text().splitlines() if CGROUPS.is_file() else []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if (limit := CGROUP_LIMITS.get(controllers)) is None:
            continue
        inner = limit.parent / group.strip("/")
        for folder in (inner, *inner.parents):
            file = folder / limit.name
            if folder.is_relative_to(limit.parent) and file.is_file():
                text = file.read_text().strip()
                found += [int(text)] if text.isdecimal() else []  # or "max"
    return found
