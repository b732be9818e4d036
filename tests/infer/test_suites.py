"""Question sets: the questions of every --suite, and one line for an invalid question."""

import json
from pathlib import Path

import pytest

from infer.bench import suites
from moa_jax.data import sources
from tests.model_folders import refusal

GOOD = {"question_id": 1, "category": "qa", "turns": ["Who?", "And why?"]}


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return path


def test_the_demo_needs_no_data(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_DATA", str(tmp_path / "none"))
    questions = suites.load_suite("demo")
    assert len(questions) <= 12
    assert [*dict.fromkeys(q.set for q in questions)] == [f"demo-{name}" for name in suites.PAPER]
    assert all(q.group == q.set for q in questions)
    assert any(len(q.turns) == 2 for q in questions)


def test_what_is_left_out_makes_room_for_the_next():
    questions = [suites.Question(name, i, "", name, ("Hi",)) for name in "ab" for i in range(4)]
    why_not = lambda question: "first" if question.id == 0 else None
    chosen, left_out = suites.choose(questions, 2, why_not)
    assert [(q.set, q.id) for q in chosen] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert left_out == {questions[0]: "first", questions[4]: "first"}
    assert len(suites.choose(questions, None, why_not)[0]) == 6


def test_sets_below_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_DATA", str(tmp_path))
    for name in suites.PAPER:
        write(tmp_path / "specbench" / name / "question.jsonl", GOOD)
    talk = GOOD | {"category": "roleplay"}
    rag = GOOD | {"question_id": "b", "category": "rag"}
    write(tmp_path / "specbench" / "spec_bench" / "question.jsonl", talk, rag)
    assert [q.set for q in suites.load_suite("paper")] == list(suites.PAPER)
    assert [q.set for q in suites.load_suite("qa,mt_bench")] == ["qa", "mt_bench"]
    groups = [q.group for q in suites.load_suite("spec_bench")]
    assert groups == ["spec_bench/multi_turn", "spec_bench/rag"]
    (question,) = suites.load_suite("qa")
    assert question == suites.Question("qa", 1, "qa", "qa", ("Who?", "And why?"))
    (tmp_path / "specbench" / "qa" / "question.jsonl").unlink()
    line = refusal(suites.load_suite, "paper")
    assert "no file or folder" in line and "specbench/qa/question.jsonl" in line
    assert "two sets are named gsm8k" in refusal(suites.load_suite, "gsm8k,gsm8k")
    said = refusal(suites.load_suite, "nothing")
    assert "--suite nothing: no such set or file; choose from" in said
    monkeypatch.setenv("MOA_DATA", str(tmp_path / "gone"))
    assert "set MOA_DATA" in refusal(suites.load_suite, "gsm8k")


def test_a_file_is_a_set_of_its_own_name(tmp_path):
    write(tmp_path / "mine" / "question.jsonl", GOOD)
    file = write(tmp_path / "others.jsonl", GOOD)
    both = suites.load_suite(f"{tmp_path}/mine,{file}")
    assert [q.set for q in both] == ["mine", "others"]
    assert suites.digest(both[:1]) != suites.digest(both[1:])


INVALID = {
    " is not JSON": "{'question_id'\n",
    " is not a JSON object": "[]\n",
    ": no `question_id`": {"turns": ["Hi"]},
    ": a question without turns": {"question_id": 2, "turns": []},
    ": a turn is empty": {"question_id": 2, "turns": ["Hi", " "]},
    ": question_id 1 is there twice": GOOD,
}


@pytest.mark.parametrize("fault", INVALID)
def test_a_line_that_is_no_question_is_named(tmp_path, fault):
    file = write(tmp_path / "a.jsonl", GOOD, "\n", INVALID[fault])
    assert f"{file} line 3{fault}" in refusal(suites.load_suite, str(file))


NEWS = {"article": " A cat was found. ", "highlights": "Cat found.", "id": "ab12"}
TYPED = {"question": {"text": "who wrote emma", "tokens": []}, "id": "7"}
SUM = {"question": "Two and two?", "answer": "#### 4"}


def test_public_data_is_converted_to_questions(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, config, **rest):
        asked.append((name, config, rest["split"]))
        return iter({"gsm8k": [SUM] * 3, "cnn_dailymail": [NEWS] * 3}[name.split("/")[-1]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    questions = suites.load_suite("hub:openai/gsm8k:main/test,hub:cnn_dailymail:3.0.0/test", 2)
    assert asked == [("openai/gsm8k", "main", "test"), ("cnn_dailymail", "3.0.0", "test")]
    texts = {"gsm8k": "Two and two?", "cnn_dailymail": "Summarize: A cat was found."}
    wanted = [(name, number, text) for name, text in texts.items() for number in (1, 2)]
    assert [(q.set, q.id, *q.turns) for q in questions] == wanted


def test_public_data_of_tensorflow_datasets(monkeypatch):
    monkeypatch.setattr(sources, "_open_tfds", lambda name: [TYPED, {"label": 3}])
    questions = suites.load_suite("tfds:natural_questions/default/validation", 1)
    assert [(q.set, *q.turns) for q in questions] == [("natural_questions", "Who wrote emma?")]
    line = refusal(suites.load_suite, "tfds:natural_questions/default/validation")
    assert "validation record 2: a question without turns" in line
