"""The report of infer.evaluate: figures by set and candidate, and their tables.

A question's rate is all its new tokens over all its seconds, including prefill, as in Spec-Bench.

    speedup         median over questions of (rate / that of plain decoding), with quartiles
    ... of totals   plain decoding's seconds for all questions / the candidate's seconds
    ... of rounds   the same median for (tokens after the first / seconds after prefill)
    tau             tokens after the first / rounds, both summed over all questions
    ... of another  tau / tau of the first drafter with the same mode
    ... a question  mean over questions of the question's tau
    target calls    prefills and rounds
    repeated        share of 8-grams that repeat within an answer; loops inflate tau
    stopped         share of answers with finish reason "stop"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from infer.bench import paper
from infer.bench.answers import Answer
from infer.bench.candidates import PLAIN
from infer.bench.paper import ALL
from infer.bench.statistics import (
    DRAWS,
    SHARE,
    TauCounts,
    acceptance,
    interval_of,
    median,
    quartiles,
    ratio,
)
from infer.bench.suites import PAPER, Question
from infer.bench.tables import (
    TableColumn,
    cut_line,
    number,
    precision,
    quartiled,
    table_of,
    with_interval,
)
from moa_jax.decode.exactness import Difference
from moa_jax.decode.session import Result

Answered = Mapping[Question, Mapping[str, Answer]]  # question -> candidate -> answer
Row = dict[str, Any]
NGRAM = 8
MOST_COLUMNS = 12  # most sets as columns; the detailed table has a line per set
TOO_LONG = "too long for the target"
CAUTION = (
    "The rows of the paper are for reference: Llama-3-8B-Instruct, greedy, trees of 62 tokens, "
    "their questions and machine. In their chart the MT-bench and GSM8K figures of all MoA rows "
    "are the same numbers, so one of the two columns is wrong, and the means hold it (?)."
)


class QuestionTotals(NamedTuple):
    """Sums over turns per question, (Q,); committed tokens exclude the first token per turn."""

    tokens_Q: np.ndarray
    wall_Q: np.ndarray
    committed_Q: np.ndarray
    rounds_Q: np.ndarray
    decode_Q: np.ndarray


def document_of(
    answers: Answered, left_out: Mapping[Question, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The complete report: `rows`, one per set and candidate, and the other keys.

    `left_out` maps skipped questions to the reason.
    """
    groups: dict[str, list[Question]] = {}
    for question in answers:
        groups.setdefault(question.group, []).append(question)
    groups[ALL] = list(answers)
    rows = [
        _row(name, model, [answers[question] for question in questions], settings)
        for name, questions in groups.items()
        for model in settings["models"]
    ]
    _add_intervals(rows[-len(settings["models"]) :], answers)
    cut = [(question, found[PLAIN].too_long, TOO_LONG) for question, found in answers.items()]
    return {
        "rows": rows,
        "skipped": [
            {"set": question.set, "question_id": question.id, "turn": turn, "why": why}
            for question, turn, why in [*((q, 1, why) for q, why in left_out.items()), *cut]
            if turn is not None
        ],
        "differences": [
            {"set": question.set, "question_id": question.id, "model": model, **answer.difference}
            for question, found in answers.items()
            for model, answer in found.items()
            if answer.difference
        ],
        "paper": paper.PAPER if any(row["set"] in PAPER for row in rows) else {},
        "settings": dict(settings),
    }


