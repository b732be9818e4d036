"""Tolerances of the project, and comparisons that name what is apart."""

from __future__ import annotations

from typing import Any

import numpy as np

ARRAYS, LOSSES, NORMS = 2e-5, 1e-5, 1e-4  # of the largest magnitude, the value, the norm


def assert_close(ours: Any, expected: Any, name: str, tolerance: float = ARRAYS) -> None:
    """Equal shapes, and no entry further apart than `tolerance` of the largest one."""
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape, f"{name}: shape {ours.shape}, not {expected.shape}"
    error = np.abs(ours - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{name}: {error:.1e} of its largest magnitude apart"


def assert_value(ours: Any, expected: Any, name: str, tolerance: float = LOSSES) -> None:
    """Two numbers, relative to the expected one."""
    error = abs(float(ours) - float(expected)) / abs(float(expected))
    assert error <= tolerance, f"{name}: {float(ours)} is not {float(expected)}"


def assert_norm_close(ours: Any, expected: Any, name: str, tolerance: float = NORMS) -> None:
    """Two tensors whose difference is small against the expected one's norm."""
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape, f"{name}: shape {ours.shape}, not {expected.shape}"
    error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
    assert error <= tolerance, f"{name}: {error:.1e} of its norm apart"
