"""Renders the results of infer.bench in Markdown."""

from __future__ import annotations

from typing import Any

from infer.bench.tables import Row, TableColumn, cut_line, percent, precision, quartiled, table_of


def name_of(row: Row) -> str:
    """The name of a row: `plain`, `chain 5`, `tree 7/8/62`."""
    sizes = {"plain": "", "auto": "", "chain": f" {row['depth']}"}
    shape = sizes.get(row["mode"], f" {row['depth']}/{row['breadth']}/{row['total_tokens']}")
    return row["mode"] + shape + (" (simulated)" if row.get("simulated") else "")


def _same(row: Row) -> str:
    compared = "answers" in row and not row.get("simulated")
    return f"{row['same_as_plain']}/{row['answers']}" if compared else "-"


SPEED: dict[str, TableColumn] = {
    "mode": name_of,
    "tokens/s": quartiled("tokens_per_s", 1),
    "speedup": quartiled("speedup"),
    "of totals": "speedup_of_totals",
    "tau": "tau",
    "rounds": "rounds",
    "ms/round": ("ms_per_round", 3),
    "same as plain": _same,
}
ACCEPTANCE: dict[str, TableColumn] = {
    "mode": name_of,
    "accepted of drafted": "acceptance_rate",
    "by position, of rounds that drafted it": "acceptance_unconditional",
    "given the one before": "acceptance_conditional",
}
PHASES: dict[str, TableColumn] = {
    "mode": "mode",
    "phase": "phase",
    "ms": ("ms", 3),
    "MB read": lambda row: f"{row['bytes'] / 1e6:.1f}",
    "of bandwidth": lambda row: percent(row["share_of_bandwidth"]),
}
SUMS: dict[str, TableColumn] = {
    "mode": name_of,
    "sum of phases, ms": ("sum_of_phases_ms", 3),
    "ms/round": ("ms_per_round", 3),
    "host ms a generation": ("host_ms_per_generation", 3),
    "programs": "num_compiled",
}
COSTS: dict[str, TableColumn] = {
    "a round of": name_of,
    "batch": "batch",
    "ms, as auto knows it": ("ms", 3),
}
PEERS: dict[str, TableColumn] = {
    "peer": "peer",
    "tokens/s": quartiled("tokens_per_s", 1),
    "tau": "tau",
    "our plain is faster by": "plain_over_peer",
    "same as plain": _same,
    "same as the first row": "same_as_first_peer",
    "accepted by position, of drafts": "acceptance_unconditional",
}


def render(document: dict[str, Any]) -> str:
    """The tables of a document, with models, device and settings."""
    modes, machine, settings = (document[key] for key in ("modes", "machine", "settings"))
    phased = [row for row in modes if "phases" in row]
    chance, cost = settings["simulated_acceptance"], document.get("weights_cost")
    parts = [
        f"{settings['target']} + {settings['draft']}, {precision(settings)}, "
        f"{machine['device_kind']}, copies {machine['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s; "
        f"{settings['prompts']} prompts, batch {settings['batch']}, {settings['repeats']} repeats"
    ]
    if chance is not None:
        parts.append(f"SIMULATED: drafts are accepted with probability {chance}, by dice.")
    if settings["random_weights"]:
        parts.append("RANDOM WEIGHTS: times and bytes are real, what is accepted is chance.")
    parts += [
        cut_line(document, "runs"),
        table_of(modes, SPEED),
        table_of([row for row in modes if row["acceptance_rate"] is not None], ACCEPTANCE),
        table_of(
            [
                {"mode": name_of(row), "phase": phase, **each}
                for row in phased
                for phase, each in row["phases"].items()
            ],
            PHASES,
        ),
        table_of(phased, SUMS),
        table_of([each for row in modes for each in row.get("costs", ())], COSTS),
        table_of(document["peers"], PEERS),
    ]
    if cost:
        parts.append(
            f"{settings['weights']} beside stored weights, {cost['tokens']} tokens of answers in "
            f"{cost['conversations']} conversations: KL {cost['mean_kl']:.5f} nats a token, at "
            f"most {cost['worst_kl']:.3f}; the same most likely token in "
            f"{percent(cost['agreement'], 2)}"
        )
    return "\n\n".join(part for part in parts if part)
