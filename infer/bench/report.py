"""What a run's answers say: figures by set and decoder, and the tables that show them.

A question's rate is all its new tokens over all its seconds, those of prefill included, as in
Spec-Bench.

    speedup         median over questions of (rate / that of plain decoding), with quartiles
    ... of totals   plain decoding's seconds for all questions / those taken
    ... of rounds   the median again, of tokens after each first one over seconds after prefill
    tau             tokens after each first one / rounds, both summed over all questions
    ... of another  over the tau of the first drafter that drafts in the same mode
    ... a question  the mean over questions of their own tau
    target calls    prefills and rounds
    repeated        share of 8-grams that an answer has had before: loops flatter tau
    stopped         share of answers that ended by themselves
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from infer.bench import paper
from infer.bench.answers import Answer
from infer.bench.candidates import PLAIN
from infer.bench.decode_tables import precision
from infer.bench.statistics import (
    DRAWS,
    SHARE,
    TauCounts,
    acceptance,
    interval_of,
    median,
    quartiles,
)
from infer.bench.suites import PAPER, Question
from infer.bench.tables import cut_line, number, numbers, table_of, with_interval
from moa_jax.decode.exactness import Difference

Answered = Mapping[Question, Mapping[str, Answer]]  # each question's, by decoder
Row = dict[str, Any]
ALL = paper.ALL  # the set of the last rows
NGRAM = 8
MOST_COLUMNS = 12  # sets that a line has room for; all have a line of their own below
TOO_LONG = "too long for the target"
CAUTION = (
    "The rows of the paper are for reference: Llama-3-8B-Instruct, greedy, trees of 62 tokens, "
    "their questions and machine. In their chart the MT-bench and GSM8K figures of all MoA rows "
    "are the same numbers, so one of the two columns is wrong, and the means hold it (?)."
)


def document_of(
    answers: Answered, left_out: Mapping[Question, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole report: `rows`, one for each set and decoder, and what stands beside them.

    `left_out` says why a question was not asked at all.
    """
    groups: dict[str, list[Question]] = {}
    for question in answers:
        groups.setdefault(question.group, []).append(question)
    groups[ALL] = list(answers)
    rows = [
        _row(name, model, [answers[q] for q in questions], settings)
        for name, questions in groups.items()
        for model in settings["models"]
    ]
    cut = [(question, found[PLAIN].too_long, TOO_LONG) for question, found in answers.items()]
    skipped = [
        {"set": question.set, "question_id": question.id, "turn": turn, "why": why}
        for question, turn, why in [*((q, 1, why) for q, why in left_out.items()), *cut]
        if turn is not None
    ]
    differences = [
        {"set": question.set, "question_id": question.id, "model": model, **answer.difference}
        for question, found in answers.items()
        for model, answer in found.items()
        if answer.difference
    ]
    _compare(rows, answers, settings)
    papers = {m: {s: f._asdict() for s, f in each.items()} for m, each in paper.PAPER.items()}
    return {
        "rows": rows,
        "skipped": skipped,
        "differences": differences,
        "paper": papers if _is_papers(rows) else {},
        "settings": dict(settings),
    }


