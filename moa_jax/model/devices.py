"""The device that a program is traced for, and its capabilities."""

from __future__ import annotations

from typing import Any

import jax


def traced_platform() -> str:
    """The kind of device that a program is traced for: gpu, tpu or cpu.

    The mesh's devices decide, as in ahead-of-time compiles; else the default backend does.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.platform if described else jax.default_backend()


def compute_capability(device: Any) -> float:
    """That of an NVIDIA GPU, as 9.0; 0 for other devices."""
    try:
        return float(getattr(device, "compute_capability", 0))
    except ValueError:  # the name of another maker's architecture
        return 0.0
