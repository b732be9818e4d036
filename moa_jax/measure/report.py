"""The results of infer.bench in Markdown, and the runs of other software as a row beside ours."""

from __future__ import annotations

from typing import Any

from moa_jax.measure.figures import Rates, Run, median, quartiles, rates_of, ratios_of
from moa_jax.measure.tables import cut_line, number, numbers, percent, table_of


def peer_row(peer: dict[str, Any], plain: list[Run]) -> dict[str, Any]:
    """Speed and tau of other software, and in how many prompts it wrote what ours wrote."""
    runs = [run for run in peer["runs"] if run["passes"]]
    rates: Rates = {}
    for run in runs:
        rates.setdefault(run["batch"], []).append(run["tokens"] / run["seconds"])
    flat = [rate for each in rates.values() for rate in each]
    passes = sum(run["passes"] for run in runs)
    ours = {run.batch: run.answers[0] for run in plain}
    theirs = {run["batch"]: run["token_ids"] for run in peer["runs"]}
    return {
        "peer": peer["peer"],
        "tokens_per_s": median(flat),
        "tokens_per_s_quartiles": quartiles(flat),
        "tau": sum(run["tokens"] for run in runs) / passes if passes else None,
        "same_as_plain": sum(ours[batch] == tokens for batch, tokens in theirs.items()),
        "answers": len(theirs),
        "plain_over_peer": median(ratios_of(rates_of(plain), rates)),
    }


def render(document: dict[str, Any]) -> str:
    """The tables of a document, with what they rest on."""
    modes, machine, settings = (document[key] for key in ("modes", "machine", "settings"))
    gigabytes = machine["bandwidth_bytes_per_s"] / 1e9
    parts = [
        f"{settings['target']} + {settings['draft']}, {precision(settings)}, "
        f"{machine['device_kind']}, copies {gigabytes:.0f} GB/s; {settings['prompts']} prompts, "
        f"batch {settings['batch']}, {settings['repeats']} repeats",
        table_of([_speed_row(row) for row in modes]),
        table_of([_acceptance_row(row) for row in modes if row["acceptance_rate"] is not None]),
        table_of([cells for row in modes if "phases" in row for cells in _phase_rows(row)]),
        table_of([_cost_row(row) for row in modes if "phases" in row]),
        table_of([_unit_row(row) for row in modes if "unit_ms" in row]),
        table_of([cells for row in modes for cells in _round_rows(row.get("costs", []))]),
        table_of([_peer_cells(row) for row in document["peers"]]),
        _weights_cost(document.get("weights_cost"), settings),
    ]
    parts.insert(1, cut_line(document, "runs"))
    if settings["random_weights"]:
        parts.insert(1, "RANDOM WEIGHTS: times and bytes are real, what is accepted is chance.")
    if settings["simulated_acceptance"] is not None:
        chance = settings["simulated_acceptance"]
        parts.insert(1, f"SIMULATED: drafts are accepted with probability {chance}, by dice.")
    return "\n\n".join(part for part in parts if part)


def precision(settings: dict[str, Any]) -> str:
    """`float32`, `bfloat16 with int8 weights`."""
    weights = settings.get("weights")
    return settings["dtype"] + (f" with {weights} weights" if weights else "")


def _weights_cost(cost: dict[str, Any] | None, settings: dict[str, Any]) -> str:
    if cost is None:
        return ""
    return (
        f"{settings['weights']} beside stored weights, {cost['tokens']} tokens of answers in "
        f"{cost['conversations']} conversations: KL {cost['mean_kl']:.5f} nats a token, at most "
        f"{cost['worst_kl']:.3f}; the same likeliest token in {percent(cost['agreement'], 2)}"
    )


def name_of(row: dict[str, Any]) -> str:
    """`plain`, `chain 5`, `tree 7/8/62`."""
    sizes = {"plain": "", "auto": "", "chain": str(row["depth"])}
    shape = sizes.get(row["mode"], f"{row['depth']}/{row['breadth']}/{row['total_tokens']}")
    return f"{row['mode']} {shape}".strip() + (" (simulated)" if row.get("simulated") else "")


def _speed_row(row: dict[str, Any]) -> dict[str, str]:
    same = f"{row['same_as_plain']}/{row['answers']}" if "answers" in row else "-"
    return {
        "mode": name_of(row),
        "tokens/s": with_quartiles(row, "tokens_per_s", 1),
        "speedup": with_quartiles(row, "speedup", 2),
        "of totals": number(row.get("speedup_of_totals"), 2),
        "tau": number(row["tau"], 2),
        "rounds": str(row["rounds"]),
        "ms/round": number(row["ms_per_round"], 3),
        "same as plain": "-" if row["simulated"] else same,
    }


def _acceptance_row(row: dict[str, Any]) -> dict[str, str]:
    return {
        "mode": name_of(row),
        "accepted of drafted": number(row["acceptance_rate"], 2),
        "by position, of rounds that drafted it": numbers(row["acceptance_unconditional"]),
        "given the one before": numbers(row["acceptance_conditional"]),
    }


def _phase_rows(row: dict[str, Any]) -> list[dict[str, str]]:
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


def _cost_row(row: dict[str, Any]) -> dict[str, str]:
    return {
        "mode": name_of(row),
        "sum of phases, ms": number(row["sum_of_phases_ms"], 3),
        "ms/round": number(row["ms_per_round"], 3),
        "host ms a generation": number(row["host_ms_per_generation"], 3),
        "host transfers": str(row["host_transfers_in_generation"]),
        "programs": str(row["num_compiled"]),
        "program MB": number(row["program_bytes"] / 1e6, 1),
        "over weights + caches": number(row["memory_over_weights_and_caches"], 2),
    }


def _unit_row(row: dict[str, Any]) -> dict[str, str]:
    """A unit is a float32 sweep of one row over the target's matrices, by stock products."""
    passes = row["pass_units"].items()
    return {
        "unit, ms": number(row["unit_ms"], 3),
        "plain round, units": number(row["round_units"], 2),
    } | {f"pass over {rows} rows": number(units, 2) for rows, units in passes}


def _round_rows(costs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What mode auto chooses by."""
    return [
        {
            "a round of": name_of(cost),
            "batch": str(cost["batch"]),
            "ms, as auto knows it": number(cost["ms"], 3),
        }
        for cost in costs
    ]


def _peer_cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "peer": row["peer"],
        "tokens/s": with_quartiles(row, "tokens_per_s", 1),
        "tau": number(row["tau"], 2),
        "our plain is faster by": number(row["plain_over_peer"], 2),
        "same as plain": f"{row['same_as_plain']}/{row['answers']}",
    }


def with_quartiles(row: dict[str, Any], key: str, digits: int) -> str:
    """`1.52 (1.44 to 1.61)`: a median, and its quartiles where they are known."""
    quartiles = row.get(f"{key}_quartiles")
    shown = number(row[key], digits)
    if quartiles is None:
        return shown
    return f"{shown} ({' to '.join(number(each, digits) for each in quartiles)})"
