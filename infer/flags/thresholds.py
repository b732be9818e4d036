"""The limits of infer.check: by format of the weights, and the flags that set others."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from infer.program import above_zero
from moa_jax.measure.fidelity import Fidelity


class Thresholds(NamedTuple):
    """What each prompt's figures may be at most, and its agreements at least."""

    mean_kl: float  # nats
    worst_kl: float
    logit_difference: float
    agreement: float  # 0 to 1
    top5_agreement: float


THRESHOLDS = {
    "float32": Thresholds(1e-6, 1e-4, 1e-2, 0.98, 0.98),
    "bfloat16": Thresholds(1e-2, 1e-1, 2.0, 0.9, 0.9),
    "int8": Thresholds(1e-2, 1e-1, 2.0, 0.9, 0.9),
    "fp8": Thresholds(1e-2, 1e-1, 2.0, 0.9, 0.9),
}

_NAMES = {  # of a figure: its flag, and its name in sentences
    "mean_kl": ("--max-mean-kl", "mean KL"),
    "worst_kl": ("--max-kl", "worst KL"),
    "logit_difference": ("--max-logit-difference", "logit difference"),
    "agreement": ("--min-top1", "top-1 agreement"),
    "top5_agreement": ("--min-top5", "top-5 agreement"),
}


def add_threshold_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each threshold, whose default depends on the format of the weights."""
    group = parser.add_argument_group("thresholds, which each prompt must meet")
    for figure, (flag, name) in _NAMES.items():
        defaults = ", ".join(f"{key} {getattr(row, figure):g}" for key, row in THRESHOLDS.items())
        group.add_argument(
            flag, dest=figure, type=above_zero, metavar="X", help=f"{name}; default: {defaults}"
        )


def thresholds_of(args: argparse.Namespace, weights: str) -> Thresholds:
    """The thresholds of the flags, else those of a format: "float32", "bfloat16", "int8", "fp8"."""
    given = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
    return THRESHOLDS[weights]._replace(**given)


def faults_of(found: Fidelity, limits: Thresholds) -> list[str]:
    """A sentence for each threshold that figures miss; a figure that is not a number misses it."""
    faults = []
    for figure, (flag, name) in _NAMES.items():
        value, limit = getattr(found, figure), getattr(limits, figure)
        is_least = flag.startswith("--min")
        if not (value >= limit if is_least else value <= limit):
            faults.append(f"{name} {value:.4g} is {'below' if is_least else 'above'} {limit:g}")
    return faults
