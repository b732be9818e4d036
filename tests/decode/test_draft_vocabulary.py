"""Draft vocabularies: EAGLE-3's files, refused files, the token ranking, and the program."""

from __future__ import annotations

import re

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moa_jax.config import BlockConfig, TargetConfig
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
from moa_jax.pretrained import SpecialIds, Target
from tests.model_folders import refusal

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
