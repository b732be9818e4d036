"""The results of `infer.bench --serve` in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.bench.tables import cut_line, percent, short, table_of


def render(document: Mapping[str, Any]) -> str:
    """All tables, with what they rest on."""
    settings, machine = document["settings"], document["machine"]
    stop = "to their limit" if settings["ignore_stop"] else "to their end"
    count = settings["servers_of_each_way"]
    left = f" ({settings['left_out']} too long)" if settings["left_out"] else ""
    parts = [
        cut_line(document, "rates"),
        f"{settings['questions']} questions of the suite {settings['suite']}{left}, answers {stop} "
        f"or {settings['max_new_tokens']} tokens, temperature {settings['temperature']:g}, "
        f"{settings['dtype']}, {settings['slots']} slots; {machine['device_kind']}, "
        f"{machine['cores']} cores for server and clients together"
        + (f"; {count} servers of each way" if count > 1 else ""),
        table_of([_capacity(server) for server in document["servers"]]),
        table_of([cells for rate in document["rates"] for cells in _rate(rate["ways"])]),
        table_of([cells for rate in document["rates"] for cells in _work(rate["ways"])]),
        "\n".join(_worst(found) for found in document["beside_plain"]),
        _compiled(document["rates"]),
        _differences(document["differences"]),
    ]
    return "\n\n".join(part for part in parts if part)


def shares(row: Mapping[str, Any]) -> str:
    """`plain 20 %, chain 3 80 %`: the rounds of each way, the most frequent first."""
    found = sorted(row["shares"].items(), key=lambda item: -item[1])
    return ", ".join(f"{way} {percent(share)}" for way, share in found) or "-"


def _capacity(server: Mapping[str, Any]) -> dict[str, str]:
    return {
        "all slots full": server["way"],
        "requests/s": short(server["requests_per_s"]),
        "tokens/s": _with_each(server["tokens_per_s"], server["each_tokens_per_s"]),
        "idle, of a core": percent(server["idle_cpu"], 1),
    }


def _with_each(mean: float, each: Sequence[float]) -> str:
    """`1100 (1080, 1120)`: the mean of several servers, and what each of them has."""
    return short(mean) + (f" ({', '.join(map(short, each))})" if len(each) > 1 else "")


def _rate(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """A line for each way at one rate, which the first line names."""
    for index, row in enumerate(rows):
        yield {
            "requests/s": "" if index else name_of_rate(row),
            "way": row["way"],
            "tokens/s": short(row["tokens_per_s"]),
            "over plain": short(row["throughput_over_plain"]),
            "first token ms, p50, p95": _both(row["first_token_ms"]),
            "ms a token": _both(row["ms_per_token"]),
            "latency s": _both(row["latency_s"]),
            "speedup": short(row["speedup"]),
            "of p95": short(row["p95_over_plain"]),
            "same text": _same(row),
        }


def _work(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    for index, row in enumerate(rows):
        yield {
            "requests/s": "" if index else name_of_rate(row),
            "way": row["way"],
            "tau": short(row["tau"]),
            "accepted": percent(row["acceptance_rate"]),
            "slots in use": short(row["slots_in_use"]),
            "waiting": short(row["waiting"]),
            "rounds": shares(row),
            "of prompts copied": percent(row["prefix_share"]),
        }


def name_of_rate(row: Mapping[str, Any]) -> str:
    """`2 clients`, or `1.5 (0.5x)` requests a second."""
    of_capacity, clients = row["of_capacity"], row["clients"]
    if clients:
        return f"{clients} client" + "s" * (clients > 1)
    return short(row["rate"]) + ("" if of_capacity is None else f" ({of_capacity:.3g}x)")


def _both(found: Mapping[str, float | None]) -> str:
    return f"{short(found['p50'])}, {short(found['p95'])}"


def _same(row: Mapping[str, Any]) -> str:
    failed = f", {row['failed']} FAILED" if row["failed"] else ""
    compared = row["compared"]
    return ("-" if compared is None else f"{compared - row['different']}/{compared}") + failed


def _worst(found: Mapping[str, Any]) -> str:
    return (
        f"{found['way']}: {_sure(found['speedup_at_lowest_rate'])} times as fast as plain at the "
        f"lowest rate; at worst {_sure(found['lowest_throughput_over_plain'])} of its throughput "
        f"and {_sure(found['lowest_p95_over_plain'])} times as fast at p95."
    )


def _sure(found: Mapping[str, Any]) -> str:
    """`0.98 (0.96 to 1.01)`: a figure, and what single repeats give."""
    known = [value for value in found["runs"] if value is not None]
    spread = f" ({short(min(known))} to {short(max(known))})" if len(known) > 1 else ""
    return short(found["value"]) + spread


def _compiled(rates: Sequence[Mapping[str, Any]]) -> str:
    count = sum(row["compiled"] for rate in rates for row in rate["ways"])
    return f"{count} programs WERE COMPILED while this was measured." if count else ""


def _differences(found: Sequence[Mapping[str, Any]]) -> str:
    return f"{len(found)} answers DIFFER from those of the first way." if found else ""