def _row(
    group: str, model: str, found: list[Mapping[str, Answer]], settings: Mapping[str, Any]
) -> Row:
    ours, plain = [each[model] for each in found], [each[PLAIN] for each in found]
    results = [result for answer in ours for result in answer.results]
    rounds = sum(answer.rounds for answer in ours)
    speedups = [_rate(a) / _rate(b) for a, b in zip(ours, plain, strict=True)]
    of_rounds = [
        _rate_of_rounds(a) / _rate_of_rounds(b)
        for a, b in zip(ours, plain, strict=True)
        if a.rounds and b.rounds
    ]
    own = [sum(answer.accept_lengths) / answer.rounds for answer in ours if answer.rounds]
    grams = [repeats(result.token_ids) for result in results]
    same = [answer.same_as_plain for answer in ours]  # None where they need not be the same
    shape = settings["models"][model]
    return {
        "set": group,
        "model": model,
        "mode": shape["mode"],
        "questions": len(ours),
        "turns": len(results),
        "tokens": sum(answer.tokens for answer in ours),
        "tau": sum(sum(a.accept_lengths) for a in ours) / rounds if rounds else None,
        "tau_of_questions": float(np.mean(own)) if own else None,
        "tokens_per_s": median([_rate(answer) for answer in ours]),
        "speedup": median(speedups),
        "speedup_quartiles": quartiles(speedups),
        "speedup_of_totals": sum(a.wall_s for a in plain) / sum(a.wall_s for a in ours),
        "speedup_of_rounds": median(of_rounds),
        **acceptance(results, shape["levels"]),
        "rounds": rounds,
        "target_calls": rounds + len(results),
        "repeated": sum(seen for seen, _ in grams) / max(sum(count for _, count in grams), 1),
        "stopped": sum(result.finish_reason == "stop" for result in results) / len(results),
        "same_as_plain": None if None in same else sum(same),
    }


def _compare(rows: list[Row], answers: Answered, settings: Mapping[str, Any]) -> None:
    """Adds to the last rows how sure their tau is, also as a share of the first one's."""
    modes = {model: shape["mode"] for model, shape in settings["models"].items()}
    for row in rows:
        if row["set"] == ALL and row["mode"] != PLAIN and row["rounds"]:
            first = next(model for model, mode in modes.items() if mode == row["mode"])
            ours, theirs = (_counts(answers, model) for model in (row["model"], first))
            row["tau_interval"] = interval_of([ours])
            if first != row["model"] and theirs.rounds_P.any():
                row["tau_over"] = first
                row["tau_over_first"] = _tau(ours) / _tau(theirs)
                row["tau_over_first_interval"] = interval_of([ours], [theirs])


def _counts(answers: Answered, model: str) -> TauCounts:
    found = [each[model] for each in answers.values()]
    tokens_P = np.array([sum(answer.accept_lengths) for answer in found])
    return TauCounts(tokens_P, np.array([answer.rounds for answer in found]))


def _tau(counts: TauCounts) -> float:
    return float(counts.tokens_P.sum() / counts.rounds_P.sum())


def repeats(tokens: list[int]) -> tuple[int, int]:
    """How many 8-grams of an answer it has had before, and how many it has."""
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return len(grams) - len(set(grams)), len(grams)


def _rate(answer: Answer) -> float:
    return answer.tokens / answer.wall_s


def _rate_of_rounds(answer: Answer) -> float:
    return sum(answer.accept_lengths) / sum(result.decode_s for result in answer.results)


def render(document: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    settings, rows = document["settings"], document["rows"]
    drafted = [row for row in rows if row["model"] != PLAIN]
    last = [row for row in drafted if row["set"] == ALL]
    positions = [
        {
            "decoder": row["model"],
            "of rounds that drafted it": numbers(row["acceptance_unconditional"]),
            "given the one before": numbers(row["acceptance_conditional"]),
        }
        for row in last
    ]
    answers = settings["answers"]
    how = "greedy" if not answers["temperature"] else f"temperature {answers['temperature']}"
    parts = [
        cut_line(document, "questions"),
        f"{settings['target']['name']}, {precision(settings)}, {settings['device']}, {how}, up to "
        f"{answers['max_new_tokens']} tokens a turn, one question at a time. Speedup over our "
        "own plain decoding / tau:",
        table_of(_overview(rows)),
        CAUTION if _is_papers(rows) else "",
        table_of([_detail(row, rows) for row in drafted]),
        f"Tau over all sets, with what {SHARE:.0%} of {DRAWS:,} draws of the questions hold:",
        table_of([_comparison(row) for row in last]),
        "Accepted drafts by position, over all sets:",
        table_of(positions),
        _skips(document["skipped"]),
        _sameness(document["differences"], last),
    ]
    return "\n\n".join(part for part in parts if part)


def _overview(rows: list[Row]) -> list[dict[str, str]]:
    """A line a decoder and a column a set, as the paper has it, and its own lines below.

    Of very many sets, as sources of conversations are, only the column of all.
    """
    sets = list(dict.fromkeys(row["set"] for row in rows))
    sets = sets if len(sets) <= MOST_COLUMNS else [ALL]
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model and row["set"] in sets]
        found.append({"decoder": model, **{row["set"]: _cell(row) for row in own}})
    if _is_papers(rows):
        for method in paper.PAPER:
            cells = {name: _papers_cell(method, name, rows) for name in sets}
            if set(cells.values()) != {"-"}:
                found.append({"decoder": f"paper: {method}", **cells})
    return found


