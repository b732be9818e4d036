"""Measures a drafter on conversations: one row per source, and one line for unusable records."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from infer import evaluate
from infer.bench import conversations, report
from infer.cli.flags.pair import DEMO
from moa_jax import InputError
from moa_jax.data import chat
from moa_jax.data.tokenizer import load_tokenizer

ANSWER = {"role": "assistant", "content": "Yes."}


def question(text: str) -> dict:
    return {"role": "user", "content": text}


def write(path: Path, *records: dict) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def pair(talkative) -> list[str]:
    """Returns flags of a small random pair."""
    return ["--target", str(talkative / "target"), "--draft", str(talkative / "draft")]


@pytest.mark.slow
def test_every_source_has_a_row(pair, capsys, tmp_path):
    talks = [("a#shop", "Hello!"), ("b#shop", "A cheap hotel."), (3, "Balance?"), ("all", "Hi!")]
    records = [{"source": s, "messages": [question(text), ANSWER]} for s, text in talks]
    long = {"messages": [question("1" * 400), ANSWER]}
    file = write(tmp_path / "talks.jsonl", *records, long, {"messages": [question("Milk!")]})
    flags = [*pair, "--conversations", file, "--max-new-tokens", "16"]
    evaluate.main([*flags, "--json", "--output", str(tmp_path / "run")])
    found = json.loads(capsys.readouterr().out)
    drafted = [row for row in found["rows"] if row["model"] != "plain"]
    counts = [("shop", 2), ("3", 1), ("#all", 1), ("none", 1), ("all", 5)]
    assert [(row["set"], row["questions"]) for row in drafted] == counts
    assert all(row["same_as_plain"] == row["questions"] for row in drafted)
    assert all(0 <= row[share] <= 1 for row in drafted for share in ("repeated", "stopped"))
    (left_out,) = found["skipped"]
    assert left_out["question_id"] == 5 and "longer than 256 tokens" in left_out["why"]
    text = (tmp_path / "run" / "report.md").read_text()
    assert "| shop | draft-chain | 2 |" in text and "| repeated | stopped | same as plain |" in text


def test_a_question_follows_its_history(tmp_path):
    talk = [question("Hi"), ANSWER, question("Beer?"), ANSWER]
    records = [{"source": "x#bar", "messages": talk}]
    records.append({"source": "x#alpaca", "messages": talk, "tools": [{"name": "look"}]})
    file = write(tmp_path / "talks.jsonl", *records)
    first, second = conversations.questions_of(file, ())
    assert (first.group, first.turns, first.history) == ("bar", ("Hi",), ())
    assert second.kwargs() == {"tools": [{"name": "look"}]} and first.kwargs() == {}
    assert second.group == "#alpaca"  # the name of a set of the paper
    assert second.turns == ("Beer?",) and second.history == (("user", "Hi"), ("assistant", "Yes."))
    assert [q.group for q in conversations.questions_of(file, ["bar"])] == ["bar"]
    tokenizer = load_tokenizer(DEMO / "target")
    args = Namespace(conversations=file, sources="")
    prompts = [prompt for _, prompt in conversations.prompts_of(args, tokenizer, 256)]
    assert prompts[1] == chat.prompt_ids(tokenizer, talk[:3])


BAD = {
    "a record without a user message": ANSWER,
    "a message without text": question(" "),
    "a message with reasoning": question("Hi") | {"reasoning": "Hm."},
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_record_is_left_out_and_named(tmp_path, capsys, fault):
    """Other questions keep their numbers."""
    hello, record = {"messages": [question("Hi")]}, {"messages": [BAD[fault]]}
    file = write(tmp_path / "talks.jsonl", hello, record, hello)
    Path(file).write_text("\n" + Path(file).read_text())
    assert [each.id for each in conversations.questions_of(file, ())] == [1, 3]
    line = capsys.readouterr().err
    assert line.startswith(f"1 of 3 records left out: {fault}") and "line 3)" in line
    with pytest.raises(InputError, match=f"none of 1 records .* of 1: {fault}"):
        list(conversations.questions_of(write(tmp_path / "bad.jsonl", record), ()))


def test_repeated_grams_are_counted():
    assert report.repeats(list(range(20))) == (0, 13)
    assert report.repeats([1, 2] * 8) == (7, 9)
    assert report.repeats([1, 2, 3]) == (0, 0)
