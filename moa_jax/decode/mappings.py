"""Limit on compiled programs: on a CPU each program takes some hundred memory mappings.

XLA maps the code of every kernel separately, with code and data in separate mappings. Linux gives a
process 65,530 mappings by default (`vm.max_map_count`), and XLA crashes when a mapping is refused.
Measured with jax 0.10.2 on the bundled pair: 170 to 450 mappings per program.
"""

from __future__ import annotations

from pathlib import Path

MAPPINGS, MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")  # Linux only
SHARE = 0.75  # share of the limit up to which optional programs are compiled


def num_mappings() -> int:
    """Returns the number of memory mappings of this process; 0 without `/proc/self/maps`."""
    return MAPPINGS.read_bytes().count(b"\n") if MAPPINGS.exists() else 0


def can_compile_more() -> bool:
    """Returns whether optional programs, which only make decoding faster, may be compiled."""
    return not MOST.exists() or num_mappings() < SHARE * int(MOST.read_text())
