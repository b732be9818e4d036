"""Pictures of an evaluation: tau and speedup by set, and how far down drafts are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from infer.bench import paper
from infer.bench.candidates import PLAIN
from infer.bench.drawing import colour, tidy
from infer.bench.report import ALL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_STYLE = {"marker": "D", "color": "white", "markeredgecolor": "0.2", "linestyle": "none"}
PAPERS = f"paper, {paper.MAIN} (Llama-3-8B)"
MOST_SETS = 12  # names of sets side by side that have room; more are written upright
MOST_LEVEL = 3  # bars side by side whose figures have room; more are written upright


def speed_figure(document: Mapping[str, Any]) -> Figure:
    """Speedup with its quartiles above, tau below: a group of bars a set, a colour a decoder."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["model"] != PLAIN]
    sets = list(dict.fromkeys(row["set"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    crowded = len(sets) > MOST_SETS
    inches = max(7.0, (0.6 if crowded else 1.4) * len(sets) + 2)
    figure = Figure(figsize=(inches, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    width = 0.8 / len(models)
    for index, model in enumerate(models):
        own = [row for row in rows if row["model"] == model and row["tau"] is not None]
        x = [sets.index(row["set"]) + (index - (len(models) - 1) / 2) * width for row in own]
        look = {"width": 0.92 * width, "color": colour(index), "label": model}
        speedups = [row["speedup"] for row in own]
        spread = [
            [row["speedup"] - row["speedup_quartiles"][0] for row in own],
            [row["speedup_quartiles"][1] - row["speedup"] for row in own],
        ]
        whiskers = {"ecolor": "0.25", "elinewidth": 1, "capsize": 2}
        top.bar(x, speedups, yerr=spread, error_kw=whiskers, **look)
        bars = bottom.bar(x, [row["tau"] for row in own], **look)
        upright = 90 if len(models) > MOST_LEVEL else 0
        bottom.bar_label(bars, fmt="%.2f", fontsize=7, padding=2, rotation=upright)
    _mark_paper(top, bottom, sets)
    for panel, label in ((top, "speedup over plain decoding"), (bottom, "tau")):
        panel.axhline(1, color="0.35", linewidth=1)
        panel.set_ylabel(label)
        tidy(panel, "y")
    bottom.set_xticks(range(len(sets)), sets, rotation=90 if crowded else 0)
    _legend(figure, bottom)
    return figure


def acceptance_figure(document: Mapping[str, Any]) -> Figure:
    """Share of drafts accepted at each position, of rounds that drafted it or that came there."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in document["rows"] if row["model"] != PLAIN and row["set"] == ALL]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    kinds = (
        ("acceptance_unconditional", "of rounds that drafted it"),
        ("acceptance_conditional", "given the position before"),
    )
    for panel, (key, title) in zip(panels, kinds, strict=True):
        for index, row in enumerate(rows):
            found = [(i, value) for i, value in enumerate(row[key], 1) if value is not None]
            if found:
                look = {"color": colour(index), "marker": "o", "markersize": 5}
                panel.plot(*zip(*found, strict=True), label=row["model"], **look)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("position in the draft")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_ylim(0, 1)
        tidy(panel, "y")
    panels[0].set_ylabel("share accepted")
    _legend(figure, panels[0])
    return figure


def _mark_paper(top: Any, bottom: Any, sets: list[str]) -> None:
    """The paper's figures as open diamonds, those that can be trusted."""
    known = paper.PAPER[paper.MAIN]
    names = [name for name in sets if name in known and name not in paper.DOUBTFUL]
    if names:
        x = [sets.index(name) for name in names]
        top.plot(x, [known[name].speedup for name in names], **PAPER_STYLE)
        bottom.plot(x, [known[name].tau for name in names], **PAPER_STYLE, label=PAPERS)


def _legend(figure: Any, panel: Any) -> None:
    """The names of one panel above all of them, the paper's last."""
    found = dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    labels = sorted(found, key=lambda label: label == PAPERS)
    handles = [found[label] for label in labels]
    figure.legend(handles, labels, loc="outside upper center", ncols=5, frameon=False, fontsize=9)
