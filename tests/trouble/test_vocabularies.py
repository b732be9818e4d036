"""Vocabularies: the same ids in other files, and embeddings of other sizes."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infer.cli.flags.pair import DEMO

ROWS = ("model.embed_tokens.weight", "lm_head.weight")
VOCAB = 101  # of the target in `pair`


@pytest.fixture
def target(pair):
    """A random target whose tokenizer has a word for each row."""
    write_tokenizer(pair / "target", words(VOCAB))
    return pair / "target"


def words(count):
    return [f"w{index}" for index in range(count)]


def write_tokenizer(folder, tokens):
    model = {"type": "WordLevel", "unk_token": "w0", "vocab": {t: i for i, t in enumerate(tokens)}}
    content = {"version": "1.0", "model": model, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def resized(folder, new, rows):
    """The same model with more or fewer rows in its embedding and head."""
    shutil.copytree(folder, new)
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    tensors = load_file(new / "model.safetensors")
    noise = np.random.default_rng(0)
    for name in ROWS:
        if name in tensors:
            more = max(rows - len(tensors[name]), 0)
            drawn = 0.1 * noise.standard_normal((more, tensors[name].shape[1]))
            padded = np.concatenate([tensors[name], drawn.astype(tensors[name].dtype)])
            tensors[name] = np.ascontiguousarray(padded[:rows])
    save_file(tensors, new / "model.safetensors")
    return new


def answers(run, target, draft, *flags):
    """Token ids, and how many a verification accepts."""
    prompts = ["--prompt-ids", "5,17,100,3,5,17", "--max-new-tokens", "24"]
    done = run("infer.generate", "--target", target, "--draft", draft, *prompts, "--json", *flags)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["results"]
    return found["token_ids"], found["tau"]


SAMPLED = ("--temperature", "1.5", "--seed", "7")


CHAIN, TREE = ("--mode", "chain", "--depth", "4"), ("--mode", "tree", "--depth", "3")
TREE += ("--breadth", "2", "--total-tokens", "4")


@pytest.mark.parametrize("rows", [90, VOCAB + 11])
@pytest.mark.parametrize("law", [(), pytest.param(SAMPLED, marks=pytest.mark.slow)], ids=str)
def test_a_small_model_with_other_rows_drafts(run, target, tmp_path, rows, law):
    """It lacks the target's ids from 90 on, of which the prompt has 100, or has ids to spare."""
    draft = resized(target, tmp_path / "draft", rows)
    plain, _ = answers(run, target, draft, "--mode", "plain", *law)
    for mode in (CHAIN, TREE):
        drafted, tau = answers(run, target, draft, *mode, *law)
        assert drafted == plain
        assert law or tau > 1


def test_a_drafter_knows_its_target_padded_and_with_a_tokenizer_written_anew(
    run, pair, target, tmp_path
):
    stated = ("--target-layer-inference", "0", "--output", tmp_path / "draft")
    done = run("infer.convert", "--draft", pair / "draft", "--target", target, *stated)
    assert done.code == 0, done.err
    padded = resized(target, tmp_path / "padded", VOCAB + 11)
    tokenizer = json.loads((padded / "tokenizer.json").read_text())
    (padded / "tokenizer.json").write_text(json.dumps(tokenizer, indent=4))
    answers(run, padded, tmp_path / "draft", "--mode", "chain")
    other = words(VOCAB)
    other[40], other[60] = other[60], other[40]
    write_tokenizer(padded, other)
    flags = ("--draft", tmp_path / "draft", "--prompt-ids", "5")
    line = run("infer.generate", "--target", padded, *flags).refusal()
    assert "belongs to another target: the vocabulary (ids:sha256) is 101:" in line


def test_a_drafter_of_an_earlier_version_names_the_id_where_its_target_is_beside_it(run, tmp_path):
    """The bundled drafter states the hash of a file, and that file is beside it."""
    target = shutil.copytree(DEMO / "target", tmp_path / "target")
    content = json.loads((target / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    one, other = (next(t for t, i in vocab.items() if i == index) for index in (300, 301))
    vocab |= {one: 301, other: 300}
    (target / "tokenizer.json").write_text(json.dumps(content))
    flags = ("--draft", DEMO / "draft", "--prompt-ids", "5", "--mode", "chain")
    line = run("infer.generate", "--target", target, *flags).refusal()
    assert f"the token of id 300 is {one!r} in its files and {other!r} in the target" in line
