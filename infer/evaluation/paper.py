"""Figures of the paper's authors, for reference: Llama-3-8B-Instruct, greedy, trees of 62 tokens.

From the chart in their README. A figure that it does not state, or that was not read from it, is
None. All of their MoA rows have the same numbers for MT-bench and GSM8K while no other method's
do, so one column was pasted over the other, and the means hold it twice: these are DOUBTFUL.
"""

from __future__ import annotations

from typing import NamedTuple


class Figures(NamedTuple):
    """Speedup over plain decoding, and tau with the bonus token."""

    speedup: float | None
    tau: float


ALL = "all"  # the mean over the six sets
MOA = "MoA"
DOUBTFUL = ("mt_bench", "gsm8k", ALL)  # of the rows of MoA
MAIN = f"{MOA} N=0"
PAPER: dict[str, dict[str, Figures]] = {
    MAIN: {
        "mt_bench": Figures(1.80, 3.86),
        "humaneval": Figures(2.28, 4.98),
        "gsm8k": Figures(1.80, 3.86),
        "alpaca": Figures(2.03, 4.36),
        "sum": Figures(2.10, 4.55),
        "qa": Figures(1.72, 3.73),
        ALL: Figures(1.95, 4.22),
    },
    "MoA N=1": {
        "mt_bench": Figures(1.83, 4.19),
        "gsm8k": Figures(1.83, 4.19),
        ALL: Figures(1.95, 4.50),
    },
    "MoA N=3": {
        "mt_bench": Figures(1.74, 4.65),
        "humaneval": Figures(None, 5.41),
        "gsm8k": Figures(1.74, 4.65),
        "alpaca": Figures(None, 4.80),
        "sum": Figures(None, 5.04),
        "qa": Figures(None, 4.23),
        ALL: Figures(1.79, 4.79),
    },
    "EAGLE-2, retrained by them": {ALL: Figures(1.78, 3.60)},
    "EAGLE-2, official weights": {ALL: Figures(1.71, 3.43)},
    "independent, 650M": {ALL: Figures(1.58, 3.80)},
    "independent, 250M": {ALL: Figures(1.23, 3.51)},
}


def cell(method: str, row: str) -> str:
    """Speedup and tau as a table shows them, a question mark behind what is doubtful."""
    figures = PAPER[method].get(row)
    if figures is None:
        return "-"
    speedup = "-" if figures.speedup is None else f"{figures.speedup:.2f}x"
    doubt = " ?" if method.startswith(MOA) and row in DOUBTFUL else ""
    return f"{speedup} / {figures.tau:.2f}{doubt}"
