"""Figures of the paper's authors, for reference: Llama-3-8B-Instruct, greedy, trees of 62 tokens.

From the chart in their README. A figure that it does not state, or that was not read from it, is
None. All of their MoA rows have the same numbers for MT-bench and GSM8K while no other method's
do, so one column was pasted over the other, and the means hold it twice: these are DOUBTFUL.
"""

from __future__ import annotations

from typing import NamedTuple


class PaperFigures(NamedTuple):
    """Speedup over plain decoding, and tau with the bonus token."""

    speedup: float | None
    tau: float


ALL = "all"  # the mean over the six sets
MOA = "MoA"
DOUBTFUL = ("mt_bench", "gsm8k", ALL)  # of the rows of MoA
MAIN = f"{MOA} N=0"
PAPER: dict[str, dict[str, PaperFigures]] = {
    MAIN: {
        "mt_bench": PaperFigures(1.80, 3.86),
        "humaneval": PaperFigures(2.28, 4.98),
        "gsm8k": PaperFigures(1.80, 3.86),
        "alpaca": PaperFigures(2.03, 4.36),
        "sum": PaperFigures(2.10, 4.55),
        "qa": PaperFigures(1.72, 3.73),
        ALL: PaperFigures(1.95, 4.22),
    },
    "MoA N=1": {
        "mt_bench": PaperFigures(1.83, 4.19),
        "gsm8k": PaperFigures(1.83, 4.19),
        ALL: PaperFigures(1.95, 4.50),
    },
    "MoA N=3": {
        "mt_bench": PaperFigures(1.74, 4.65),
        "humaneval": PaperFigures(None, 5.41),
        "gsm8k": PaperFigures(1.74, 4.65),
        "alpaca": PaperFigures(None, 4.80),
        "sum": PaperFigures(None, 5.04),
        "qa": PaperFigures(None, 4.23),
        ALL: PaperFigures(1.79, 4.79),
    },
    "EAGLE-2, retrained by them": {ALL: PaperFigures(1.78, 3.60)},
    "EAGLE-2, official weights": {ALL: PaperFigures(1.71, 3.43)},
    "independent, 650M": {ALL: PaperFigures(1.58, 3.80)},
    "independent, 250M": {ALL: PaperFigures(1.23, 3.51)},
}


def cell(method: str, row: str) -> str:
    """Speedup and tau as a table shows them, a question mark behind what is doubtful."""
    figures = PAPER[method].get(row)
    if figures is None:
        return "-"
    speedup = "-" if figures.speedup is None else f"{figures.speedup:.2f}x"
    doubt = " ?" if method.startswith(MOA) and row in DOUBTFUL else ""
    return f"{speedup} / {figures.tau:.2f}{doubt}"
