"""Tolerances of the project, and comparisons; their errors name the arrays that differ."""

from __future__ import annotations

from typing import Any

import numpy as np

ARRAYS, LOSSES, NORMS = 2e-5, 1e-5, 1e-4  # of the largest magnitude, the value, the norm


def assert_close(ours: Any, expected: Any, name: str, tolerance: float = ARRAYS) -> None:
    """Asserts equal shapes, and that no entry differs by more than `tolerance` of the largest."""
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape, f"{name}: shape {ours.shape}, not {expected.shape}"
    error = np.abs(ours - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{name}: {error:.1e} of its largest magnitude apart"


def assert_value(ours: Any, expected: Any, name: str, tolerance: float = LOSSES) -> None:
    """Asserts that two numbers differ by at most `tolerance`, relative to the expected number."""
    error = abs(float(ours) - float(expected)) / abs(float(expected))
    assert error <= tolerance, f"{name}: {float(ours)} is not {float(expected)}"


def assert_norm_close(ours: Any, expected: Any, name: str, tolerance: float = NORMS) -> None:
    """Asserts that the norm of the difference is at most `tolerance` of the norm of `expected`."""
    ours, expected = np.asarray(ours), np.asarray(expected)
    assert ours.shape == expected.shape, f"{name}: shape {ours.shape}, not {expected.shape}"
    error = np.linalg.norm(ours - expected) / np.linalg.norm(expected)
    assert error <= tolerance, f"{name}: {error:.1e} of its norm apart"
