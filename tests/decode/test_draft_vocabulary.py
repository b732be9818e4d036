"""Draft vocabularies: EAGLE-3's files, refused files, the token ranking, and the program."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import moa_jax
from moa_jax.config import BlockConfig, TargetConfig
from moa_jax.data import chat, sources
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.draft_vocabulary import (
    DraftVocabulary,
    count_tokens,
    coverage,
    load_vocabulary,
    most_frequent,
    save_vocabulary,
    vocabulary_of,
)
from moa_jax.files.model_folder import file_hash
from moa_jax.files.token_ids import fingerprint, read_token_ids
from moa_jax.pretrained import SpecialIds, Target, describe_target
from tests.model_folders import refusal
from train import vocabulary as program

DEMO = Path(moa_jax.__file__).parent / "demo" / "target"
CONVERSATIONS = Path(__file__).parents[1] / "data" / "conversations.jsonl"

# The example in the docstring of moa_jax/decode/draft_vocabulary.py, written by hand.
IDS = np.array([1, 4, 5], np.int32)
D2T = np.array([1, 3, 3], np.int64)
T2D = np.array([0, 1, 0, 0, 1, 1, 0, 0], bool)


@pytest.fixture
def target(tmp_path) -> Target:
    """Returns a target of 8 tokens, without weights; its folder holds a fake tokenizer."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    block = BlockConfig(32, 4, 2, 8, 48, 1e-5, 1e4, None)
    config = TargetConfig("llama", 8, 2, block, False, 512)
    return Target(config, None, folder, SpecialIds((4,)))


@pytest.fixture
def load(tmp_path, target):
    """Loads a file of the given tensors and metadata for the target of 8 tokens."""

    def load(metadata: dict[str, str] | None = None, **tensors: np.ndarray) -> DraftVocabulary:
        save_file(tensors, tmp_path / "file.safetensors", metadata)
        return load_vocabulary(tmp_path / "file.safetensors", target)

    return load


def test_saved_as_written_by_hand(tmp_path, target):
    saved = vocabulary_of(IDS, target)
    path = save_vocabulary(tmp_path / "new" / "draft_vocabulary.safetensors", saved)
    stored = load_file(path)
    assert {name: array.dtype.name for name, array in stored.items()} == {
        "d2t": "int64",
        "t2d": "bool",
    }
    np.testing.assert_array_equal(stored["d2t"], D2T)
    np.testing.assert_array_equal(stored["t2d"], T2D)
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"vocabulary": fingerprint(read_token_ids(target.folder))}
    for place in (path, path.parent):
        found = load_vocabulary(place, target)
        assert found[1:] == (saved.vocab_size, saved.fingerprint, path)
        np.testing.assert_array_equal(found.ids_U, IDS)
    none = refusal(load_vocabulary, tmp_path / "none", target)
    assert "no draft vocabulary" in none and none.endswith("none; check the path")


@pytest.mark.parametrize(
    "tensors",
    [
        {"d2t": D2T},
        {"t2d": T2D},
        {"d2t": D2T, "t2d": T2D},
        {"d2t": np.array([5, 0, 2])},  # ids 5, 1, 4: the order of the head does not matter
        {"d2t": D2T, "t2d": T2D, "lm_head.weight": np.zeros((3, 2), np.float32)},
    ],
    ids=["d2t", "t2d", "both", "unordered", "in a checkpoint"],
)
def test_either_tensor_is_enough(load, tensors):
    found = load(**tensors)
    np.testing.assert_array_equal(found.ids_U, IDS)
    assert (found.vocab_size, found.fingerprint) == (8, None)


@pytest.mark.parametrize(
    "line, tensors",
    [
        ("t2d has 7 entries and the target 8 tokens; use", {"t2d": T2D[:7]}),
        ("d2t holds the id -1, which is outside the vocab", {"d2t": D2T - [2, 0, 0]}),
        ("d2t gives the id 4 more than once", {"d2t": D2T - [0, 0, 1]}),
        ("d2t gives 3 ids and t2d marks 3, not the same", {"d2t": D2T, "t2d": np.roll(T2D, 1)}),
        ("holds neither d2t nor t2d; make", {"lm_head.weight": np.zeros(3)}),
        ("d2t is F64 of shape .3.; it must be I64 with one axis", {"d2t": D2T.astype(float)}),
    ],
)
def test_refused_tensors(load, line, tensors):
    assert re.search(r"file\.safetensors.*" + line, refusal(load, **tensors))


def test_another_tokenizer_is_refused_where_both_are_known(load, target):
    line = "was made for another tokenizer: .*file.safetensors states .* 1:0000"
    other = {"vocabulary": "1:" + "0" * 64}
    # The length is wrong too; the error names the cause first.
    assert re.search(line, refusal(load, other, t2d=T2D[:7]))
    same = {"vocabulary": fingerprint(read_token_ids(target.folder))}
    earlier = {"tokenizer_sha256": file_hash(target.folder / "tokenizer.json")}
    for metadata in (same, earlier):
        assert load(metadata, d2t=D2T).fingerprint == same["vocabulary"]
        assert load(metadata, t2d=T2D[:7]).ids_U.tolist() == IDS.tolist()  # of fewer unused rows
    (target.folder / "tokenizer.json").unlink()
    assert load(other, d2t=D2T).fingerprint == other["vocabulary"]


