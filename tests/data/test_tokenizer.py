"""The tokenizer that we train: exact round trips, its chat template, and its folder."""

import json
import os
import subprocess
import sys
import types

import pytest

from moa_jax.data import tokenizer as tk
from moa_jax.errors import InputError
from train import pretrain

TEXTS = [
    "I would like a large coffee with milk, please.",
    "The table is booked for 4 people at 19:30 on Friday.",
    "Would you like milk with the coffee? That makes 12.50 in all.",
] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    tk.train_tokenizer(iter(TEXTS), 320, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return tk.load_tokenizer(folder)


@pytest.mark.parametrize(
    "text",
    [*TEXTS[:3], " two  spaces\n\n\ttab ", "naïve 日本語 🙂 ½", "\x00\x7f", "2024-10-13", ""],
)
def test_any_text_comes_back_as_it_was(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < 320 for i in ids)


def test_special_tokens_come_first(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(tk.SPECIAL_TOKENS)) == [0, 1, 2, 3, 4, 5]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 4, 5)
    assert len(tokenizer) == 320
    assert tokenizer.decode([0, 4, 5], skip_special_tokens=True) == ""


def test_digits_stand_alone(tokenizer):
    ids = tokenizer("19:30", add_special_tokens=False).input_ids
    assert [tokenizer.decode([i]) for i in ids] == ["1", "9", ":", "3", "0"]


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello \n"},
        {"role": "assistant", "content": "Hi!"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == (
        "<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>Hi!<|end|>"
    )
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[:2] == [0, 3] and ids[-1] == 4


def test_same_text_gives_the_same_file(folder, tmp_path):
    tk.train_tokenizer(iter(TEXTS), 320, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
    json.loads((folder / "tokenizer_config.json").read_text())


def test_an_interrupted_training_leaves_nothing(tmp_path):
    def broken():
        yield from TEXTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tk.train_tokenizer(broken(), 320, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("texts", [[], ["", " \n"]])
def test_no_text_makes_no_tokenizer(tmp_path, texts):
    with pytest.raises(InputError, match="no text to train the tokenizer"):
        tk.train_tokenizer(iter(texts), 320, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_loading_says_nothing_where_torch_is_absent(folder):
    """In a process of its own: the advice comes where transformers is first imported."""
    program = (
        "import sys; sys.modules['torch'] = None; "
        f"from moa_jax.data.tokenizer import load_tokenizer; load_tokenizer({str(folder)!r})"
    )
    absent = {"USE_TORCH": "0", "TRANSFORMERS_NO_ADVISORY_WARNINGS": None}
    environment = {**os.environ, **absent}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_pretraining_reads_all_text_that_there_is(tmp_path):
    """Plain text as well as messages, prompts alone too; a bad record is skipped."""
    records = [
        {"text": "coffee " * 50},
        {"nothing": 1},
        {"messages": [{"role": "user", "content": "pancake " * 50}]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = pretrain._tokenizer(
        types.SimpleNamespace(
            tokenizer=str(tmp_path / "new"),
            data=types.SimpleNamespace(train=(str(path),), sources=()),
            target=types.SimpleNamespace(vocab_size=320),
        )
    )
    for word in (" coffee", " pancake"):
        assert len(found(word, add_special_tokens=False).input_ids) == 1


def test_bad_input(folder, tmp_path):
    with pytest.raises(InputError, match="vocabulary of 261"):
        tk.train_tokenizer(iter(TEXTS), 261, tmp_path / "small")
    with pytest.raises(InputError, match="exists already"):
        tk.train_tokenizer(iter(TEXTS), 320, folder)
    with pytest.raises(InputError, match="holds no tokenizer.json"):
        tk.load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="cannot load the tokenizer /no/such/folder") as raised:
        tk.load_tokenizer("/no/such/folder")
    assert "\n" not in str(raised.value)
