"""The report of a grid: what its figures rest on, and how it reads."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from infer.bench.statistics import DRAWS, SHARE, Interval, TauCounts, interval_of
from infer.bench.tables import table, with_interval
from moa_jax.training.fingerprint import listed

ENDINGS = {"tau": None, "tau_past_end": []}  # the stop ids of each tau; None: the target's own
# The prompts of reports that do not say what they are.
FORMER_PROMPTS = "first turns, some of them there twice or trained on"
FIRST = 3  # drafted positions whose acceptance is told one by one
Document = dict[str, Any]  # as report.json has it; train.grid fills it


class Tau(NamedTuple):
    """Tokens per verification over all rounds of all prompts.

    Earlier versions stored the first number alone.
    """

    value: float
    tokens_P: np.ndarray | None = None  # by prompt
    rounds_P: np.ndarray | None = None
    reached: tuple[int, ...] = ()  # rounds that came to each of the first positions
    accepted: tuple[int, ...] = ()  # and those of them that accepted its token


class Decoded(NamedTuple):
    """The prompts decoded with one drafter: for each shape the taus by the names of ENDINGS."""

    prompts: int
    taus: list[dict[str, Tau]]


def interval(tau: Tau, base: Tau | None = None) -> Interval | None:
    """Where tau lies in most draws of as many prompts; with `base`, its ratio to that one's.

    None where the counts of prompts are not known.
    """
    return interval_over_seeds([tau], [base] if base else [])


def interval_over_seeds(taus: Sequence[Tau], bases: Sequence[Tau] = ()) -> Interval | None:
    """The same of the mean of some seeds, and of its ratio to that of others."""
    if any(tau.tokens_P is None for tau in (*taus, *bases)):
        return None
    ours, theirs = ([TauCounts(t.tokens_P, t.rounds_P) for t in each] for each in (taus, bases))
    return interval_of(ours, theirs)


def figures(tau: Tau, base: Tau | None) -> dict[str, Any]:
    """What the report says of one tau, `base` being the reference's."""
    known = tau.tokens_P is not None
    return {
        "tau": tau.value,
        "interval": interval(tau),
        "tokens": int(tau.tokens_P.sum()) if known else None,
        "rounds": int(tau.rounds_P.sum()) if known else None,
        "tokens/rounds_by_prompt": _pairs_of(tau.tokens_P, tau.rounds_P) if known else None,
        "accepted/reached_by_position": _pairs_of(tau.accepted, tau.reached) or None,
        "of_reference": base and tau.value / base.value,
        "of_reference_interval": None if base is None or base is tau else interval(tau, base),
    }


def tau_of(said: dict[str, Any]) -> Tau:
    """The inverse of `figures`; reports of earlier versions have fewer counts."""
    if not said.get("tokens/rounds_by_prompt"):
        return Tau(float(said["tau"]))
    accepted, reached = _counts_of(said.get("accepted/reached_by_position") or "")
    by_prompt = (np.array(counts) for counts in _counts_of(said["tokens/rounds_by_prompt"]))
    return Tau(float(said["tau"]), *by_prompt, reached, accepted)


def over_seeds(taus: Sequence[Tau], bases: Sequence[Tau]) -> dict[str, Any]:
    """What the report says of the seeds of a cell, `bases` being those of the reference."""
    mean = float(np.mean([tau.value for tau in taus]))
    base = float(np.mean([tau.value for tau in bases])) if bases else None
    same = len(taus) == len(bases) and all(map(operator.is_, taus, bases))
    return {
        "tau": mean,
        "interval": interval_over_seeds(taus),
        "of_reference": base and mean / base,
        "of_reference_interval": interval_over_seeds(taus, bases) if bases and not same else None,
    }


def render(document: Document) -> str:
    """The report in Markdown; what is missing of the grid is said below the first table."""
    rows, reference = document["rows"], document["reference"]
    trained = [
        [row["cell"], row["seed"], f"{row['parameters']:,}", f"{row['learning_rate']:g}"]
        + [f"{row['simulated_tau']:.2f}", _pairs(_by_rate(row["simulated_tau_by_learning_rate"]))]
        for row in rows
    ]
    columns = ["cell", "seed", "parameters", "learning rate", "simulated tau", "at rates tried"]
    parts = [
        f"# Drafters for {document['target']['path']}, trained alike",
        f"    {document['command']}",
        _conditions(document),
        table(columns, trained),
        *_devices(rows),
        *_reports(rows),
    ]
    if document["missing"]:
        parts.append(f"Not trained yet: {', '.join(document['missing'])}.")
    group = ["tokens / rounds", f"of {reference}"]
    columns = ["cell", "seed", "tau", *group, "tau past end", *group]
    for index, shape in enumerate(document["shapes"]):
        lines = [[row["cell"], row["seed"], *_taus(row["decoded"], index)] for row in rows]
        parts += [f"## {shape.capitalize()}", table(columns, lines)]
        parts += _of_all_seeds(document, index)
    parts += _first_positions(document)
    files = [[name, f"{f['bytes']:,}", f["sha256"]] for name, f in document["files"].items()]
    notes = [f"- {note}" for note in document.get("notes", ())]
    parts += [
        _meaning(document),
        *(["## What is shown, and what is not", "\n".join(notes)] if notes else []),
        "## Files",
        table(["file", "bytes", "SHA-256"], files),
    ]
    return "\n\n".join([*parts, f"Versions: {_pairs(document['versions'])}."])