def _row(
    group: str, model: str, found: Sequence[Mapping[str, Answer]], settings: Mapping[str, Any]
) -> Row:
    answers = [each[model] for each in found]
    ours, plain = _totals(answers), _totals([each[PLAIN] for each in found])
    results = [result for answer in answers for result in answer.results]
    rate_Q = ours.tokens_Q / ours.wall_Q
    speedup_Q = rate_Q * plain.wall_Q / plain.tokens_Q
    own_Q, both_Q = ours.rounds_Q > 0, (ours.rounds_Q > 0) & (plain.rounds_Q > 0)
    rates = [(each.committed_Q[both_Q] / each.decode_Q[both_Q]) for each in (ours, plain)]
    taus = ours.committed_Q[own_Q] / ours.rounds_Q[own_Q]
    rounds, grams = int(ours.rounds_Q.sum()), [repeats(each.token_ids) for each in results]
    same = [answer.same_as_plain for answer in answers]  # None where answers may differ
    shape = settings["models"][model]
    return {
        "set": group,
        "model": model,
        "mode": shape["mode"],
        "questions": len(answers),
        "turns": len(results),
        "tokens": int(ours.tokens_Q.sum()),
        "tau": ratio(float(ours.committed_Q.sum()), rounds),
        "tau_of_questions": float(taus.mean()) if len(taus) else None,
        "tokens_per_s": median(rate_Q),
        "speedup": median(speedup_Q),
        "speedup_quartiles": quartiles(speedup_Q),
        "speedup_of_totals": float(plain.wall_Q.sum() / ours.wall_Q.sum()),
        "speedup_of_rounds": median(rates[0] / rates[1]),
        **acceptance(results, shape["levels"]),
        "rounds": rounds,
        "target_calls": rounds + len(results),
        "repeated": sum(seen for seen, _ in grams) / max(sum(count for _, count in grams), 1),
        "stopped": sum(result.finish_reason == "stop" for result in results) / len(results),
        "same_as_plain": None if None in same else sum(same),
    }


def _totals(answers: Sequence[Answer]) -> QuestionTotals:
    def total(of: Callable[[Result], float]) -> np.ndarray:
        return np.array([sum(map(of, answer.results)) for answer in answers])

    return QuestionTotals(
        total(lambda result: len(result.token_ids)),
        total(lambda result: result.prefill_s + result.decode_s),
        total(lambda result: sum(result.accept_lengths)),
        total(lambda result: result.rounds),
        total(lambda result: result.decode_s),
    )


def _add_intervals(rows: Iterable[Row], answers: Answered) -> None:
    """Adds intervals of tau, and of tau over the first drafter's with the same mode.

    `rows` are those of all sets.
    """
    firsts: dict[str, Row] = {}
    counts: dict[str, TauCounts] = {}
    for row in rows:
        model, first = row["model"], firsts.setdefault(row["mode"], row)
        totals = _totals([each[model] for each in answers.values()])
        counts[model] = TauCounts(totals.committed_Q, totals.rounds_Q)
        if row["mode"] != PLAIN and row["rounds"]:
            row["tau_interval"] = interval_of([counts[model]])
            if first is not row and first["tau"] is not None:
                row["tau_over"] = first["model"]
                row["tau_over_first"] = row["tau"] / first["tau"]
                bases = [counts[first["model"]]]
                row["tau_over_first_interval"] = interval_of([counts[model]], bases)


