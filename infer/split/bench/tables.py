"""The results of `infer.bench --split` in Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from infer.bench.decode_tables import precision
from infer.bench.drawing import colour, save_figure, tidy
from infer.bench.tables import cut_line, percent, short, table_of

LINKS = {
    "direct": "this machine's own loopback",
    "namespaces": "network namespaces: the kernel's TCP over a link that delays and loses packets",
    "proxy": "a TCP proxy, too kind to what is sent in bulk and gets lost",
}
LEGEND = {"stream": "stream (as an API)", "plain": "plain (a round trip each token)"}


def render(document: dict[str, Any]) -> str:
    """All tables, with what they rest on."""
    settings, machine = document["settings"], document["machine"]
    parts = [
        cut_line(document, "networks"),
        f"{settings['prompts']} prompts of the suite {settings['suite']}, answers of "
        f"{settings['max_new_tokens']} tokens (stop: {settings['stop']}), {precision(settings)}, "
        f"rows in {settings['codec']}; drafting slowed down {settings['client_slowdown']:g} times; "
        f"{machine['device_kind']}, {machine['cores']} cores for client and server together. Local "
        f"plain decoding: {short(document['local_plain_tokens_per_s'])} tokens/s.",
        table_of([cells for profile in document["profiles"] for cells in _ways(profile)]),
        "\n".join(map(_network, document["profiles"])),
    ]
    if document["best_n"]:
        found = (f"{name}: {layers}" for name, layers in document["best_n"].items())
        parts.append(f"The best N: {', '.join(found)}.")
    parts.append(table_of([_offline(row) for row in document["offline"]]))
    if document["crowd"]:
        first = document["crowd"][0]
        parts += [
            table_of([_crowd(row) for row in document["crowd"]]),
            f"Over {first['profile']}; {first['rate']:g} clients come each second (Poisson), "
            f"{settings['asks']} questions each, {settings['slots']} slots, no drafting ahead.",
        ]
    parts.append(table_of([_outage(row) for row in document["outages"]]))
    if document["differences"]:
        parts.append(f"{len(document['differences'])} answers DIFFER from local plain decoding.")
    return "\n\n".join(part for part in parts if part)


def _ways(profile: dict[str, Any]) -> Iterator[dict[str, str]]:
    """A line for each way of answering over one network, which the first line names."""
    for index, row in enumerate(profile["ways"]):
        drops = f", {row['drops']} drops" if row["drops"] else ""
        quartiles = " to ".join(map(short, row["tokens_per_s_quartiles"] or [])) or "-"
        yield {
            "network": "" if index else profile["profile"],
            "way": row["way"],
            "tokens/s, median (quartiles)": f"{short(row['tokens_per_s'])} ({quartiles})",
            "over API": short(row["speedup_over_stream"]),
            "over round trips": short(row["speedup_over_plain"]),
            "first token ms": short(row["first_token_ms"]),
            "tau": short(row["tau"]),
            "server calls": short(row["server_calls"]),
            "target passes": short(row["target_passes"]),
            "bytes up, down": f"{row['bytes_up']:.0f}, {row['bytes_down']:.0f}",
            "a token up, down": f"{row['bytes_up_per_token']:.0f}, "
            f"{row['bytes_down_per_token']:.0f}",
            "reply ms": short(row["reply_ms"]),
            "drafting, waiting s": f"{row['drafting_s']:.2f}, {row['waiting_s']:.2f}",
            "same text": f"{row['same_as_plain']}/{row['answers']}{drops}",
        }


def _network(profile: dict[str, Any]) -> str:
    return (
        f"- {profile['profile']}: {profile['delay_ms']:g} +- {profile['jitter_ms']:g} ms one way, "
        f"{100 * profile['loss']:g} % loss, {profile['rate_mbit'] or 'any'} Mbit/s; "
        f"{LINKS[profile['link']]}"
    )


def _offline(row: dict[str, Any]) -> dict[str, str]:
    return {
        "alone": row["draft"],
        "tokens/s": short(row["tokens_per_s"]),
        "tokens the target would choose": percent(row["chosen_by_target"]),
        "log-likelihood": short(row["log_likelihood"]),
        "target's own": short(row["own_log_likelihood"]),
    }


def _crowd(row: dict[str, Any]) -> dict[str, Any]:
    failed = f", {row['failed']} failed" if row["answers"] and row["failed"] else ""
    spread = lambda key: f"{row[key]['p50']:.2f}, {row[key]['p95']:.2f}" if key in row else ""
    return {
        "clients": row["clients"],
        "way": row["mode"] + failed,
        "tokens/s of all": short(row["tokens_per_s"]) if row["answers"] else "none answered",
        "answer s, p50, p95": spread("answer_s"),
        "first token s, p50, p95": spread("first_token_s"),
    }


def _outage(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "link cut after": row["after"],
        "drafter": row["draft"],
        "tokens alone": short(row["tokens"]),
        "as the target's text": percent(row["agreement"]),
        "first other token": short(row["first_disagreement"]),
        "log-likelihood": short(row["log_likelihood"]),
        "target's own": short(row["own_log_likelihood"]),
    }


# ---- the picture --------------------------------------------------------------------------


def plot(document: dict[str, Any], path: Path) -> None:
    """Speed by network above; below it calls and bytes, and what outages cost if measured."""
    from matplotlib.figure import Figure

    with_outages = bool(document["outages"])
    figure = Figure(figsize=(10, 7), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    _speeds(top.subplots(), document["profiles"])
    panels = bottom.subplots(1, 3 if with_outages else 2)
    _costs(panels, document["profiles"])
    if with_outages:
        hues: dict[str, int] = {}  # a drafter has the colour of its first way
        for index, (_, rows) in enumerate(_by_way(document["profiles"])):
            hues.setdefault(rows[0]["draft"], index)
        _decline(panels[2], document["outages"], hues)
    handles, labels = top.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    save_figure(figure, path)


def _speeds(panel: Any, profiles: Sequence[dict[str, Any]]) -> None:
    """Bars of each way side by side, with their quartiles."""
    for index, (label, rows) in enumerate(_by_way(profiles)):
        width = 0.8 / len(profiles[0]["ways"])
        shift = (index - (len(profiles[0]["ways"]) - 1) / 2) * width
        heights = [row["tokens_per_s"] or 0 for row in rows]
        ends = [row["tokens_per_s_quartiles"] or (0, 0) for row in rows]
        spread = [
            [max(0, height - end[0]) for height, end in zip(heights, ends, strict=True)],
            [max(0, end[1] - height) for height, end in zip(heights, ends, strict=True)],
        ]
        whiskers = {"ecolor": "0.25", "elinewidth": 1, "capsize": 2}
        x = [place + shift for place in range(len(rows))]
        look = {"error_kw": whiskers, "label": LEGEND.get(label, label), "color": colour(index)}
        bars = panel.bar(x, heights, 0.92 * width, yerr=spread, **look)
        panel.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    names = [
        f"{profile['profile']}\n{profile['delay_ms']:g} ms, {100 * profile['loss']:g} % loss"
        for profile in profiles
    ]
    panel.set_xticks(range(len(profiles)), names)
    panel.set_ylabel("tokens/s")
    tidy(panel, "y")


def _costs(panels: Sequence[Any], profiles: Sequence[dict[str, Any]]) -> None:
    """Means over networks: what an answer costs the server, and the network."""
    found = list(_by_way(profiles))
    labels = [label for label, _ in found]
    mean = lambda rows, key: sum(row[key] for row in rows) / len(rows)
    for index, (_, rows) in enumerate(found):
        panels[0].barh(index, mean(rows, "target_passes"), color=colour(index))
        up, down = mean(rows, "bytes_up") / 1024, mean(rows, "bytes_down") / 1024
        panels[1].barh(index, down, color=colour(index))
        panels[1].barh(index, up, left=down, color=colour(index), alpha=0.45)
    panels[0].set_xlabel("target passes an answer")
    panels[1].set_xlabel("KiB an answer: down, and up (pale)")
    for panel in panels[:2]:
        panel.set_yticks(range(len(labels)), labels if panel is panels[0] else [""] * len(labels))
        panel.invert_yaxis()
        tidy(panel, "x")


def _decline(panel: Any, outages: Sequence[dict[str, Any]], hues: dict[str, int]) -> None:
    """How well a drafter goes on alone, by when its link died."""
    drafts = list(dict.fromkeys(row["draft"] for row in outages))
    for index, draft in enumerate(drafts):
        rows = [row for row in outages if row["draft"] == draft and row["answers"]]
        x = [row["after"] for row in rows]
        y, hue = [row["log_likelihood"] for row in rows], hues.get(draft, index + 2)
        panel.plot(x, y, "o-", color=colour(hue), label=draft)
        if not index:
            own = [row["own_log_likelihood"] for row in rows]
            panel.plot(x, own, "--", color="0.4", label="the target itself")
    panel.set_xlabel("tokens before the link died")
    panel.set_ylabel("log-likelihood a token alone")
    panel.legend(fontsize=8, frameon=False)
    tidy(panel, "y")


def _by_way(
    profiles: Sequence[dict[str, Any]],
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each way with its row of every network."""
    for index, row in enumerate(profiles[0]["ways"] if profiles else []):
        yield row["way"], [profile["ways"][index] for profile in profiles]