def _cell(row: Row) -> str:
    if row["model"] == PLAIN:
        return f"{number(row['tokens_per_s'], 1)} tokens/s"
    return f"{number(row['speedup'])}x / {number(row['tau'])}"


def _papers_cell(method: str, name: str, rows: list[Row]) -> str:
    """Their mean is over six sets: it is no reference for some of them."""
    if name == ALL and not {row["set"] for row in rows} >= set(PAPER):
        return "-"
    return paper.cell(method, name)


def _is_papers(rows: list[Row]) -> bool:
    """Whether there is a set of theirs."""
    return any(row["set"] in PAPER for row in rows)


def _detail(row: Row, rows: list[Row]) -> dict[str, str]:
    low, high = row["speedup_quartiles"]
    same = row["same_as_plain"]
    cells = {
        "set": row["set"],
        "decoder": row["model"],
        "questions": str(row["questions"]),
        "tau": number(row["tau"]),
        "tau a question": number(row["tau_of_questions"]),
        "speedup (quartiles)": f"{number(row['speedup'])} ({number(low)} to {number(high)})",
        "of totals": number(row["speedup_of_totals"]),
        "of rounds": number(row["speedup_of_rounds"]),
        "accepted of drafted": number(row["acceptance_rate"]),
        "rounds": str(row["rounds"]),
        "target calls": str(row["target_calls"]),
        "repeated": number(row["repeated"]),
        "stopped": number(row["stopped"]),
        "same as plain": "-" if same is None else f"{same}/{row['questions']}",
    }
    if _is_papers(rows):
        cells[f"paper, {paper.MAIN}"] = _papers_cell(paper.MAIN, row["set"], rows)
    return cells


def _comparison(row: Row) -> dict[str, str]:
    share = "-"
    if first := row.get("tau_over"):
        found = with_interval(row["tau_over_first"], row["tau_over_first_interval"])
        share = f"{found} of {first}"
    tau = with_interval(row["tau"], row.get("tau_interval"))
    return {"decoder": row["model"], "tau": tau, "share": share}


def _skips(skipped: list[dict[str, Any]]) -> str:
    """A line a reason, with the questions of each set."""
    lines = []
    for why in dict.fromkeys(each["why"] for each in skipped):
        ids: dict[str, list[str]] = {}
        for each in skipped:
            if each["why"] == why:
                turn = f" (turn {each['turn']})" if each["turn"] > 1 else ""
                ids.setdefault(each["set"], []).append(f"{each['question_id']}{turn}")
        places = "; ".join(f"{name} {', '.join(found)}" for name, found in ids.items())
        lines.append(f"Skipped, {why}: {sum(map(len, ids.values()))} ({places}).")
    return "\n".join(lines)


def _sameness(differences: list[dict[str, Any]], last: list[Row]) -> str:
    if any(row["same_as_plain"] is None for row in last):
        return "Answers are not comparable with plain decoding's: candidates were drawn."
    if not differences:
        answers = sum(row["questions"] for row in last)
        return f"Each of the {answers} drafted answers is the same as plain decoding's."
    lines = [f"{len(differences)} answers DIFFER from plain decoding's:"]
    for each in differences:
        where = f"{each['set']} {each['question_id']} turn {each['turn']}"
        difference = Difference(*(each[name] for name in Difference._fields))
        lines.append(f"- {each['model']}, {where}: {difference}")
    return "\n".join(lines)
