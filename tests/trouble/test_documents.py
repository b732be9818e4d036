"""A run of many answers that is interrupted keeps its output, reports it, and can resume."""

import json
from pathlib import Path

import pytest

from moa_jax import Result, Session


@pytest.fixture(autouse=True)
def without_a_model(monkeypatch):
    """Answers count from the first token of the prompt."""

    def generate(self, prompts, most, *rest):
        rest = ([1] * (most - 1), 0.1, 0.1, [0] * (most - 1))
        return [Result(ids, [*range(ids[0], ids[0] + most)], "length", *rest) for ids in prompts]

    monkeypatch.setattr(Session, "generate", generate)


@pytest.fixture
def flags(saved, tmp_path) -> list[object]:
    """Returns flags of six prompts for a small target, in plain decoding."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f'{{"prompt_ids": [{5 + i}, 6, 7]}}\n' for i in range(6)))
    target = ["--target", saved / "llama" / "target", "--mode", "plain"]
    return [*target, "--prompts", file, "--max-new-tokens", 5]


@pytest.fixture
def cut_run(run, monkeypatch):
    """Runs a program that Ctrl-C interrupts after `count` answers."""

    def cut_run(count: int, *command: object):
        generate, answers = Session.generate, iter(range(count))

        def cut(*arguments, **rest):
            if next(answers, None) is None:
                raise KeyboardInterrupt
            return generate(*arguments, **rest)

        with monkeypatch.context() as patch:
            patch.setattr(Session, "generate", cut)
            done = run(*command)
        assert done.code == 130
        return done

    return cut_run


def tokens_of(document: dict) -> list[list[int]]:
    return [result["token_ids"] for result in document["results"]]


def test_an_interrupted_document_has_the_answers_so_far(run, flags, cut_run, tmp_path):
    whole = json.loads(run("infer.generate", *flags, "--json").out)
    assert "cut" not in whole and len(whole["results"]) == 6
    done = cut_run(4, "infer.generate", *flags, "--json")
    found = json.loads(done.out)
    assert tokens_of(found) == tokens_of(whole)[:4] and found["settings"] == whole["settings"]
    assert found["cut"] == {"by": "SIGINT", "done": 4, "of": 6}
    assert json.loads(cut_run(0, "infer.generate", *flags, "--json").out)["results"] == []
    (file := tmp_path / "saved.json").write_text(done.out)
    assert run("infer.generate", *flags, "--output", file).code == 0
    assert tokens_of(json.loads(file.read_text())) == tokens_of(whole)


def test_a_truncated_file_is_resumed(run, flags, cut_run, tmp_path):
    """The run ends by Ctrl-C, or by a kill within a result, and resumes with another batch."""
    whole, file = json.loads(run("infer.generate", *flags, "--json").out), tmp_path / "out.json"
    to_file = [*flags, "--output", file]
    done = cut_run(2, "infer.generate", *to_file)
    assert done.out == "" and "2 of 6 answers are written" in done.err
    line = run("infer.generate", *to_file, "--max-new-tokens", 4).refusal()
    assert "other settings (max_new_tokens 5)" in line
    cut_run(2, "infer.generate", *to_file)
    text = file.read_text()
    file.write_text(text[: text.rindex('{"prompt_ids"') + 60])  # a part of the fourth
    assert run("infer.generate", *to_file, "--batch", 2).code == 0
    found = json.loads(file.read_text())
    assert tokens_of(found) == tokens_of(whole) and "cut" not in found
    assert found["settings"] == whole["settings"]
    prompts = Path(flags[flags.index("--prompts") + 1])
    prompts.write_text(prompts.read_text().replace("[5,", "[4,"))
    assert "answers other prompts" in run("infer.generate", *to_file).refusal()


def test_auto_measures_the_costs_of_a_batch_that_repeats(run, flags, monkeypatch):
    found: list[int] = []
    seconds = lambda self, batch, *_: found.append(batch) or 1e-3
    monkeypatch.setattr(Session, "seconds_of_a_round", seconds)
    monkeypatch.setattr("infer.cli.flags.auto.folder", lambda: None)
    for batch in (1, 2, 6):  # of six prompts
        assert run("infer.generate", *flags, "--mode", "auto", "--json", "--batch", batch).code == 0
    assert {*found} == {2}