def repeats(tokens: list[int]) -> tuple[int, int]:
    """The number of repeated 8-grams in an answer, and the number of all its 8-grams."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return len(grams) - len(set(grams)), len(grams)


# ---- tables -------------------------------------------------------------------------------


DETAILS: dict[str, TableColumn] = {
    "set": "set",
    "decoder": "model",
    "questions": "questions",
    "tau": "tau",
    "tau a question": "tau_of_questions",
    "speedup (quartiles)": quartiled("speedup"),
    "of totals": "speedup_of_totals",
    "of rounds": "speedup_of_rounds",
    "accepted of drafted": "acceptance_rate",
    "rounds": "rounds",
    "target calls": "target_calls",
    "repeated": "repeated",
    "stopped": "stopped",
    "same as plain": lambda row: _same(row),
}
COMPARISON: dict[str, TableColumn] = {
    "decoder": "model",
    "tau": lambda row: with_interval(row["tau"], row.get("tau_interval")),
    "share": lambda row: _share(row),
    "accepted by position, of rounds that drafted it": "acceptance_unconditional",
    "given the one before": "acceptance_conditional",
}


def render(document: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    settings, rows = document["settings"], document["rows"]
    drafted = [row for row in rows if row["model"] != PLAIN]
    last = [row for row in drafted if row["set"] == ALL]
    is_papers = any(row["set"] in PAPER for row in rows)
    papers: dict[str, TableColumn] = {
        f"paper, {paper.MAIN}": lambda row: _papers_cell(paper.MAIN, row["set"], rows)
    }
    answers = settings["answers"]
    how = "greedy" if not answers["temperature"] else f"temperature {answers['temperature']}"
    parts = [
        cut_line(document, "questions"),
        f"{settings['target']['name']}, {precision(settings)}, {settings['device']}, {how}, up to "
        f"{answers['max_new_tokens']} tokens a turn, one question at a time. Speedup over our "
        "own plain decoding / tau:",
        table_of(_overview(rows, paper.PAPER if is_papers else ())),
        CAUTION if is_papers else "",
        table_of(drafted, DETAILS | (papers if is_papers else {})),
        f"Tau over all sets, with what {SHARE:.0%} of {DRAWS:,} draws of the questions hold:",
        table_of(last, COMPARISON),
        _skips(document["skipped"]),
        _sameness(document["differences"], last),
    ]
    return "\n\n".join(part for part in parts if part)


def _overview(rows: Sequence[Row], methods: Iterable[str]) -> list[Row]:
    """A line per candidate and a column per set, as in the paper, then the paper's lines.

    With more than MOST_COLUMNS sets, such as sources of conversations, only the column of all sets.
    """
    sets = list(dict.fromkeys(row["set"] for row in rows))
    sets = sets if len(sets) <= MOST_COLUMNS else [ALL]
    found: dict[str, Row] = {}
    for row in rows:
        cell = f"{number(row['speedup'])}x / {number(row['tau'])}"
        if row["model"] == PLAIN:
            cell = f"{number(row['tokens_per_s'], 1)} tokens/s"
        if row["set"] in sets:
            found.setdefault(row["model"], {"decoder": row["model"]})[row["set"]] = cell
    for method in methods:
        cells = {name: _papers_cell(method, name, rows) for name in sets}
        if {*cells.values()} != {"-"}:
            found[method] = {"decoder": f"paper: {method}", **cells}
    return list(found.values())


def _papers_cell(method: str, name: str, rows: Sequence[Row]) -> str:
    """The paper's figures; the paper's mean is shown only if all six sets are present."""
    has_all = {row["set"] for row in rows} >= {*PAPER}
    return paper.cell(method, name) if name != ALL or has_all else "-"


def _same(row: Row) -> str:
    same = row["same_as_plain"]
    return "-" if same is None else f"{same}/{row['questions']}"


def _share(row: Row) -> str:
    share = with_interval(row.get("tau_over_first"), row.get("tau_over_first_interval"))
    return f"{share} of {row['tau_over']}" if "tau_over" in row else "-"


def _skips(skipped: list[dict[str, Any]]) -> str:
    """A line per reason, with its questions by set."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for each in skipped:
        turn = f" (turn {each['turn']})" if each["turn"] > 1 else ""
        sets = reasons.setdefault(each["why"], {})
        sets.setdefault(each["set"], []).append(f"{each['question_id']}{turn}")
    lines = []
    for why, sets in reasons.items():
        places = "; ".join(f"{name} {', '.join(ids)}" for name, ids in sets.items())
        lines.append(f"Skipped, {why}: {sum(map(len, sets.values()))} ({places}).")
    return "\n".join(lines)


def _sameness(differences: list[dict[str, Any]], last: list[Row]) -> str:
    if any(row["same_as_plain"] is None for row in last):
        return "Answers are not comparable with plain decoding's: candidates were drawn."
    if not differences:
        answers = sum(row["questions"] for row in last)
        return f"Each of the {answers} drafted answers is the same as plain decoding's."
    lines = [f"{len(differences)} answers DIFFER from plain decoding's:"]
    for each in differences:
        difference = Difference(*(each[name] for name in Difference._fields))
        where = f"{each['set']} {each['question_id']} turn {each['turn']}"
        lines.append(f"- {each['model']}, {where}: {difference}")
    return "\n".join(lines)
