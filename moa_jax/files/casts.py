"""Casts of weights to narrower floats, checked for overflow to infinity."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from moa_jax.errors import InputError

DTYPES = ("float16", "bfloat16", "float32")  # supported in loading and saving


def cast(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """Cast an array to `dtype`; `where` names the array in errors.

    Raises InputError if a finite number overflows.
    """
    made = to_dtype(array, dtype)
    if is_faulty(array, made, finite=False):
        raise refusal(array, dtype, where)
    return made


def is_faulty(given: np.ndarray, made: np.ndarray, finite: bool) -> bool:
    """Whether a cast created infinities; with `finite`, whether any result is not finite."""
    if finite:
        return num_not_finite(made) > 0
    checked = may_overflow(given.dtype, made.dtype)
    return checked and num_not_finite(made) > num_not_finite(given)


def may_overflow(given: np.dtype, made: np.dtype) -> bool:
    """Whether a cast can turn finite numbers into infinities."""
    return ml_dtypes.finfo(given).max > ml_dtypes.finfo(made).max


def num_not_finite(array: np.ndarray) -> int:
    """Number of NaN and infinite values; numpy's own functions are slow for bfloat16."""
    bits = f"u{array.itemsize}"
    infinity, sign = np.array([np.inf, -0.0], array.dtype).view(bits)
    return int(np.count_nonzero((array.view(bits) & ~sign) >= infinity))


def refusal(array: np.ndarray, dtype: np.dtype, where: str) -> InputError | None:
    """The error for NaN and infinity in an array or in its cast; None if both are finite."""
    found = num_not_finite(array)
    if grown := num_not_finite(to_dtype(array, dtype)) - found:
        wide = [name for name in DTYPES if num_not_finite(to_dtype(array, np.dtype(name))) == found]
        advice = f"choose {' or '.join(wide)}" if wide else "fetch the model again"
        return InputError(f"{where}: {grown:,} finite numbers become infinite in {dtype}; {advice}")
    if found:
        return InputError(f"{where} holds {found:,} NaN or infinite values; fetch the model again")
    return None


def to_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array cast to `dtype`, without a check for overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype, copy=False)
