"""The report of a grid, as JSON and as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infer.bench.statistics import DRAWS, SHARE, TauCounts, interval_of
from infer.bench.tables import number, table_of, with_interval
from moa_jax.config import GridConfig
from moa_jax.pretrained import Target
from moa_jax.training.fingerprint import fingerprint
from moa_jax.version import __version__
from train.run.grid_decoding import ENDINGS, FIRST, DecodedCounts, decoding_of, split
from train.run.grid_runs import ALIKE, facts, inputs_of

Row = dict[str, Any]  # a row of report.json: a cell and seed at its best learning rate
MEANING = """Tau: tokens per verification over all rounds of up to {prompts} held-out prompts
({prompts_are}), greedy, up to {max_new_tokens} tokens; past end: whatever the target would stop at.
Brackets hold {share:.0%} of {draws:,} bootstrap draws of the prompts, the same for both drafters of
a ratio, and of the seeds of a line with several. First positions: of the rounds that come to each
of the first {first} drafted positions (tree levels), the share that accepts a token there, without
the last round of each answer."""


def document_of(
    grid: GridConfig, rows: Sequence[Row], target: Target, sizes: Mapping[str, int], config: str
) -> dict[str, Any]:
    """The report as JSON types; `sizes` are trainable parameters by cell, `config` a file path."""
    reference = dict(grid.cells)[grid.reference]
    seeds: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["decoded"]:
            seeds.setdefault(row["cell"], {})[row["seed"]] = row
    base = seeds.get(grid.reference, {})
    given = {config: facts(Path(config))} if Path(config).is_file() else {}
    wanted = itertools.product(dict(grid.cells), grid.seeds)
    there = {(row["cell"], row["seed"]) for row in rows}
    return {
        "command": f"python -m train.grid --config {config}",
        "versions": {"moa-jax": __version__, "jax": jax.__version__},
        "target": reference.target,
        "files": given | inputs_of(grid, target),
        "reference": grid.reference,
        "unmatched": list(grid.unmatched),
        "shared": {n: v for n, v in fingerprint(reference).items() if n.startswith(ALIKE)},
        "tolerance": grid.tolerance,
        **decoding_of(grid),
        "rows": [
            row | {"parameters": sizes[row["cell"]], "decoded": compared([row], base)}
            for row in rows
        ],
        "over_seeds": [
            {"cell": name, "seeds": [*of], "decoded": compared([*of.values()], base)}
            for name, of in seeds.items()
            if len(of) > 1
        ],
        "missing": [f"{cell} (seed {seed})" for cell, seed in wanted if (cell, seed) not in there],
    }


def compared(rows: Sequence[Row], base: Mapping[int, Row]) -> list[dict[str, Any]] | None:
    """Per shape and ending, `figures` of some seeds of a cell; None if they are not decoded.

    A single seed is compared with the same seed of the reference, several seeds with all of the
    reference's seeds.
    """
    if not rows[0]["decoded"]:
        return None
    same = [base[row["seed"]] for row in rows if row["seed"] in base]
    bases = same if len(rows) == 1 else [*base.values()]
    of = lambda rows, index, ending: [row["decoded"][index][ending] for row in rows]
    return [
        {ending: figures(of(rows, index, ending), of(bases, index, ending)) for ending in ENDINGS}
        for index in range(len(rows[0]["decoded"]))
    ]


def figures(seeds: Sequence[DecodedCounts], bases: Sequence[DecodedCounts]) -> dict[str, Any]:
    """The mean tau of `seeds` and its ratio to the mean tau of `bases`, with intervals.

    The result for a single seed also holds the counts of that seed.
    """
    read = lambda counts: TauCounts(*map(np.array, split(counts["tokens/rounds_by_prompt"])))
    ours, theirs = ([read(counts) for counts in each] for each in (seeds, bases))
    tau, base = (float(np.mean([t.sum() / r.sum() for t, r in s] or 0)) for s in (ours, theirs))
    tokens, rounds = (int(counts.sum()) for counts in ours[0])
    return (seeds[0] | {"tokens": tokens, "rounds": rounds} if len(seeds) == 1 else {}) | {
        "tau": tau,
        "interval": interval_of(ours),
        "of_reference": tau / base if bases else None,
        "of_reference_interval": interval_of(ours, theirs) if bases and bases != seeds else None,
    }


def render(document: Mapping[str, Any]) -> str:
    """The report in Markdown: a table of the runs, and a table of tau per shape."""
    rows, shared, reference = document["rows"], document["shared"], document["reference"]
    runs = [
        {
            "cell": row["cell"],
            "seed": row["seed"],
            "parameters": f"{row['parameters']:,}",
            "learning rate": f"{row['learning_rate']:g}",
            "simulated tau by learning rate": _by_rate(row["simulated_tau_by_learning_rate"]),
            "trained on": row["trained_on"],
            "in report": row["report"] or "",
        }
        for row in rows
    ]
    parts = [
        f"# Drafters for {document['target']}, trained alike",
        f"    {document['command']}",
        f"{shared['optim.total_steps']} updates of {shared['data.rows_per_batch']} rows of "
        f"{shared['data.row_length']} tokens in {shared['run.dtype']}. Parameters are those of "
        f"{reference} within {document['tolerance']:.0%}, but for: "
        f"{', '.join(document['unmatched']) or 'none'}. The learning rate with the highest "
        f"simulated tau counts. Not trained yet: {', '.join(document['missing']) or 'none'}.",
        table_of(runs),
    ]
    for index, shape in enumerate(document["shapes"]):
        taus = [
            {
                "cell": each["cell"],
                "seed": ", ".join(map(str, each.get("seeds", [each.get("seed")]))),
            }
            | _cells(each["decoded"][index], reference)
            for each in [*rows, *document["over_seeds"]]
            if each["decoded"]
        ]
        parts += [f"## {shape.capitalize()}", table_of(taus)]
    files = [{"file": name, **document["files"][name]} for name in sorted(document["files"])]
    versions = ", ".join(map(" ".join, document["versions"].items()))
    meaning = MEANING.format(share=SHARE, draws=DRAWS, first=FIRST, **document)
    return "\n\n".join([*parts, meaning, table_of(files), f"Versions: {versions}."])


def _cells(decoded: Mapping[str, Any], reference: str) -> dict[str, str]:
    """Tau, its ratio and the first positions of one drafter and shape, for both endings."""
    cells = {}
    for ending, found in decoded.items():
        ratio, within = found["of_reference"], found["of_reference_interval"]
        name, counts = ending.replace("_", " "), found.get("accepted/reached_by_position", "")
        pairs = (map(int, pair.split("/")) for pair in counts.split())
        shares = [f"{some / all_:.2f}" if all_ else "-" for some, all_ in pairs]
        cells[name] = with_interval(found["tau"], found["interval"])
        cells[f"{name} / {reference}"] = with_interval(ratio, within)
        cells[f"{name}: first positions"] = " ".join(shares)
    return cells


def _by_rate(taus: Mapping[str, float]) -> str:
    """Formats tau by learning rate in numeric order, which the sorted keys of JSON do not keep."""
    ordered = sorted(taus.items(), key=lambda item: float(item[0]))
    return ", ".join(f"{rate}: {number(tau)}" for rate, tau in ordered)
