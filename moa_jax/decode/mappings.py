"""Room for more compiled programs: on a CPU each takes some hundred memory mappings.

XLA maps the code of every kernel by itself, its text apart from its data. Linux gives a process
65,530 mappings by default (`vm.max_map_count`), and XLA crashes when a mapping is refused. Measured
with jax 0.10.2 on the bundled pair: 170 to 450 mappings a program.
"""

from __future__ import annotations

from pathlib import Path

MAPPINGS, MOST = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")  # of Linux
SHARE = 0.75  # of what a process may have that is for programs which nobody waits for


def num_mappings() -> int:
    """Those of this process; 0 where the system does not tell."""
    return MAPPINGS.read_bytes().count(b"\n") if MAPPINGS.exists() else 0


def has_room() -> bool:
    """Whether programs may be compiled that are not needed, only faster."""
    return not MOST.exists() or num_mappings() < SHARE * int(MOST.read_text())
