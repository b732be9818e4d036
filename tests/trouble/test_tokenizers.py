"""Tokenizers: the same ids in other files, embeddings of other sizes, and ends of turns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from moa_jax.pretrained import describe_target
from tests.conftest import slow
from tests.model_folders import edit_json, edit_tensors, tensors_of

VOCAB = 101  # of the target in `pair`
WORDS = [f"w{index}" for index in range(VOCAB)]
CHATML = "{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>\n' }}"
CHATML = "{% for m in messages %}" + CHATML + "{% endfor %}"
PROMPT = ("--prompt-ids", "5,17,3", "--mode", "plain", "--max-new-tokens", "12", "--json")


@pytest.fixture
def target(pair) -> Path:
    """Returns a random target without stop ids in its configs; its tokenizer has a word per row."""
    edit_json(pair / "target" / "config.json", eos_token_id=None)
    edit_json(pair / "target" / "generation_config.json", eos_token_id=None)
    write_tokenizer(pair / "target", WORDS)
    return pair / "target"


def write_tokenizer(folder: Path, words: list[str], ends=(), **settings: object) -> None:
    """Writes a tokenizer of these words; `ends` are the ids of <|eos|> and <|im_end|>."""
    ends = dict(zip(("<|eos|>", "<|im_end|>"), ends, strict=False))
    vocab = {word: index for index, word in enumerate(words) if index not in ends.values()} | ends
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": end, "special": True} | flags for end, i in ends.items()]
    model = {"type": "WordLevel", "unk_token": "w0", "vocab": vocab}
    content = {"version": "1.0", "model": model, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def answer(run, target: Path, *flags: object) -> tuple[dict, str]:
    """Returns the answer, and stderr."""
    done = run("infer.generate", "--target", target, *flags)
    assert done.code == 0, done.err
    return json.loads(done.out)["results"][0], done.err


# ---- vocabularies -------------------------------------------------------------------------


def resized(folder: Path, new: Path, rows: int) -> Path:
    """Returns the same model with more or fewer rows in its embedding and head."""
    shutil.copytree(folder, new)
    edit_json(new / "config.json", vocab_size=rows)
    tensors, noise, padded = tensors_of(new), np.random.default_rng(0), {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        drawn = 0.1 * noise.standard_normal((20, tensors[name].shape[1]), np.float32)
        padded[name] = np.concatenate([tensors[name], drawn])[:rows].copy()
    edit_tensors(new, **padded)
    return new


SAMPLED = ("--temperature", "1.5", "--seed", "7")
CHAIN = ("--mode", "chain", "--depth", "3")
TREE = ("--mode", "tree", "--depth", "3", "--breadth", "2", "--total-tokens", "4")


@pytest.mark.parametrize("rows, mode, law", [(90, CHAIN, ()), slow(VOCAB + 11, TREE, SAMPLED)])
def test_a_small_model_with_other_rows_drafts(run, target, tmp_path, rows, mode, law):
    """The drafter lacks the target's ids from 90 on (the prompt has 100), or has more ids."""
    flags = ("--draft", resized(target, tmp_path / "draft", rows), "--json", *law)
    flags += ("--prompt-ids", "5,17,100,3,5,17", "--max-new-tokens", "24")
    plain, _ = answer(run, target, *flags, "--mode", "plain")
    drafted, _ = answer(run, target, *flags, *mode)
    assert drafted["token_ids"] == plain["token_ids"]
    assert law or drafted["tau"] > 1


# ---- ends of turns ------------------------------------------------------------------------


def test_the_tokenizer_ends_answers(run, target):
    """The eos token and the end in the chat template end an answer; other tokens do not."""
    found, _ = answer(run, target, *PROMPT)
    assert found["finish_reason"] == "length"
    ids = found["token_ids"]
    place = next(i for i, token in enumerate(ids) if i and token not in ids[:i])
    end, other = ids[place], next(i for i in range(VOCAB) if i not in ids)
    for ends, settings in (
        ((end, other), {"eos_token": {"__type": "AddedToken", "content": "<|eos|>"}}),
        ((other, end), {"chat_template": [{"name": "default", "template": CHATML}]}),
    ):
        write_tokenizer(target, WORDS, ends, **settings)
        assert end in describe_target(target).generation.eos_ids, settings
    found, _ = answer(run, target, *PROMPT)
    assert (found["token_ids"], found["finish_reason"]) == (ids[: place + 1], "stop")
    write_tokenizer(target, WORDS, (7, 9), chat_template=["x"])
    done = run("infer.generate", "--target", target, *PROMPT)
    assert "cannot load the tokenizer" in done.refusal()


@pytest.mark.slow
def test_an_end_that_cannot_be_written_is_named(run, target):
    first = answer(run, target, *PROMPT)[0]["token_ids"][0]
    write_tokenizer(target, WORDS, (first, 100), eos_token="<|eos|>")
    for stated, value in ((-1, -1), (101, 101), ([5000], 5000)):
        edit_json(target / "config.json", eos_token_id=stated)
        found, err = answer(run, target, *PROMPT)
        assert (found["token_ids"], found["finish_reason"]) == ([first], "stop")
        assert f"outside the vocabulary of 101 and end no answer: {value} (config.json)" in err


def test_converted_targets_state_all_ends(run, target, tmp_path):
    write_tokenizer(target, WORDS, (7, 9), eos_token="<|eos|>", chat_template=CHATML)
    edit_json(target / "config.json", eos_token_id=-1)
    assert run("infer.convert", "--target", target, "--output", tmp_path / "new").code == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "new" / name).read_text())["eos_token_id"] == [7, 9]
