"""The report of a grid in Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from infer.bench.statistics import DRAWS, SHARE, TauCounts, interval_of
from infer.bench.tables import number, table_of, with_interval
from moa_jax.config import DraftShape, GridConfig
from moa_jax.pretrained import Target
from moa_jax.training.fingerprint import changes, fingerprint, listed

# Settings that a fair comparison shares; learning rates are chosen per cell.
SHARED = re.compile(r"(data|optim|run)\.(?!learning_rate:)")
ENDINGS = {"tau": None, "tau_past_end": []}  # stop ids per tau; None: the target's own
DecodedCounts = dict[str, list[int]]  # tokens and rounds per prompt, of one shape and ending
Row = dict[str, Any]  # a trained cell and seed at its best learning rate
MEANING = """The learning rate with the highest `simulated_tau` counts. Tau: tokens per verification
over all rounds of up to {prompts} distinct held-out prompts that no cell was trained on, greedy, up
to {limit} tokens; past end: answers continue where the target would stop. Brackets hold {share:.0%}
of {draws:,} bootstrap draws of the prompts, which both drafters of a ratio share, and of the
seeds."""


def render(grid: GridConfig, rows: Sequence[Row], target: Target, sizes: Mapping[str, int]) -> str:
    """The report in Markdown: a table of the runs, settings that differ, and tau per shape.

    `sizes` has the number of trainable parameters per cell.
    """
    by_rate = lambda taus: [f"{rate:g}: {number(tau)}" for rate, tau in sorted(taus.items())]
    columns = {
        "cell": "cell",
        "seed": "seed",
        "parameters": lambda row: f"{sizes[row['cell']]:,}",
        "learning rate": lambda row: f"{row['learning_rate']:g}",
        "simulated_tau by learning rate": lambda row: ", ".join(by_rate(row["taus"])),
    }
    parts = [f"# Drafters for {target.folder}", table_of(rows, columns), *_differences(grid)]
    of = lambda name: [row["decoded"] for row in rows if row["cell"] == name and row["decoded"]]
    decoded = {name: of(name) for name, _ in grid.cells}
    for index, shape in enumerate(grid.shapes):
        taus = []
        for name, seeds in decoded.items():
            base, cells = decoded[grid.reference], {"cell": name, "seeds": len(seeds)}
            for ending in ENDINGS if seeds else ():
                counts = ([each[index][ending] for each in some] for some in (seeds, base))
                cells |= _taus(ending.replace("_", " "), grid.reference, *counts)
            taus += [cells] if seeds else []
        parts += [f"## {_name_of(shape).capitalize()}", table_of(taus)]
    limits = {"prompts": grid.prompts, "limit": grid.max_new_tokens}
    return "\n\n".join([*parts, MEANING.format(share=SHARE, draws=DRAWS, **limits)])


def _differences(grid: GridConfig) -> list[str]:
    """A list of the settings in which cells differ from the reference, apart from the drafter."""
    reference = fingerprint(dict(grid.cells)[grid.reference])
    found = []
    for name, config in grid.cells:
        unlike = [each for each in changes(reference, config) if SHARED.match(each)]
        found += [f"- {name}: {listed(unlike)}"] if unlike else []
    return [f"Other settings than {grid.reference}:", "\n".join(found)] if found else []


def _name_of(shape: DraftShape) -> str:
    if shape.is_chain:
        return f"chain {shape.depth}"
    return f"tree {shape.depth}/{shape.breadth}/{shape.num_drafted}"


def _taus(
    name: str, reference: str, seeds: Sequence[DecodedCounts], base: Sequence[DecodedCounts]
) -> dict[str, str]:
    """The mean tau of `seeds` and its ratio to the mean tau of `base`, with intervals."""
    read = lambda counts: TauCounts(np.array(counts["tokens"]), np.array(counts["rounds"]))
    ours, theirs = ([read(counts) for counts in each] for each in (seeds, base))
    tau, of = (float(np.mean([t.sum() / r.sum() for t, r in s] or np.nan)) for s in (ours, theirs))
    within = interval_of(ours, theirs) if base and base != seeds else None
    return {
        name: with_interval(tau, interval_of(ours)),
        f"{name} / {reference}": with_interval(tau / of if base else None, within),
    }
