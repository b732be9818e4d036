"""Documents of many answers: a run that is cut keeps what it wrote, says so, and can go on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infer.info import ROOT
from moa_jax import Session

PROMPTS = [[5 + i, 6, 7] for i in range(6)]


@pytest.fixture
def flags(saved, tmp_path) -> list[object]:
    """Six prompts for a small target, in plain decoding."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in PROMPTS))
    target = ["--target", saved / "llama" / "target", "--mode", "plain"]
    return [*target, "--prompts", file, "--max-new-tokens", 5]


@pytest.fixture
def cut_after(monkeypatch):
    """Lets Ctrl-C come after so many answers."""

    def cut_after(count: int) -> None:
        generate, answers = Session.generate, iter(range(count))

        def cut(*arguments, **rest):
            if next(answers, None) is None:
                raise KeyboardInterrupt
            return generate(*arguments, **rest)

        monkeypatch.setattr(Session, "generate", cut)

    return cut_after


def tokens_of(document: dict) -> list[list[int]]:
    return [result["token_ids"] for result in document["results"]]


def test_an_interrupted_document_has_the_answers_so_far(
    run, flags, cut_after, monkeypatch, tmp_path
):
    whole = json.loads(run("infer.generate", *flags, "--json").out)
    assert "cut" not in whole and len(whole["results"]) == 6
    cut_after(4)
    done = run("infer.generate", *flags, "--json")
    found = json.loads(done.out)
    assert done.code == 130 and tokens_of(found) == tokens_of(whole)[:4]
    assert found["settings"] == whole["settings"]
    assert found["cut"] == {"by": "SIGINT", "done": 4, "of": 6}
    monkeypatch.undo()
    file = tmp_path / "saved.json"
    file.write_text(done.out)
    cut_after(2)  # those that are left
    assert run("infer.generate", *flags, "--output", file).code == 0
    assert tokens_of(json.loads(file.read_text())) == tokens_of(whole)
    monkeypatch.undo()
    cut_after(0)
    done = run("infer.generate", *flags, "--json")
    assert done.code == 130 and json.loads(done.out)["results"] == []


def test_a_cut_file_goes_on(run, flags, cut_after, monkeypatch, tmp_path):
    """After Ctrl-C and after a kill in the middle of a result; with a batch of another size."""
    whole, file = json.loads(run("infer.generate", *flags, "--json").out), tmp_path / "out.json"
    to_file = [*flags, "--output", file]
    cut_after(2)
    done = run("infer.generate", *to_file)
    assert (done.code, done.out) == (130, "") and "2 of 6 answers are written" in done.err
    assert json.loads(file.read_text())["cut"]["done"] == 2
    monkeypatch.undo()
    assert (
        "other settings (max_new_tokens 5)"
        in run("infer.generate", *to_file, "--max-new-tokens", 4).refusal()
    )
    cut_after(2)
    run("infer.generate", *to_file)
    text = file.read_text()
    file.write_text(text[: text.rindex('{"prompt_ids"') + 60])  # a part of the fourth
    monkeypatch.undo()
    assert run("infer.generate", *to_file, "--batch", 2).code == 0
    found = json.loads(file.read_text())
    assert tokens_of(found) == tokens_of(whole) and "cut" not in found
    assert found["settings"] == whole["settings"]
    prompts = Path(flags[flags.index("--prompts") + 1])
    prompts.write_text(prompts.read_text().replace("[5,", "[4,"))
    assert "answers other prompts" in run("infer.generate", *to_file).refusal()


def test_a_fault_at_the_first_answer_writes_nothing(run, flags, monkeypatch):
    monkeypatch.setattr(Session, "generate", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    done = run("infer.generate", *flags, "--json")
    assert done.code == 2 and done.out == ""


@pytest.mark.slow
def test_a_cut_evaluation_reports_what_was_answered(run, saved, cut_after, tmp_path):
    file = tmp_path / "question.jsonl"
    lines = [{"question_id": i, "turns": ["Hello"], "category": ""} for i in range(4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "report"
    flags = ["--suite", file, "--modes", "chain", "--max-new-tokens", 16, "--output", out, "--json"]
    cut_after(6)  # the first times compile and are taken again
    done = run("infer.evaluate", *flags)
    found = json.loads(done.out)
    assert done.code == 130 and "the same command goes on" in done.err
    assert found["cut"]["of"] == 4 and 0 < found["cut"]["done"] < 4


def test_a_cut_bench_has_the_runs_so_far(run, saved, cut_after, tmp_path):
    target = ["--target", saved / "llama" / "target", "--modes", "plain", "--max-new-tokens", 9]
    flags = [*target, "--prompt-length", 5, "--limit", 3, "--json"]
    cut_after(5)
    done = run("infer.bench", *flags)
    found = json.loads(done.out)
    assert done.code == 130 and found["cut"]["by"] == "SIGINT"
    (row,) = found["modes"]
    assert row["tau"] == 1 and row["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_what_a_signal_leaves_can_be_read(flags, number):
    """What SIGTERM cuts is whole JSON, and `]}` completes what a kill has cut."""
    slow = "import time; from moa_jax import Session; generate = Session.generate\n"
    slow += "Session.generate = lambda *a, **k: time.sleep(0.5) or generate(*a, **k)\n"
    slow += "from infer.cli.program import run; from infer.generate import main; run(main)"
    command = [sys.executable, "-c", slow, *map(str, flags), "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        text = b""
        while text.count(b'"prompt_ids"') < 2:
            text += os.read(process.stdout.fileno(), 1 << 16)
        process.send_signal(number)
        text = (text + process.stdout.read()).decode()
    if number == signal.SIGTERM:
        assert process.returncode == 143
        assert json.loads(text)["cut"]["by"] == "SIGTERM"
    else:
        assert len(json.loads(text + "]}")["results"]) >= 2
