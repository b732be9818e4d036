"""The decodings of a grid, and the report of their taus in Markdown."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from infer.bench.statistics import DRAWS, SHARE, TauCounts, interval_of, ratio
from infer.bench.tables import number, table_of, with_interval
from moa_jax.config import DraftShape, GridConfig
from moa_jax.pretrained import Target
from moa_jax.training.fingerprint import changes, fingerprint, listed

# Settings that a fair comparison shares; learning rates are chosen per cell.
SHARED = re.compile(r"(data|optim|run)\.(?!learning_rate:)")
HELD_OUT = "held-out"  # the prompts of the validation data, beside question sets
TERA = 1e12
# Of one decoding: tokens and rounds per prompt, and the number of rounds by tokens committed.
DecodedCounts = dict[str, list[int]]
Row = dict[str, Any]  # a trained cell and seed at its best learning rate
MEANING = """The learning rate with the highest `simulated_tau` counts. Tau: tokens per verification
over all rounds of up to {prompts} distinct held-out prompts that no cell was trained on, up to
{limit} tokens; past end: answers continue where the target would stop. Brackets hold {share:.0%} of
{draws:,} bootstrap draws of the prompts, which both drafters of a ratio share, and of the seeds."""
OF_SETS = """Questions: the first turns of {questions} questions of each of {sets}, all together;
columns of sets hold tau / tau over that of {reference}. Accepted: the share of rounds that accept
at least 1, 2, ... drafted tokens, and that of the rounds that accepted the token before, without
the last round of each answer; held-out prompts and questions together."""


class Decoding(NamedTuple):
    """The settings of one measurement of tau; `name` is its key in the files of a run."""

    shape: DraftShape
    temperature: float
    prompts_of: str  # HELD_OUT or a question set
    past_end: bool
    num_prompts: int
    max_new_tokens: int

    @property
    def name(self) -> str:
        how = f"temperature {self.temperature:g}" + ", past end" * self.past_end
        most = f"{self.num_prompts} prompts, {self.max_new_tokens} tokens"
        return f"{_name_of(self.shape)}, {how}, {self.prompts_of}, {most}"


def decodings_of(grid: GridConfig, cell: str) -> list[Decoding]:
    """All decodings of a cell, in their order; those of drafters without weights are chains."""
    shapes = [shape for shape in grid.shapes if shape.is_chain or cell not in grid.untrained]
    endings = (False, True) if grid.past_end else (False,)
    sizes = {HELD_OUT: grid.prompts} | dict.fromkeys(grid.sets, grid.questions)
    return [
        Decoding(shape, temperature, name, past_end, sizes[name], grid.max_new_tokens)
        for temperature, shape, past_end, name in itertools.product(
            grid.temperatures, shapes, endings, sizes
        )
    ]


def render(
    grid: GridConfig,
    rows: Sequence[Row],
    target: Target,
    sizes: Mapping[str, int],
    flops: Mapping[str, float] | None = None,
) -> str:
    """The report in Markdown: a table of the runs, settings that differ, and taus.

    `sizes` has the number of trainable parameters per cell, `flops` the FLOPs of its training.
    """
    by_rate = lambda taus: [f"{rate:g}: {number(tau)}" for rate, tau in sorted(taus.items())]
    columns = {
        "cell": "cell",
        "seed": "seed",
        "parameters": lambda row: f"{sizes.get(row['cell'], 0):,}",
        "learning rate": lambda row: f"{row['learning_rate']:g}",
        "simulated_tau by learning rate": lambda row: ", ".join(by_rate(row["taus"])),
    }
    if flops is not None:
        columns["training TFLOP"] = lambda row: f"{flops.get(row['cell'], 0) / TERA:,.0f}"
    parts = [f"# Drafters for {target.folder}", table_of(rows, columns)]
    parts += [*_at_an_end(grid, rows), *_differences(grid)]
    for temperature, shape in itertools.product(grid.temperatures, grid.shapes):
        tables = list(filter(None, _tables(grid, rows, temperature, shape)))
        title = _name_of(shape).capitalize() + f", temperature {temperature:g}"
        parts += [f"## {title if temperature else _name_of(shape).capitalize()}", *tables]
    limits = {"prompts": grid.prompts, "limit": grid.max_new_tokens}
    parts.append(MEANING.format(share=SHARE, draws=DRAWS, **limits))
    sets, named = ", ".join(grid.sets), {"questions": grid.questions, "reference": grid.reference}
    return "\n\n".join(parts + [OF_SETS.format(sets=sets, **named)] * bool(sets))


def _at_an_end(grid: GridConfig, rows: Sequence[Row]) -> list[str]:
    """A line that names the cells whose best learning rate is the lowest or highest of several."""
    ends = {min(grid.learning_rates), max(grid.learning_rates)} if grid.learning_rates[1:] else {}
    cells = [f"{row['cell']} (seed {row['seed']})" for row in rows if row["learning_rate"] in ends]
    return (
        [f"The best learning rate is at an end of the list: {', '.join(cells)}."] if cells else []
    )


def _differences(grid: GridConfig) -> list[str]:
    """A list of the settings in which cells differ from the reference, apart from the drafter."""
    reference = fingerprint(dict(grid.cells)[grid.reference])
    found = []
    for name, config in grid.cells:
        unlike = [each for each in changes(reference, config) if SHARED.match(each)]
        found += [f"- {name}: {listed(unlike)}"] if unlike else []
    return [f"Other settings than {grid.reference}:", "\n".join(found)] if found else []


def _name_of(shape: DraftShape) -> str:
    drawn = " sampled" * shape.sampled
    if shape.is_chain:
        return f"chain {shape.depth}{drawn}"
    sizes = shape.paths or f"{shape.depth}/{shape.breadth}/{shape.num_drafted}"
    return f"tree {sizes}{drawn}"


# ---- taus ---------------------------------------------------------------------------------


def _tables(
    grid: GridConfig, rows: Sequence[Row], temperature: float, shape: DraftShape
) -> list[str]:
    """The tables of one shape: taus with intervals; with question sets, each set and position."""
    cells = [*dict(grid.cells), *grid.untrained]

    def seeds_of(cell: str, past_end: bool, *prompts: str) -> list[DecodedCounts]:
        """The counts of these prompts per seed that has decoded all of them."""
        some = [
            each.name
            for each in decodings_of(grid, cell)
            if (each.temperature, each.shape, each.past_end) == (temperature, shape, past_end)
            and each.prompts_of in prompts
        ]
        found = [row["decodings"] for row in rows if row["cell"] == cell and some]
        return [_joined(each[name] for name in some) for each in found if {*some} <= {*each}]

    kinds: dict[str, tuple[Any, ...]] = {"tau": (False, HELD_OUT)}
    kinds |= {"tau past end": (True, HELD_OUT)} if grid.past_end else {}
    kinds |= {"questions": (False, *grid.sets)} if grid.sets else {}
    taus, details = [], []
    for cell in cells:
        found = {kind: seeds_of(cell, *chosen) for kind, chosen in kinds.items()}
        if not any(found.values()):
            continue
        taus.append({"cell": cell, "seeds": max(map(len, found.values()))})
        for kind, over in itertools.product(kinds, (grid.reference, *grid.over)):
            taus[-1] |= _taus(kind, over, found[kind], seeds_of(over, *kinds[kind]))
        details.append({"cell": cell})
        for name in grid.sets:
            ours, base = (_mean_tau(seeds_of(c, False, name)) for c in (cell, grid.reference))
            details[-1][name] = f"{number(ours)} / {number(ratio(ours, base))}"
        details[-1] |= _accepted(_joined(seeds_of(cell, False, HELD_OUT, *grid.sets)))
    return [table_of(taus), table_of(details) if grid.sets else ""]


def _joined(parts: Iterable[DecodedCounts]) -> DecodedCounts:
    """Tokens and rounds of all prompts, and the sums of rounds by tokens committed."""
    found: DecodedCounts = {"tokens": [], "rounds": [], "committed": []}
    for part in parts:
        found["tokens"] += part["tokens"]
        found["rounds"] += part["rounds"]
        pairs = itertools.zip_longest(found["committed"], part["committed"], fillvalue=0)
        found["committed"] = list(map(sum, pairs))
    return found


def _accepted(counts: DecodedCounts) -> dict[str, list[float | None]]:
    """The share of rounds that accept each position, and that given the position before."""
    reached = np.cumsum(counts["committed"][::-1])[::-1].tolist()  # rounds with at least 1, 2, ...
    return {
        "accepted by position": [ratio(some, reached[0]) for some in reached[1:]],
        "given the one before": list(map(ratio, reached[1:], reached)),
    }


def _read(counts: DecodedCounts) -> TauCounts:
    return TauCounts(np.array(counts["tokens"]), np.array(counts["rounds"]))


def _mean_tau(seeds: Sequence[DecodedCounts]) -> float | None:
    """The mean over seeds of the tau of all prompts."""
    taus = [ratio(float(t.sum()), float(r.sum())) for t, r in map(_read, seeds)]
    return float(np.mean(taus)) if taus and None not in taus else None


def _taus(
    name: str, reference: str, seeds: Sequence[DecodedCounts], base: Sequence[DecodedCounts]
) -> dict[str, str]:
    """The mean tau of `seeds` and its ratio to the mean tau of `base`, with intervals."""
    ours, theirs = ([*map(_read, each)] for each in (seeds, base))
    tau, of = _mean_tau(seeds), _mean_tau(base)
    within = interval_of(ours, theirs) if seeds and base and base != seeds else None
    return {
        name: with_interval(tau, interval_of(ours) if seeds else None),
        f"{name} / {reference}": with_interval(ratio(tau, of), within),
    }
