"""The paper authors' figures for reference: Llama-3-8B-Instruct, greedy, trees of 62 tokens.

Source: the chart in their README. All MoA rows have the same numbers for MT-bench and GSM8K, unlike
the rows of other methods, so one of the two columns is probably a copy of the other, and the means
include the copy. These figures are DOUBTFUL.
"""

from __future__ import annotations

from infer.bench.suites import PAPER as SETS

ALL = "all"  # the mean over the six sets
MAIN = "MoA N=0"
DOUBTFUL = ("mt_bench", "gsm8k", ALL)  # in the MoA rows
_CHART = """
MoA N=0:  1.80 3.86  2.28 4.98  1.80 3.86  2.03 4.36  2.10 4.55  1.72 3.73  1.95 4.22
MoA N=1:  1.83 4.19     -    -  1.83 4.19     -    -     -    -     -    -  1.95 4.50
MoA N=3:  1.74 4.65     - 5.41  1.74 4.65     - 4.80     - 5.04     - 4.23  1.79 4.79
EAGLE-2, retrained by them:  -    -    -    -    -    -    -    -    -    -    -    -  1.78 3.60
EAGLE-2, official weights:   -    -    -    -    -    -    -    -    -    -    -    -  1.71 3.43
independent, 650M:           -    -    -    -    -    -    -    -    -    -    -    -  1.58 3.80
independent, 250M:           -    -    -    -    -    -    -    -    -    -    -    -  1.23 3.51
"""


def _figures_of(cells: str) -> dict[str, dict[str, float | None]]:
    """Speedup over plain decoding (None if not stated) and tau with the bonus token, by set."""
    values = [None if cell == "-" else float(cell) for cell in cells.split()]
    pairs = zip((*SETS, ALL), values[::2], values[1::2], strict=True)
    return {name: {"speedup": speedup, "tau": tau} for name, speedup, tau in pairs if tau}


PAPER = {
    method: _figures_of(cells)
    for method, _, cells in (line.partition(":") for line in _CHART.strip().splitlines())
}


def cell(method: str, row: str) -> str:
    """Speedup and tau as a table cell, with a question mark after doubtful figures."""
    figures = PAPER[method].get(row)
    if figures is None:
        return "-"
    speedup = "-" if figures["speedup"] is None else f"{figures['speedup']:.2f}x"
    doubt = " ?" if method.startswith("MoA") and row in DOUBTFUL else ""
    return f"{speedup} / {figures['tau']:.2f}{doubt}"
