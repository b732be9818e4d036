"""Rows of results, their comparison with plain decoding, tables and the plot.

latency       from the scheduled arrival to the end of the answer
first token   from the scheduled arrival to the first token
a token       from the first token to the end, divided by the tokens after the first
tokens/s      tokens of complete answers, from the first arrival to the last end
speedup       median over requests of plain decoding's latency / latency
in flight     mean of running and waiting requests: sum of latencies / time (Little's law)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.bench.arrivals import percentiles
from infer.bench.drawing import colour, save_figure, tidy
from infer.bench.serving.clients import RequestOutcome
from infer.bench.statistics import median
from infer.bench.tables import cut_line, percent, short, table_of

Runs = Sequence[Sequence[RequestOutcome]]  # outcomes of one variant at one rate, by repeat
Row = Mapping[str, Any]


def capacity_of(outcomes: Sequence[RequestOutcome]) -> list[float]:
    """Requests/s and tokens/s of a closed loop while all clients have a running request.

    The period ends when the last request is sent; requests that end later count by their share of
    time in the period.
    """
    begin, end = (pick(each.sent for each in outcomes) for pick in (min, max))
    shares = [(min(each.end, end) - each.sent) / (each.end - each.sent) for each in outcomes]
    tokens = sum(share * each.tokens for share, each in zip(shares, outcomes, strict=True))
    return [sum(shares) / (end - begin), tokens / (end - begin)]


def summarise(runs: Runs) -> dict[str, Any]:
    """Throughput and latencies of one variant at one rate; repeats are pooled."""
    outcomes = list(itertools.chain(*runs))
    whole = [each for each in outcomes if not each.error]
    span = sum(max(each.end for each in run) - min(each.due for each in run) for run in runs)
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
        "in_flight": sum(latency) / span,
        "first_token_ms": percentiles([1e3 * (each.first - each.due) for each in whole]),
        "ms_per_token": percentiles(per_token),
        "latency_s": percentiles(latency),
    }


def compare(runs: Runs, plain: Runs) -> dict[str, float | None]:
    """Ratios to plain decoding on the same requests; above 1 is better."""
    ours, theirs = summarise(runs), summarise(plain)
    over = lambda above, below: above / below if above and below else None
    latencies = [(b.end - b.due) / (a.end - a.due) for a, b in pairs_of(runs, plain)]
    return {
        "speedup": median(latencies),
        "throughput_over_plain": over(ours["tokens_per_s"], theirs["tokens_per_s"]),
        "p95_over_plain": over(theirs["latency_s"]["p95"], ours["latency_s"]["p95"]),
    }


def differences(runs: Runs, others: Runs) -> dict[str, Any]:
    """The number of answer pairs, and the indices of requests with different answers."""
    pairs = pairs_of(runs, others)
    wrong = [a.request.index for a, b in pairs if (a.text, a.tokens) != (b.text, b.tokens)]
    return {"compared": len(pairs), "different": wrong}


def pairs_of(runs: Runs, others: Runs) -> list[tuple[RequestOutcome, RequestOutcome]]:
    """Pairs of outcomes of the same request, if both answers are complete."""
    known = {each.request.index: each for each in itertools.chain(*others) if not each.error}
    whole = (each for each in itertools.chain(*runs) if not each.error)
    return [(each, known[each.request.index]) for each in whole if each.request.index in known]


# ---- tables and plot ----------------------------------------------------------------------


def _both(key: str) -> Callable[[Row], str]:
    return lambda row: f"{short(row[key]['p50'])}, {short(row[key]['p95'])}"


def _same(row: Row) -> str:
    failed = f", {row['failed']} FAILED" if row["failed"] else ""
    return f"{row['compared'] - len(row['different'])}/{row['compared']}{failed}"


def _shares(row: Row) -> str:
    """Shares of rounds by shape, most frequent first: `chain 3 80 %, plain 20 %`."""
    found = sorted(row["shares"].items(), key=lambda item: -item[1])
    return ", ".join(f"{shape} {percent(share)}" for shape, share in found) or "-"


CAPACITY = {
    "all slots full": lambda row: row["way"],
    "requests/s": lambda row: short(row["requests_per_s"]),
    "tokens/s": lambda row: short(row["tokens_per_s"]),
    "of each server": lambda row: ", ".join(map(short, row["each_tokens_per_s"])),
}
COLUMNS: dict[str, Callable[[Row], str]] = {
    "way": lambda row: row["way"],
    "tokens/s": lambda row: short(row["tokens_per_s"]),
    "over plain": lambda row: short(row["throughput_over_plain"]),
    "first token ms, p50, p95": _both("first_token_ms"),
    "ms a token": _both("ms_per_token"),
    "latency s": _both("latency_s"),
    "speedup": lambda row: short(row["speedup"]),
    "of p95": lambda row: short(row["p95_over_plain"]),
    "same text": _same,
    "tau": lambda row: short(row["tau"]),
    "accepted": lambda row: percent(row["acceptance_rate"]),
    "in flight": lambda row: short(row["in_flight"]),
    "rounds": _shares,
}


def render(document: Row) -> str:
    """All tables and the settings in Markdown."""
    settings, machine = document["settings"], document["machine"]
    cells = lambda row, columns: {title: show(row) for title, show in columns.items()}
    rows = [
        {"requests/s": "" if index else name_of_rate(rate)} | cells(row, COLUMNS)
        for rate in document["rates"]
        for index, row in enumerate(rate["ways"])
    ]
    every = [row for rate in document["rates"] for row in rate["ways"]]
    compiled = sum(row["compiled"] for row in every)
    different = sum(len(row["different"]) for row in every)
    parts = [
        cut_line(document, "rates"),
        "{questions} questions of the suite {suite} ({left_out} too long), {max_new_tokens} tokens "
        "at most, temperature {temperature:g}, {dtype}, {slots} slots, ".format_map(settings)
        + "{device_kind}, {cores} cores for servers and clients together".format_map(machine),
        table_of([cells(server, CAPACITY) for server in document["servers"]]),
        table_of(rows),
        f"{compiled} programs WERE COMPILED while this was measured." if compiled else "",
        f"{different} answers DIFFER from those of the first way." if different else "",
    ]
    return "\n\n".join(part for part in parts if part)


def name_of_rate(load: Row) -> str:
    """The name of a load: `2 clients`, or `1.5 (0.5x)` in requests per second."""
    if load["clients"]:
        return f"{load['clients']} client" + "s" * (load["clients"] > 1)
    share = load["of_capacity"]
    return short(load["rate"]) + ("" if share is None else f" ({share:.3g}x)")


def plot(document: Row, path: Path) -> None:
    """Plots latency, throughput and speedup over requests/s, as in the paper's figure 4."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    latency, throughput, speedup = panels = figure.subplots(1, 3)
    rates = [rate for rate in document["rates"] if rate["rate"] is not None]
    for index, server in enumerate(document["servers"]):
        rows = [rate["ways"][index] for rate in rates]
        x, look = [row["rate"] for row in rows], {"color": colour(index), "marker": "."}
        latency.plot(x, [row["latency_s"]["p50"] for row in rows], label=server["way"], **look)
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
