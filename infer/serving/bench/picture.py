"""The paper's figure 4: latency, throughput and speedup against the rate of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.bench.drawing import colour, save_figure, tidy


def plot(document: Mapping[str, Any], path: Path) -> None:
    """Writes the picture, as a whole or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    latency, throughput, speedup = figure.subplots(1, 3)
    for index, way in enumerate(server["way"] for server in document["servers"]):
        rates = [rate for rate in document["rates"] if rate["rate"] is not None]
        rows = [row for rate in rates for row in rate["ways"] if row["way"] == way]
        look = {"color": colour(index), "marker": "o", "markersize": 4}
        at = lambda key, name=None, rows=rows: _series(rows, key, name)
        latency.plot(*at("latency_s", "p50"), label=way, **look)
        latency.plot(*at("latency_s", "p95"), linestyle=":", **look)
        throughput.plot(*at("tokens_per_s"), **look)
        speedup.plot(*at("speedup"), **look)
    latency.set_yscale("log")
    latency.set_ylabel("latency in s: p50, and p95 dotted")
    throughput.set_ylabel("tokens/s")
    speedup.set_ylabel("speedup over plain (latency)")
    speedup.axhline(1.0, color="0.4", linewidth=1)
    for panel in (latency, throughput, speedup):
        panel.set_xlabel("requests/s")
        tidy(panel)
    handles, labels = latency.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    save_figure(figure, path)


def _series(
    rows: Sequence[Mapping[str, Any]], key: str, name: str | None
) -> tuple[list[float], list[float]]:
    """Rates and values, where there are any."""
    values = [(row["rate"], row[key] if name is None else row[key][name]) for row in rows]
    known = [(rate, value) for rate, value in values if value is not None]
    return [rate for rate, _ in known], [value for _, value in known]
