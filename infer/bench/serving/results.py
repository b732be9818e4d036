"""Rows of results, their comparison with plain decoding, tables and the plot.

latency       from the scheduled arrival to the end of the answer
first token   from the scheduled arrival to the first token
a token       from the first token to the end, divided by the tokens after the first
tokens/s      tokens of complete answers, from the first arrival to the last end
speedup       median over requests of plain decoding's latency / latency
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infer.bench.drawing import save_figure, tidy
from infer.bench.serving.clients import RequestOutcome
from infer.bench.statistics import median
from infer.bench.tables import TableColumn, cut_line, short, table_of

Outcomes = Sequence[RequestOutcome]  # of one mode at one rate
Row = Mapping[str, Any]


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """The median and the 95th percentile; None if `values` is empty."""
    found = np.quantile(values, (0.5, 0.95)).tolist() if len(values) else (None, None)
    return dict(zip(("p50", "p95"), found, strict=True))


def summarise(outcomes: Outcomes) -> dict[str, Any]:
    """Throughput and latencies of one mode at one rate."""
    whole = [each for each in outcomes if not each.error]
    span = max(each.end for each in outcomes) - min(each.due for each in outcomes)
    tokens, latency = sum(each.tokens for each in whole), [each.end - each.due for each in whole]
    per_token = [1e3 * (e.end - e.first) / (e.tokens - 1) for e in whole if e.tokens > 1]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(whole),
        "failures": dict(Counter(each.error for each in outcomes if each.error)),
        "seconds": span,
        "tokens": tokens,
        "tokens_per_s": tokens / span,
        "requests_per_s": len(whole) / span,
        "first_token_ms": percentiles([1e3 * (each.first - each.due) for each in whole]),
        "ms_per_token": percentiles(per_token),
        "latency_s": percentiles(latency),
    }


def compare(ours: Outcomes, plain: Outcomes) -> dict[str, Any]:
    """Speedup over plain decoding, and the seeds of requests with different answers.

    Compares pairs of complete answers to the same request.
    """
    known = {each.seed: each for each in plain if not each.error}
    pairs = [(each, known[each.seed]) for each in ours if not each.error and each.seed in known]
    return {
        "speedup": median([(b.end - b.due) / (a.end - a.due) for a, b in pairs]),
        "compared": len(pairs),
        "different": [a.seed for a, b in pairs if (a.text, a.tokens) != (b.text, b.tokens)],
    }


# ---- tables and plot ----------------------------------------------------------------------


def _both(key: str) -> Callable[[Row], str]:
    return lambda row: f"{short(row[key]['p50'])}, {short(row[key]['p95'])}"


def _same(row: Row) -> str:
    failed = f", {row['failed']} FAILED" if row["failed"] else ""
    return f"{row['compared'] - len(row['different'])}/{row['compared']}{failed}"


COLUMNS: dict[str, TableColumn] = {
    "rate": "rate",
    "mode": "mode",
    "requests/s": "requests_per_s",
    "tokens/s": ("tokens_per_s", 0),
    "first token ms, p50, p95": _both("first_token_ms"),
    "ms a token": _both("ms_per_token"),
    "latency s": _both("latency_s"),
    "speedup": "speedup",
    "same text": _same,
    "tau": "tau",
}


def render(document: Row) -> str:
    """All tables and the settings in Markdown."""
    rows = document["rates"]
    compiled = sum(row["compiled"] for row in rows)
    different = sum(len(row["different"]) for row in rows)
    text = "{questions} questions of the suite {suite}, {max_new_tokens} tokens at most, "
    text += "temperature {temperature:g}, {dtype}, {slots} slots, {device_kind}, {cores} cores "
    text += "for servers and clients together"
    parts = [
        text.format_map(document["settings"] | document["machine"]),
        table_of(rows, COLUMNS),
        f"{compiled} programs WERE COMPILED while this was measured." if compiled else "",
        f"{different} answers DIFFER from those of plain decoding." if different else "",
        cut_line(document, "rates"),
    ]
    return "\n\n".join(part for part in parts if part)


def plot(document: Row, path: Path) -> None:
    """Plots latency, throughput and speedup over requests/s, as in the paper's figure 4."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    latency, throughput, speedup = panels = figure.subplots(1, 3)
    for index, mode in enumerate(dict.fromkeys(row["mode"] for row in document["rates"])):
        rows = [row for row in document["rates"] if row["mode"] == mode]
        x, look = [row["rate"] for row in rows], {"color": f"C{index}", "marker": "."}
        latency.plot(x, [row["latency_s"]["p50"] for row in rows], label=mode, **look)
        latency.plot(x, [row["latency_s"]["p95"] for row in rows], linestyle=":", **look)
        throughput.plot(x, [row["tokens_per_s"] for row in rows], **look)
        speedup.plot(x, [row["speedup"] for row in rows], **look)
    names = ("latency in s: p50, and p95 dotted", "tokens/s", "speedup over plain (latency)")
    for panel, name in zip(panels, names, strict=True):
        panel.set(xlabel="requests/s", ylabel=name)
        tidy(panel)
    latency.set_yscale("log")
    speedup.axhline(1.0, color="0.4", linewidth=1)
    figure.legend(*latency.get_legend_handles_labels(), loc="outside upper center", ncols=8)
    save_figure(figure, path)
