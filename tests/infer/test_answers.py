"""Answer files have Spec-Bench's format, survive a crash, and belong to one run."""

import json

import pytest

from infer.bench.answers import Answer, AnswerFolder
from infer.bench.suites import Question
from moa_jax import Result
from tests.model_folders import refusal

MODELS = ("plain", "moa-chain")
SETTINGS = {"dtype": "float32", "models": {name: {} for name in MODELS}}
QUESTIONS = [Question("qa", i, "trivia", "qa", ("Who?", "Why?")) for i in (7, "b", 9)]


def answer(question: Question, model: str) -> Answer:
    """Returns two turns: one of three tokens in one or two rounds, one that ends with prefill."""
    rounds = ([1, 1], [1, 1]) if model == "plain" else ([2], [2])
    tokens = [QUESTIONS.index(question), 2, 3]
    results = [
        Result([1, 2], tokens, "length", rounds[0], 0.25, 0.5, rounds[1]),
        Result([1, 2, 3], [4], "stop", [], 0.25, 0.0, []),
    ]
    return Answer(results, ["é 2 3", ""])


def opened(folder, settings=SETTINGS, models=MODELS) -> AnswerFolder:
    return AnswerFolder(folder, settings, QUESTIONS, models)


@pytest.fixture
def folder(tmp_path):
    """Returns the folder of a run that answered two of three questions."""
    kept = opened(tmp_path / "run")
    for question in QUESTIONS[:2]:
        kept.add(question, {model: answer(question, model) for model in MODELS})
    return tmp_path / "run"


def test_lines_are_spec_benchs(folder):
    line = json.loads((folder / "qa" / "moa-chain.jsonl").read_text().splitlines()[1])
    assert line.keys() >= {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    assert (line["question_id"], line["category"], line["model_id"]) == ("b", "trivia", "moa-chain")
    (choice,) = line["choices"]
    expected = {"index": 0, "turns": ["é 2 3", ""], "decoding_steps": [1, 0], "new_tokens": [3, 1]}
    expected |= {"wall_time": [0.75, 0.25], "accept_lengths": [2]}
    assert {key: choice[key] for key in expected} == expected
    assert line["same_as_plain"] is True and line["difference"] is None


def test_whether_an_answer_is_plain_decodings_is_kept(tmp_path):
    kept = opened(tmp_path / "run")
    drawn = answer(QUESTIONS[0], "moa-chain")._replace(comparable=False)
    other = answer(QUESTIONS[1], "moa-chain")._replace(difference={"turn": 1})
    for question, drafted in zip(QUESTIONS, (drawn, other), strict=False):
        kept.add(question, {"plain": answer(question, "plain"), "moa-chain": drafted})
    lines = (tmp_path / "run" / "qa" / "moa-chain.jsonl").read_text().splitlines()
    assert [json.loads(line)["same_as_plain"] for line in lines] == [None, False]
    read = [opened(tmp_path / "run").answer(q, "moa-chain") for q in QUESTIONS[:2]]
    assert [found.same_as_plain for found in read] == [None, False]


def test_a_crash_costs_one_question_at_most(folder):
    """Wherever the second question's lines are cut, only that question is answered again."""
    plain, chain = (folder / "qa" / f"{model}.jsonl" for model in MODELS)
    whole = {path: path.read_bytes() for path in (plain, chain)}
    first = {path: content.index(b"\n") + 1 for path, content in whole.items()}
    cuts = [(path, at) for path in whole for at in range(first[path], len(whole[path]), 197)]
    cuts.append((chain, len(whole[chain]) - 1))
    for cut, at in cuts:
        plain.write_bytes(whole[plain])
        chain.write_bytes(whole[chain][: first[chain]])  # written after the plain answer
        cut.write_bytes(whole[cut][:at])
        kept = opened(folder)
        assert [kept.has(question) for question in QUESTIONS] == [True, False, False], (cut, at)
        kept.add(QUESTIONS[1], {model: answer(QUESTIONS[1], model) for model in MODELS})
        assert opened(folder).has(QUESTIONS[1])
        for path in (plain, chain):
            assert path.read_bytes().startswith(whole[path][: first[path]])
            assert [json.loads(x)["question_id"] for x in path.read_text().splitlines()] == [7, "b"]


def test_a_folder_of_another_run_is_refused(folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    line = refusal(opened, folder, SETTINGS | {"dtype": "bfloat16"})
    assert f"{folder} holds the answers of another run, with other dtype; choose" in line
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "settings.json").write_text("[]")
    assert "settings.json is no settings file of a run" in refusal(opened, folder)


@pytest.mark.parametrize("line", ["{", "[]", '{"question_id": 7, "choices": []}'])
def test_a_damaged_line_is_named(folder, line):
    path = folder / "qa" / "plain.jsonl"
    path.write_text(path.read_text() + line + "\n")
    assert f"{path} line 3 is no answer of a run like this" in refusal(opened, folder)
