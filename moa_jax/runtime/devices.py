"""The platform that a program is traced for, and the generation of a GPU."""

from __future__ import annotations

from typing import Any

import jax


def traced_platform() -> str:
    """Platform of the current trace: gpu, tpu or cpu.

    If a program is compiled ahead of time, the abstract mesh has a platform; otherwise the
    default backend's platform is returned.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.platform if described else jax.default_backend()


def compute_capability(device: Any) -> float:
    """Compute capability of an NVIDIA GPU, as 9.0; 0 for other devices."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:  # AMD GPUs report the name of their architecture
        return 0.0
