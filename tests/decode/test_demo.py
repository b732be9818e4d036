"""The bundled pair: real text through the whole system, exact, small, and with a card."""

import jax.numpy as jnp
import pytest

from infer.cli.flags.pair import DEMO
from moa_jax import Session, load_drafter, load_target
from moa_jax.data import chat
from moa_jax.data.tokenizer import load_tokenizer

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
    target = load_target(DEMO / "target", jnp.float32)
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
