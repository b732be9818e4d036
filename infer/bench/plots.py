"""Plots of an evaluation: tau and speedup by set, acceptance by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from infer.bench import paper
from infer.bench.candidates import PLAIN
from infer.bench.drawing import tidy
from infer.bench.paper import ALL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_STYLE = {"marker": "D", "color": "white", "markeredgecolor": "0.2", "linestyle": "none"}
POSITIONS = {
    "acceptance_unconditional": "of rounds that drafted it",
    "acceptance_conditional": "given the position before",
}


def speed_figure(document: Mapping[str, Any]) -> Figure:
    """Speedup with quartiles above, tau below: a group of bars per set, a colour per candidate.

    Open diamonds mark the paper's figures, except doubtful ones.
    """
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["model"] != PLAIN]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(max(7.0, len(sets) + 2), 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    width = 0.8 / len(models)
    for index, model in enumerate(models):
        own = [row for row in rows if row["model"] == model and row["tau"] is not None]
        x = [sets.index(row["set"]) + (index - (len(models) - 1) / 2) * width for row in own]
        look = {"width": 0.92 * width, "label": model}
        speedups = np.array([row["speedup"] for row in own])
        spread_2R = np.abs(np.array([row["speedup_quartiles"] for row in own]).T - speedups)
        top.bar(x, speedups, yerr=spread_2R, capsize=2, **look)
        bars = bottom.bar(x, [row["tau"] for row in own], **look)
        bottom.bar_label(bars, fmt="%.2f", fontsize=7, padding=2, rotation=90)
    known = {s: f for s, f in paper.PAPER[paper.MAIN].items() if s not in paper.DOUBTFUL}
    x = [place for place, name in enumerate(sets) if name in known]
    for panel, key, label in (
        (top, "speedup", "speedup over plain decoding"),
        (bottom, "tau", "tau"),
    ):
        if x:
            y = [known[sets[place]][key] for place in x]
            panel.plot(x, y, label=f"paper, {paper.MAIN} (Llama-3-8B)", **PAPER_STYLE)
        panel.axhline(1, color="0.35", linewidth=1)
        panel.set_ylabel(label)
        tidy(panel, "y")
    bottom.set_xticks(range(len(sets)), sets, rotation=90)
    _legend(figure, bottom)
    return figure


def acceptance_figure(document: Mapping[str, Any]) -> Figure:
    """Acceptance rate by position, of rounds that drafted the position or that reached it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in document["rows"] if row["model"] != PLAIN and row["set"] == ALL]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (key, title) in zip(panels, POSITIONS.items(), strict=True):
        for row in rows:
            shares_P = np.array(row[key], float)  # None becomes nan, which is not drawn
            label = row["model"] if np.isfinite(shares_P).any() else None
            panel.plot(1 + np.arange(len(shares_P)), shares_P, marker="o", label=label)
        panel.set(title=title, xlabel="position in the draft", ylim=(0, 1))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(panel, "y")
    panels[0].set_ylabel("share accepted")
    _legend(figure, panels[0])
    return figure


def _legend(figure: Any, panel: Any) -> None:
    """Draws one panel's legend above all panels."""
    found = panel.get_legend_handles_labels()
    figure.legend(*found, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
