"""The limits of infer.check by weight format, and the flags that override them."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from infer.bench.fidelity import Fidelity
from infer.cli.program import above_zero


class Thresholds(NamedTuple):
    """Upper limits of a prompt's distances, and lower limits of its agreements."""

    mean_kl: float  # nats
    worst_kl: float
    logit_difference: float
    agreement: float  # 0 to 1
    top5_agreement: float


# Measured on SmolLM2-135M and the bundled pair, six prompts each; worst prompt (mean KL, worst KL,
# logit difference): float32 4e-11, 2e-10, 2e-4; bfloat16 1e-3, 2e-2, 1.5; int8 9e-3, 5e-2, 2.6.
# The limits have a margin for larger models: about 50 times these logit differences in float32,
# because a wrong computation changes logits by far more than 0.01, and about 3 times for other
# formats. Agreements have a margin for near ties. FP8 needs a GPU and was not measured; its limits
# are those of int8.
_EIGHT_BITS = Thresholds(3e-2, 2e-1, 8.0, 0.85, 0.85)
THRESHOLDS = {
    "float32": Thresholds(1e-8, 1e-6, 1e-2, 0.99, 0.99),
    "bfloat16": Thresholds(5e-3, 1e-1, 5.0, 0.92, 0.92),
    "int8": _EIGHT_BITS,
    "fp8": _EIGHT_BITS,
}

_NAMES = {  # figure -> (flag, name in messages)
    "mean_kl": ("--max-mean-kl", "mean KL"),
    "worst_kl": ("--max-kl", "worst KL"),
    "logit_difference": ("--max-logit-difference", "logit difference"),
    "agreement": ("--min-top1", "top-1 agreement"),
    "top5_agreement": ("--min-top5", "top-5 agreement"),
}


def add_threshold_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag per threshold; defaults depend on the weight format."""
    group = parser.add_argument_group("thresholds, which each prompt must meet")
    for figure, (flag, name) in _NAMES.items():
        defaults = ", ".join(f"{key} {getattr(row, figure):g}" for key, row in THRESHOLDS.items())
        group.add_argument(
            flag, dest=figure, type=above_zero, metavar="X", help=f"{name}; default: {defaults}"
        )


def thresholds_of(args: argparse.Namespace, weights: str) -> Thresholds:
    """The thresholds of a format ("float32", "bfloat16", "int8", "fp8"), overridden by flags."""
    given = {name: getattr(args, name) for name in _NAMES if getattr(args, name) is not None}
    return THRESHOLDS[weights]._replace(**given)


def faults_of(found: Fidelity, limits: Thresholds) -> list[str]:
    """A message per violated threshold; NaN violates every threshold."""
    faults = []
    for figure, (flag, name) in _NAMES.items():
        value, limit = getattr(found, figure), getattr(limits, figure)
        is_least = flag.startswith("--min")
        if not (value >= limit if is_least else value <= limit):
            faults.append(f"{name} {value:.4g} is {'below' if is_least else 'above'} {limit:g}")
    return faults