def _reports(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which rows are of earlier reports, and which of these are yet to be decoded."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if report := row.get("report"):
            said = f"Trained and decoded earlier, for {report}"
            if not row["decoded"]:
                said = f"Trained earlier, for {report}, and not decoded as here"
            found.setdefault(said, []).append(f"{row['cell']} (seed {row['seed']})")
    return [f"{said}: {', '.join(names)}." for said, names in found.items()]


def _devices(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Which rows were trained on what, as far as reports and runs say it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.get("trained_on") or "", []).append(f"{row['cell']} ({row['seed']})")
    unknown = ", ".join(found.pop("", []))
    said = [f"on {device}: {', '.join(names)}" for device, names in found.items()]
    return [f"Trained {'; '.join(said)}; not recorded: {unknown or 'none'}."] if said else []


def _conditions(document: Document) -> str:
    shared = document["shared"]
    free = [
        f"{name} ({listed(different) or 'in parameters'})"
        for name, different in document["unmatched"].items()
    ]
    return (
        f"Every drafter gets {shared['optim.total_steps']} updates of "
        f"{shared['data.rows_per_batch']} rows of {shared['data.row_length']} tokens in "
        f"{shared['run.dtype']} and has as many trainable parameters as {document['reference']}, "
        f"within {document['tolerance']:.0%}. Of the learning rates tried the one with the highest "
        "simulated tau counts." + (f" Beside the match: {', '.join(free)}." if free else "")
    )


def _meaning(document: Document) -> str:
    numbers = sorted({row["prompts"] for row in document["rows"] if row["prompts"]})
    prompts = " or ".join(map(str, numbers)) or f"up to {document['prompts']}"
    return (
        f"Tau: tokens per verification over all rounds of {prompts} held-out prompts "
        f"({document.get('prompts_are', FORMER_PROMPTS)}), greedy, up to "
        f"{document['max_new_tokens']} tokens; past end, to all of these whatever the target would "
        f"stop at. In brackets what {SHARE:.0%} of {DRAWS:,} bootstrap draws of the prompts "
        "hold, for a ratio the same prompts in both drafters; other seeds and data are not in it. "
        "`-`: decoded before the counts of each prompt were stored."
        + (" For means of seeds the seeds are drawn, too." if document.get("over_seeds") else "")
    )


def _of_all_seeds(document: Document, index: int) -> list[str]:
    """The means of cells with more than one seed, for one shape."""
    lines = []
    for mean in document.get("over_seeds", ()):
        line = [mean["cell"], ", ".join(map(str, mean["seeds"]))]
        for key in ENDINGS:
            found = mean["decoded"][index][key]
            line.append(with_interval(found["tau"], found["interval"], 2))
            ratio = found["of_reference"]
            within = found["of_reference_interval"]
            line.append("" if ratio is None else with_interval(ratio, within, 2))
        lines.append(line)
    ratio = f"of {document['reference']}"
    columns = ["mean of", "seeds", "tau", ratio, "tau past end", ratio]
    return [table(columns, lines)] if lines else []


def _first_positions(document: Document) -> list[str]:
    """How often the first drafted tokens are accepted, of the rounds that come to them."""
    keys = [(index, key) for index in range(len(document["shapes"])) for key in ENDINGS]
    lines = []
    for row in document["rows"]:
        said = [row["decoded"][index][key] if row["decoded"] else {} for index, key in keys]
        found = [each.get("accepted/reached_by_position") for each in said]
        if any(found):
            lines.append([row["cell"], row["seed"], *map(_shares, found)])
    if not lines:
        return []
    columns = [f"{shape}{end}" for shape in document["shapes"] for end in ("", ", past end")]
    return [
        "## The first positions",
        f"Shares of the rounds which come to the first {FIRST} drafted positions (of a tree: "
        "levels) that accept one there; the last round of each answer, which may be cut, is left "
        "out.",
        table(["cell", "seed", *columns], lines),
    ]


def _shares(counts: str | None) -> str:
    pairs = zip(*_counts_of(counts or ""), strict=True)
    return " ".join(f"{accepted / reached:.2f}" if reached else "-" for accepted, reached in pairs)


def _taus(decoded: list[dict[str, Any]] | None, index: int) -> Iterator[str]:
    for key in ENDINGS:
        if decoded is None:
            yield from ("", "", "")
            continue
        found = decoded[index][key]
        yield with_interval(found["tau"], found["interval"], 1)
        yield f"{found['tokens']} / {found['rounds']}" if found["rounds"] is not None else "-"
        ratio = found["of_reference"]
        yield "" if ratio is None else with_interval(ratio, found["of_reference_interval"], 2)


def _pairs_of(ones: Iterable[int], others: Iterable[int]) -> str:
    """On one line, as JSON would give each number a line."""
    return " ".join(f"{one}/{other}" for one, other in zip(ones, others, strict=True))


def _counts_of(pairs: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The inverse of `_pairs_of`."""
    found = [pair.split("/") for pair in pairs.split()]
    return tuple(int(one) for one, _ in found), tuple(int(other) for _, other in found)


def _by_rate(taus: dict[str, float]) -> dict[str, float]:
    """In the order of learning rates, of which JSON keeps that of their names."""
    return dict(sorted(taus.items(), key=lambda each: float(each[0])))


def _pairs(values: dict[str, Any]) -> str:
    shown = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in values.items()}
    return ", ".join(f"{name}: {value}" for name, value in shown.items())
