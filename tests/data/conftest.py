"""Tokenizers that are trained once: a small one for any text, and one of the conversations."""

from pathlib import Path

import pytest

from moa_jax.data import sources
from moa_jax.data import tokenizer as tk

CONVERSATIONS = str(Path(__file__).parent / "conversations.jsonl")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    tk.train_tokenizer(iter(["Hello there, how are you? " * 9]), 300, folder)
    return tk.load_tokenizer(folder)


@pytest.fixture(scope="session")
def talk_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "talk"
    texts = (m["content"] for r in sources.read(CONVERSATIONS) for m in r["messages"])
    tk.train_tokenizer(texts, 512, folder)
    return tk.load_tokenizer(folder)
