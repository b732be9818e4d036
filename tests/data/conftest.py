"""Tokenizers that are trained once: a small one for any text, and one of the conversations."""

from pathlib import Path

import numpy as np
import pytest

from moa_jax.config import DataConfig
from moa_jax.data import batches, sources
from moa_jax.data import tokenizer as tk
from moa_jax.data.batch import Batch
from moa_jax.data.chat import Example

PAD = 7
CONVERSATIONS = str(Path(__file__).parents[2] / "moa_jax/demo/conversations.jsonl")
CONFIG = DataConfig((CONVERSATIONS,), (CONVERSATIONS,), 256, 256, rows_per_batch=4, seed=5)


def numbered_rows(count: int, first: int = 1) -> Batch:
    """Returns rows of one repeated token: the row's number, from `first` on."""
    given = [Example(np.full(4, first + i, np.int32), np.ones(4, bool)) for i in range(count)]
    return batches.pad(given, 4, PAD)


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
