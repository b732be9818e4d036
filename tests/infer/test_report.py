"""The figures of a report from answers made by hand, with its tables and pictures."""

import json

import pytest

from infer.bench import paper, report
from infer.bench.answers import Answer
from infer.bench.suites import Question
from moa_jax import Result

CHAIN = "moa-chain"
SETTINGS: dict = {"target": {"name": "toy"}, "dtype": "float32", "device": "cpu"}
LEVELS = {"plain": 1, CHAIN: 3}
SETTINGS["models"] = {name: {"mode": name[-5:], "levels": count} for name, count in LEVELS.items()}
SETTINGS["answers"] = {"temperature": 0.0, "max_new_tokens": 512}


def turn(accept_lengths: list[int], prefill_s: float, decode_s: float, drafts: int) -> Result:
    tokens = list(range(1 + sum(accept_lengths)))
    drafted = [drafts] * len(accept_lengths)
    return Result([], tokens, "length", accept_lengths, prefill_s, decode_s, drafted)


def plain(tokens: int, decode_s: float) -> Result:
    return turn([1] * (tokens - 1), 1.0, decode_s, 0)


def question_of(name: str, number: int) -> Question:
    return Question(name, number, "", name, ("Hi",))


def answers() -> dict[Question, dict[str, Answer]]:
    """Returns answers: plain decoding takes 10, 20 and 7 seconds; the chain 5, 20 and 6."""
    return {
        question_of("humaneval", 1): {
            "plain": Answer([plain(7, 9.0)], ["a"]),
            CHAIN: Answer([turn([3, 3], 1.0, 4.0, 2)], ["a"]),
        },
        question_of("humaneval", 2): {
            "plain": Answer([plain(5, 9.0), plain(2, 9.0)], ["a", "b"]),
            CHAIN: Answer([turn([1, 2, 1], 1.0, 13.0, 2), turn([1], 1.0, 5.0, 2)], ["a", "b"]),
        },
        question_of("qa", 1): {
            "plain": Answer([plain(2, 6.0)], ["a"], too_long=2),
            CHAIN: Answer(
                [turn([1], 1.0, 5.0, 2)],
                ["a"],
                too_long=2,
                difference={"turn": 1, "index": 4, "plain": 8, "drafted": 9, "margin": 0.25},
            ),
        },
    }


@pytest.fixture
def document():
    left_out = {question_of("qa", 2): report.TOO_LONG, question_of("sum", 3): "of no use"}
    return report.document_of(answers(), left_out, SETTINGS)


def row_of(document, name: str, model: str = CHAIN) -> dict:
    (row,) = (r for r in document["rows"] if (r["set"], r["model"]) == (name, model))
    return row


def test_speed_is_that_of_questions_and_of_totals(document):
    row = row_of(document, "humaneval")
    assert row["speedup"] == pytest.approx(1.5)  # of 2 and 1
    assert row["speedup_quartiles"] == pytest.approx([1.25, 1.75])
    assert row["speedup_of_totals"] == pytest.approx(30 / 25)
    assert row["speedup_of_rounds"] == pytest.approx((9 / 4 + 18 / 18) / 2)
    everything = row_of(document, "all")
    assert everything["speedup"] == pytest.approx(7 / 6)  # of 2, 1 and 7/6
    assert everything["speedup_of_totals"] == pytest.approx(37 / 31)
    assert row_of(document, "all", "plain")["speedup"] == 1


def test_tau_is_that_of_rounds_and_of_questions(document):
    row = row_of(document, "humaneval")
    assert row["tau"] == pytest.approx(11 / 6)
    assert row["tau_of_questions"] == pytest.approx((3 + 5 / 4) / 2)
    assert (row["questions"], row["turns"], row["tokens"]) == (2, 3, 14)
    assert (row["rounds"], row["target_calls"]) == (6, 9)
    assert (row["repeated"], row["stopped"]) == (0, 0)
    calls = row_of(document, "humaneval", "plain")
    assert (calls["tau"], calls["rounds"], calls["target_calls"]) == (1, 11, 14)


def test_tau_is_compared_on_the_same_draws_of_questions():
    """The first drafter of equal shape is the reference; the other one needs twice the rounds."""
    other, tree = "other-chain", "other-tree"
    models = SETTINGS["models"] | {other: {"mode": "chain", "levels": 3}}
    settings = SETTINGS | {"models": models | {tree: {"mode": "tree", "levels": 3}}}
    found = answers()
    for each in found.values():
        slow = [turn([1, *r.accept_lengths[1:], 0] * 2, 1.0, 1.0, 2) for r in each[CHAIN].results]
        each |= {other: Answer(slow, each[CHAIN].texts), tree: each[CHAIN]}
    document = report.document_of(found, {}, settings)
    first, second, alone = (row_of(document, "all", name) for name in (CHAIN, other, tree))
    assert "tau_over" not in first and "tau_over" not in alone
    low, high = first["tau_interval"]
    assert low < first["tau"] == alone["tau"] < high
    assert second["tau_over"] == CHAIN
    assert second["tau_over_first"] == pytest.approx(second["tau"] / first["tau"])
    low, high = second["tau_over_first_interval"]
    assert low < second["tau_over_first"] < high < 1
    lines = report.render(document).splitlines()
    assert f"| {other} | {second['tau']:.2f} (" in "".join(lines)
    assert "tau_interval" not in row_of(document, "qa")


def test_acceptance_leaves_out_rounds_that_were_cut(document):
    """The last round of each turn is left out: of 3, 1 and 2 rounds, two accept a first draft."""
    row = row_of(document, "humaneval")
    assert row["acceptance_unconditional"] == pytest.approx([2 / 3, 1 / 3])
    assert row["acceptance_conditional"] == pytest.approx([2 / 3, 1 / 2])


def test_differences_and_skips_are_reported(document):
    assert row_of(document, "qa")["same_as_plain"] == 0
    assert row_of(document, "all")["same_as_plain"] == 2
    text = report.render(document)
    assert "1 answers DIFFER from plain decoding's:" in text
    assert "- moa-chain, qa 1 turn 1: token 4 is 9, plain 8; the target prefers plain's" in text
    assert "Skipped, too long for the target: 2 (qa 2, 1 (turn 2))." in text
    assert "Skipped, of no use: 1 (sum 3)." in text
    json.dumps(document, allow_nan=False)


def test_the_papers_figures_follow(document):
    lines = report.render(document).splitlines()
    assert "| decoder | humaneval | qa | all |" in lines
    assert "| moa-chain | 1.50x / 1.83 | 1.17x / 1.00 | 1.17x / 1.71 |" in lines
    assert "| paper: MoA N=0 | 2.28x / 4.98 | 1.72x / 3.73 | - |" in lines  # two sets have no mean
    assert not any("EAGLE-2" in line for line in lines)
    assert paper.cell(paper.MAIN, "gsm8k").endswith("?")
