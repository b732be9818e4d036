"""Casts of weights to narrower floats, in which no finite number may become infinite."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from moa_jax.errors import InputError

DTYPES = ("float16", "bfloat16", "float32")  # that a model is loaded in or saved as


def cast(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """The floats in another dtype; `where` names them.

    Raises InputError for finite numbers that are too large for it.
    """
    made = to_dtype(array, dtype)
    if is_faulty(array, made, finite=False):
        raise refusal(array, dtype, where)
    return made


def is_faulty(given: np.ndarray, made: np.ndarray, finite: bool) -> bool:
    """Whether a cast made infinities, or with `finite` whether what it gave is not finite."""
    if finite:
        return num_not_finite(made) > 0
    checked = may_overflow(given.dtype, made.dtype)
    return checked and num_not_finite(made) > num_not_finite(given)


def may_overflow(given: np.dtype, made: np.dtype) -> bool:
    """Whether a cast can make infinities of finite numbers."""
    return ml_dtypes.finfo(given).max > ml_dtypes.finfo(made).max


def num_not_finite(array: np.ndarray) -> int:
    """The number of NaN and infinite floats; numpy's own loops for bfloat16 are slow."""
    bits = f"u{array.itemsize}"
    infinity, sign = np.array([np.inf, -0.0], array.dtype).view(bits)
    return int(np.count_nonzero((array.view(bits) & ~sign) >= infinity))


def refusal(array: np.ndarray, dtype: np.dtype, where: str) -> InputError | None:
    """The error for floats that hold NaN or infinity, or get it by a cast; None for others."""
    found = num_not_finite(array)
    if grown := num_not_finite(to_dtype(array, dtype)) - found:
        wide = [name for name in DTYPES if num_not_finite(to_dtype(array, np.dtype(name))) == found]
        advice = f"choose {' or '.join(wide)}" if wide else "fetch the model again"
        return InputError(f"{where}: {grown:,} finite numbers become infinite in {dtype}: {advice}")
    if found:
        return InputError(f"{where} holds {found:,} NaN or infinite values: fetch the model again")
    return None


def to_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The floats in another dtype, whatever becomes of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=False)
