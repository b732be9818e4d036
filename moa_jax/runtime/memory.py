"""Free memory of a device, compared with the arrays of a program before their allocation."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax

from moa_jax.errors import InputError, first_line

GIB = 1024**3
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # in the exceptions of all backends
MEMINFO, CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup")
# Memory limit files by the controllers of a line in CGROUPS: version 2 first, then version 1.
CGROUP_LIMITS = {
    "": Path("/sys/fs/cgroup/memory.max"),
    "memory": Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
}
# Fields of memory.stat with the used bytes; page cache, which the kernel frees, is not among them.
CGROUP_USED = {"": "anon", "memory": "total_rss"}


class MemoryPlan(NamedTuple):
    """Bytes of a server, summed over all devices."""

    weights: int
    slots: int
    prefix_cache: int  # slots beside those that are decoded
    scratch: int  # logits of one round, and arrays of the same size

    def check(self, num_slots: int, advice: str, num_devices: int) -> None:
        """Raises InputError if the devices have less; the weights must be loaded already."""
        what = (
            f"{num_slots} slots, prefix cache and scratch beside weights of "
            f"{self.weights / GIB:.3g} GiB"
        )
        check_memory(sum(self[1:]), what, advice, num_devices)


def check_memory(num_bytes: int, what: str, advice: str, num_devices: int = 1) -> None:
    """Raises InputError if `num_bytes`, divided evenly among devices, exceed a device's free bytes.

    `what` names the arrays in the error, and `advice` names the settings that lower their size.
    """
    needed, free = num_bytes // num_devices, free_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"{what} need {needed / GIB:.3g} GiB of memory, and {jax.default_backend()} has "
            f"{free / GIB:.3g} GiB; {advice}"
        )


def free_bytes() -> int | None:
    """Free bytes of a local device; None if the backend does not report its memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if jax.default_backend() != "cpu" or not MEMINFO.is_file():
        return None
    facts = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    kilobytes = sum(int(facts.get(name, "0").split()[0]) for name in ("MemAvailable", "SwapFree"))
    return min([1024 * kilobytes, *_cgroup_free()]) if "MemAvailable" in facts else None


def log_failure(logger: logging.Logger, what: str, error: Exception, advice: str = "") -> None:
    """Logs `what` with the traceback; if the device is out of memory, one line with `advice`."""
    if OUT_OF_MEMORY in str(error):
        logger.error("the device is out of memory; %s: %s", advice or what, first_line(error))
    else:
        logger.error(what, exc_info=error)


def num_bytes_of(shapes: Any) -> int:
    """Total bytes of a tree of arrays or `ShapeDtypeStruct`s."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _cgroup_free() -> list[int]:
    """Free bytes of the control groups of this process that limit memory."""
    found: list[int] = []
    lines = CGROUPS.read_text().splitlines() if CGROUPS.is_file() else []
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if (limit := CGROUP_LIMITS.get(controllers)) is None:
            continue
        inner = limit.parent / group.strip("/")
        for folder in (inner, *inner.parents):
            file, stat = folder / limit.name, folder / "memory.stat"
            if folder.is_relative_to(limit.parent) and file.is_file():
                text = file.read_text().strip()
                facts = stat.read_text().splitlines() if stat.is_file() else []
                used = int(dict(map(str.split, facts)).get(CGROUP_USED[controllers], "0"))
                found += [max(int(text) - used, 0)] if text.isdecimal() else []  # otherwise "max"
    return found
