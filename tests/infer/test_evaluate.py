"""The evaluation program: one run of a small pair, resumed, refused, and with a wrong answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from infer import evaluate
from infer.bench import candidates
from infer.bench.candidates import Candidate
from moa_jax import Session, load_drafter, load_target
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.pretrained import save_drafter

DIGITS = "1234567 " * 4  # one token each, so that all prompts have equal lengths
QUESTIONS = [
    {"question_id": 1, "category": "a", "turns": [DIGITS, "1"]},
    {"question_id": 2, "turns": ["2" + DIGITS, "1" * 600]},
    {"question_id": 3, "turns": ["7" * 600]},
    {"question_id": 4, "turns": ["3" + DIGITS]},
]


@pytest.fixture(scope="module")
def folder(talkative, tmp_path_factory) -> Path:
    """Returns a small random pair, and questions for it."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("target", "draft"):
        (folder / name).symlink_to(talkative / name)
    text = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    (folder / "talk.jsonl").write_text(text)
    return folder


def flags(folder: Path, output: Path, *more: str) -> list[str]:
    pair = ["--target", str(folder / "target"), "--draft", f"a={folder}/draft"]
    suite = ["--suite", str(folder / "talk.jsonl"), "--max-new-tokens", "9"]
    return [*pair, *suite, "--output", str(output), "--json", *more]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(folder) -> Path:
    """Returns the answers of a whole run."""
    assert not evaluate.main(flags(folder, folder / "run", "--depth", "3"))
    return folder / "run"


def test_answers_and_report(finished):
    names = ["a-chain", "plain"]
    assert sorted(p.stem for p in (finished / "talk").iterdir()) == names
    for name in names:
        found = lines(finished / "talk" / f"{name}.jsonl")
        assert [line["question_id"] for line in found] == [1, 2, 4]
        assert [len(line["choices"][0]["turns"]) for line in found] == [2, 1, 1]
    document = json.loads((finished / "report.json").read_text())
    assert [(r["set"], r["model"]) for r in document["rows"]] == [
        (name, model) for name in ("talk", "all") for model in ("plain", "a-chain")
    ]
    assert all(row["same_as_plain"] == 3 for row in document["rows"])
    assert document["skipped"] == [
        {"set": "talk", "question_id": 3, "turn": 1, "why": "too long for the target"},
        {"set": "talk", "question_id": 2, "turn": 2, "why": "too long for the target"},
    ]
    assert "| decoder | talk | all |" in (finished / "report.md").read_text()


def test_a_second_turn_follows_our_answer(folder, finished):
    """The second question follows the first answer's text, without the end token."""
    tokenizer = load_tokenizer(folder / "target")
    choice = lines(finished / "talk" / "plain.jsonl")[0]["choices"][0]
    said = tokenizer.decode(choice["token_ids"][0], skip_special_tokens=True).strip()
    messages = [("user", DIGITS), ("assistant", said), ("user", "1")]
    talk = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert choice["turns"][0] == said
    assert choice["prompt_tokens"][1] == len(tokenizer(text, add_special_tokens=False).input_ids)


def test_a_finished_run_only_repeats_its_report(folder, finished, monkeypatch, capsys):
    monkeypatch.setattr(Session, "generate", None)
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert not evaluate.main(flags(folder, finished, "--depth", "3"))
    assert json.loads(capsys.readouterr().out) == json.loads(before[finished / "report.json"])
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


def test_a_changed_answer_is_noticed(folder, tmp_path, monkeypatch, capsys):
    """This is the negative control: drafts that change a token must fail the check."""
    honest = Session.generate

    def lying(self, prompts, *arguments, **settings):
        (result,) = honest(self, prompts, *arguments, **settings)
        if not self.shape.num_drafted:
            return [result]
        return [result._replace(token_ids=[result.token_ids[0] ^ 1, *result.token_ids[1:]])]

    monkeypatch.setattr(Session, "generate", lying)
    command = flags(folder, tmp_path / "run", "--limit", "1", "--depth", "3")
    assert evaluate.main(command) == evaluate.DIFFERENT
    document = json.loads(capsys.readouterr().out)
    (difference,) = document["differences"]
    assert (difference["turn"], difference["index"]) == (1, 0)
    assert difference["drafted"] == difference["plain"] ^ 1 and difference["margin"] > 0
    assert [row["same_as_plain"] for row in document["rows"]] == [1, 0, 1, 0]
    assert "1 answers DIFFER" in (tmp_path / "run" / "report.md").read_text()


def loaded(*flags: str) -> dict[str, Candidate]:
    _, found = candidates.load_candidates(evaluate._parser().parse_args(flags))
    return {candidate.name: candidate for candidate in found}


def test_each_drafter_has_options_of_its_own(folder, tmp_path):
    drafter = load_drafter(folder / "draft", target := load_target(folder / "target"))
    given = ("moa", drafter.config, drafter.params, target)
    plain = save_drafter(tmp_path / "silent", *given, layout="authors")
    where = ["--target", f"{folder}/target", "--draft", f"a={folder}/draft"]
    found = loaded(*where, "--draft", f"b={plain},n=2", "--draft", f"c={plain},method=moa")
    configs = {name: each.drafter.config for name, each in found.items() if each.drafter}
    reused = {name: config.target_layer_inference for name, config in configs.items()}
    assert reused == {"a-chain": 0, "b-chain": 2, "c-chain": 0}
