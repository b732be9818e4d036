"""The bundled pair: real text through the whole system, exact, small, and with a card."""

import json

import pytest

from infer import evaluate
from infer.pair import DEMO
from moa_jax import Session, load_drafter, load_target
from moa_jax.data import chat
from moa_jax.tokenizer import load_tokenizer

PROMPTS = [
    "Hello!",
    "I need a cheap hotel in the north of town.",
    "Can you book a table for two at seven?",
    "What is the weather like today?",
    "I would like a large coffee with milk.",
    "My bank balance, please.",
]


@pytest.fixture(scope="module")
def sessions():
    target = load_target(DEMO / "target")
    return Session(target), Session(target, load_drafter(DEMO / "draft", target))


def test_drafts_change_nothing_and_help(sessions):
    plain, drafted = sessions
    tokenizer = load_tokenizer(DEMO / "target")
    committed = rounds = 0
    for text in PROMPTS:
        prompt = chat.prompt_ids(tokenizer, [{"role": "user", "content": text}])
        (expected,), (found,) = (s.generate([prompt], 96) for s in (plain, drafted))
        assert found.token_ids == expected.token_ids
        committed, rounds = committed + sum(found.accept_lengths), rounds + found.rounds
    assert committed / rounds > 1.5


def test_size_and_card():
    """At most 48 MB, half the weights' float32 size, and a card that names its sources."""
    weights = sum(file.stat().st_size for file in DEMO.rglob("*.safetensors"))
    assert weights < 48e6
    card = (DEMO / "README.md").read_text()
    assert "star" in card and "MIT" in card and "CC-BY-4.0" in card


def test_evaluation_reports_every_source(capsys, tmp_path):
    file = tmp_path / "talks.jsonl"
    talks = [("shop", text) for text in PROMPTS[:2]] + [("bank", PROMPTS[5])]
    file.write_text(
        "".join(
            json.dumps(
                {
                    "source": source,
                    "messages": [
                        {"role": "user", "content": text},
                        {"role": "assistant", "content": "Yes."},
                    ],
                }
            )
            + "\n"
            for source, text in talks
        )
    )
    evaluate.main(["--conversations", str(file), "--max-new-tokens", "16", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["source"], row["prompts"], row["same"]) for row in rows] == [
        ("shop", 2, 2),
        ("bank", 1, 1),
        ("all", 3, 3),
    ]
    evaluate.main(["--conversations", str(file), "--max-new-tokens", "16"])
    assert capsys.readouterr().out.startswith("| source | prompts |")


def test_repeated_grams_are_counted():
    assert evaluate.repeats(list(range(20))) == (0, 13)
    assert evaluate.repeats([1, 2] * 8) == (7, 9)
    assert evaluate.repeats([1, 2, 3]) == (0, 0)
