"""The trained tokenizer has exact round trips, a chat template and a folder."""

import json
import shutil
import types

import pytest

from moa_jax.data import tokenizer as tk
from tests.model_folders import edit_json, refusal
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
def test_any_text_survives_a_round_trip(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= i < 320 for i in ids)


def test_special_tokens_come_first(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(tk.SPECIAL_TOKENS)) == [0, 1, 2, 3, 4, 5]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 4, 5)
    assert len(tokenizer) == 320
    assert tokenizer.decode([0, 4, 5], skip_special_tokens=True) == ""


def test_the_chat_template_of_a_processor(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "x")
    edit_json(tmp_path / "x" / "tokenizer_config.json", chat_template=None)
    (tmp_path / "x" / "chat_template.json").write_text('{"chat_template": "{{ bos_token }}"}')
    assert tk.load_tokenizer(tmp_path / "x").chat_template == "{{ bos_token }}"


def test_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello \n"},
        {"role": "assistant", "content": "Hi!"},
    ]
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|begin|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>"
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == f"{prompt}Hi!<|end|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[:2] == [0, 3] and ids[-1] == 4


def test_same_text_gives_the_same_file(folder, tmp_path):
    tk.train_tokenizer(iter(TEXTS), 320, tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_an_interrupted_training_leaves_nothing(tmp_path):
    def broken():
        yield from TEXTS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tk.train_tokenizer(broken(), 320, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_pretraining_reads_all_text_that_there_is(tmp_path):
    """Pretraining reads plain text, messages and prompts alone; a bad record is skipped."""
    records = [
        {"text": "coffee " * 50},
        {"nothing": 1},
        {"messages": [{"role": "user", "content": "pancake " * 50}]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = types.SimpleNamespace(train=(str(path),), sources=())
    rest = {"data": data, "target": types.SimpleNamespace(vocab_size=320)}
    found = pretrain._tokenizer(types.SimpleNamespace(tokenizer=str(tmp_path / "new"), **rest))
    for word in (" coffee", " pancake"):
        assert len(found(word, add_special_tokens=False).input_ids) == 1


def test_bad_input(folder, tmp_path):
    train = lambda size, place: tk.train_tokenizer(iter(TEXTS), size, place)
    assert "vocabulary of 261" in refusal(train, 261, tmp_path / "small")
    assert "exists already" in refusal(train, 320, folder)
    assert "no text to train" in refusal(tk.train_tokenizer, iter([" \n"]), 320, tmp_path / "new")
    assert "holds no tokenizer.json" in refusal(tk.load_tokenizer, tmp_path)
