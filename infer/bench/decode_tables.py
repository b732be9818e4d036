"""The results of infer.bench in Markdown."""

from __future__ import annotations

from typing import Any

from infer.bench.tables import (
    cut_line,
    number,
    numbers,
    percent,
    precision,
    table_of,
    with_quartiles,
)

Row = dict[str, Any]


def render(document: dict[str, Any]) -> str:
    """The tables of a document, and what they rest on."""
    modes, machine, settings = (document[key] for key in ("modes", "machine", "settings"))
    phased = [row for row in modes if "phases" in row]
    chance, cost = settings["simulated_acceptance"], document.get("weights_cost")
    parts = [
        f"{settings['target']} + {settings['draft']}, {precision(settings)}, "
        f"{machine['device_kind']}, copies {machine['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s; "
        f"{settings['prompts']} prompts, batch {settings['batch']}, {settings['repeats']} repeats",
        f"SIMULATED: drafts are accepted with probability {chance}, by dice."
        if chance is not None
        else "",
        "RANDOM WEIGHTS: times and bytes are real, what is accepted is chance."
        if settings["random_weights"]
        else "",
        cut_line(document, "runs"),
        table_of([_speed(row) for row in modes]),
        table_of([_acceptance(row) for row in modes if row["acceptance_rate"] is not None]),
        table_of([cells for row in phased for cells in _phases(row)]),
        table_of([_memory(row) for row in phased]),
        table_of([_cost(cost) for row in modes for cost in row.get("costs", ())]),
        table_of([_peer(row) for row in document["peers"]]),
        _weights_cost(cost, settings) if cost else "",
    ]
    return "\n\n".join(part for part in parts if part)


def name_of(row: Row) -> str:
    """`plain`, `chain 5`, `tree 7/8/62`."""
    sizes = {"plain": "", "auto": "", "chain": f" {row['depth']}"}
    shape = sizes.get(row["mode"], f" {row['depth']}/{row['breadth']}/{row['total_tokens']}")
    return row["mode"] + shape + (" (simulated)" if row.get("simulated") else "")


def _speed(row: Row) -> dict[str, str]:
    compared = "answers" in row and not row["simulated"]
    return {
        "mode": name_of(row),
        "tokens/s": with_quartiles(row, "tokens_per_s", 1),
        "speedup": with_quartiles(row, "speedup", 2),
        "of totals": number(row.get("speedup_of_totals")),
        "tau": number(row["tau"]),
        "rounds": str(row["rounds"]),
        "ms/round": number(row["ms_per_round"], 3),
        "same as plain": f"{row['same_as_plain']}/{row['answers']}" if compared else "-",
    }


def _acceptance(row: Row) -> dict[str, str]:
    return {
        "mode": name_of(row),
        "accepted of drafted": number(row["acceptance_rate"]),
        "by position, of rounds that drafted it": numbers(row["acceptance_unconditional"]),
        "given the one before": numbers(row["acceptance_conditional"]),
    }


def _phases(row: Row) -> list[dict[str, str]]:
    return [
        {
            "mode": name_of(row),
            "phase": phase,
            "ms": number(cost["ms"], 3),
            "MB read": number(cost["bytes"] / 1e6, 1),
            "of bandwidth": percent(cost["share_of_bandwidth"]),
        }
        for phase, cost in row["phases"].items()
    ]


def _memory(row: Row) -> dict[str, str]:
    return {
        "mode": name_of(row),
        "sum of phases, ms": number(row["sum_of_phases_ms"], 3),
        "ms/round": number(row["ms_per_round"], 3),
        "host ms a generation": number(row["host_ms_per_generation"], 3),
        "host transfers": str(row["host_transfers_in_generation"]),
        "programs": str(row["num_compiled"]),
        "program MB": number(row["program_bytes"] / 1e6, 1),
        "over weights + caches": number(row["memory_over_weights_and_caches"]),
    }


def _cost(cost: Row) -> dict[str, str]:
    return {
        "a round of": name_of(cost),
        "batch": str(cost["batch"]),
        "ms, as auto knows it": number(cost["ms"], 3),
    }


def _peer(row: Row) -> dict[str, str]:
    return {
        "peer": row["peer"],
        "tokens/s": with_quartiles(row, "tokens_per_s", 1),
        "tau": number(row["tau"]),
        "our plain is faster by": number(row["plain_over_peer"]),
        "same as plain": f"{row['same_as_plain']}/{row['answers']}",
    }


def _weights_cost(cost: Row, settings: Row) -> str:
    return (
        f"{settings['weights']} beside stored weights, {cost['tokens']} tokens of answers in "
        f"{cost['conversations']} conversations: KL {cost['mean_kl']:.5f} nats a token, at most "
        f"{cost['worst_kl']:.3f}; the same most likely token in {percent(cost['agreement'], 2)}"
    )
