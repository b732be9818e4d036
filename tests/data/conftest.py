"""A small tokenizer for tests that any serves."""

import pytest

from moa_jax.data import tokenizer as tk


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    tk.train_tokenizer(iter(["Hello there, how are you? " * 9]), 300, folder)
    return tk.load_tokenizer(folder)