def ranked(size: int, always: tuple[int, ...] = ()) -> list[int]:
    """Ranks 8 tokens: 6 occurs three times, 7 and 2 twice, 3 and 1 once, the others never."""
    count_V = count_tokens([[7, 2, 6, 3], [], [6, 2, 1, 7, 6]], 8)
    ids = most_frequent(count_V, size, always)
    assert ids.dtype == np.int32
    return ids.tolist()


def test_ranking_takes_the_most_frequent_and_of_ties_the_lower():
    assert [ranked(size) for size in (1, 2, 4)] == [[6], [2, 6], [1, 2, 6, 7]]
    assert ranked(6) == [0, 1, 2, 3, 6, 7]
    assert ranked(8) == list(range(8))
    assert ranked(3, (5, 0, 5)) == [0, 5, 6]  # ids to keep replace the least frequent ids
    assert ranked(3, (6,)) == [2, 6, 7]
    assert "2 must be in it; ask for a size from 2 to 8" in refusal(ranked, 1, (4, 5))


def test_coverage():
    count_V = count_tokens([[1, 1, 4], [2]], 8)
    assert count_V.tolist() == [0, 2, 1, 0, 1, 0, 0, 0]
    assert coverage(count_V, IDS) == 0.75
    assert coverage(np.zeros(8, int), IDS) == 0.0
    line = refusal(count_tokens, [[1], [2, 8]], 8)  # text of another tokenizer
    assert "the text holds the id 8, which is outside" in line


def make(output: Path, *flags: str, corpus: Path = CONVERSATIONS) -> None:
    arguments = ["--target", str(DEMO), "--corpus", str(corpus), "--size", "50", *flags]
    program.main([*arguments, "--output", str(output)])


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def counted_answers(limit: int) -> Counter[int]:
    """Counts the tokens of answers and their end marks, without the code under test."""
    tokenizer = load_tokenizer(DEMO)
    records = list(sources.read(str(CONVERSATIONS)))[:limit]
    answers = [
        message["content"].strip() + "<|end|>"
        for record in records
        for message in chat.messages_of(record)
        if message["role"] == "assistant"
    ]
    return Counter(
        i for text in answers for i in tokenizer(text, add_special_tokens=False).input_ids
    )


def test_program_counts_answers_alone(tmp_path, capsys):
    output, limit = tmp_path / "new" / "v.safetensors", 40
    make(output, "--limit", str(limit))
    target = describe_target(DEMO)
    found = load_vocabulary(output, target)
    counts = counted_answers(limit)
    ranking = sorted(range(2048), key=lambda token: (-counts[token], token))
    assert found.ids_U.tolist() == sorted(ranking[:50])
    assert target.generation.eos_ids == (4,) and 4 in found.ids_U
    assert found.fingerprint == fingerprint(read_token_ids(DEMO))
    share = sum(counts[token] for token in found.ids_U.tolist()) / counts.total()
    assert 0.3 < share < 1
    line = f"{output}: 50 of 2048 tokens cover {share:.2%} of {counts.total()} answer tokens\n"
    assert capsys.readouterr().out == line


def test_program_reports_skipped_records(tmp_path, capsys):
    hi = {"role": "user", "content": "Hi"}
    yes = {"role": "assistant", "content": "Yes"}
    corpus = write(
        tmp_path / "c.jsonl",
        {"messages": [hi, yes], "source": "a"},
        {"messages": [hi], "source": "a"},
        {"text": "Yes"},
        {"messages": [hi, yes, hi, yes], "source": "b"},
    )
    make(tmp_path / "all", corpus=corpus)
    make(tmp_path / "one", "--sources", "a", corpus=corpus)
    shown = capsys.readouterr()
    share, other = shown.out.splitlines()
    assert "cover 100.00% of " in share and "cover 100.00% of " in other
    tokens = [int(line.split(" of ")[-1].split()[0]) for line in (share, other)]
    assert tokens[0] == 3 * tokens[1] > 0
    lines = [line for line in shown.err.splitlines() if "left out" in line]
    assert sum("without an answer" in line for line in lines) == 2
    assert sum("plain text" in line for line in lines) == 1


def test_program_refuses_bad_input_in_one_line(tmp_path, run):
    taken, fresh = tmp_path / "taken.safetensors", tmp_path / "v.safetensors"
    taken.touch()
    bad = write(tmp_path / "bad.jsonl", {"nothing": 1}, {"nothing": 2})
    flags = ["--target", DEMO, "--corpus", CONVERSATIONS, "--size", "100", "--output", fresh]
    for changed, words in [
        (["--output", taken], "exists already"),
        # before the corpus is read, because counting may take long
        (["--size", "2049", "--corpus", "none"], "2048 tokens; ask for a size from 1 to 2048"),
        (["--sources", "nowhere"], "no records of nowhere"),
        (["--corpus", bad], "none of 2 records has an answer; of 2: a record of unknown"),
    ]:
        assert words in run("train.vocabulary", *flags, *changed).refusal()
        assert not fresh.exists()
