"""Rows keep conversations whole and separate, and a batch depends on its step alone."""

import dataclasses
import json

import numpy as np
import pytest

from moa_jax.data import batches, chat, sources
from moa_jax.data import tokenizer as tk
from tests.data.conftest import CONFIG, CONVERSATIONS, PAD, numbered_rows
from tests.model_folders import refusal


def examples(seed: int, count: int = 200, longest: int = 40) -> list[chat.Example]:
    """Returns conversations of random length with distinct tokens, so that a loss is noticed."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, longest, count)
    ends = 100 + np.cumsum(lengths)
    return [
        chat.Example(np.arange(end - n, end, dtype=np.int32), draw.random(n) < 0.5)
        for n, end in zip(lengths, ends, strict=True)
    ]


def segments(rows) -> list[chat.Example]:
    """Returns the examples that rows hold, by their first token; checks the shape of each row."""
    found = []
    for tokens_T, segment_T, position_T, response_T in zip(*rows, strict=True):
        count = segment_T.max()
        order = np.where(segment_T == 0, count + 1, segment_T)  # padding is last
        assert (np.diff(order) >= 0).all()
        for segment in range(1, count + 1):
            here = segment_T == segment
            assert position_T[here].tolist() == list(range(here.sum()))
            found.append(chat.Example(tokens_T[here], response_T[here]))
        padding = segment_T == 0
        assert (tokens_T[padding] == PAD).all() and not response_T[padding].any()
        assert not position_T[padding].any()
    return sorted(found, key=lambda example: example.tokens_T[0])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("longest_first", [False, True])
def test_packed_rows_hold_every_example_whole(seed, longest_first):
    given = examples(seed)
    rows = batches.pack(given, 64, PAD, longest_first)
    longest = max(given, key=lambda example: len(example.tokens_T))
    assert (rows.tokens_BT[0, 0] == longest.tokens_T[0]) == longest_first
    np.testing.assert_equal(segments(rows), given)
    fill = (rows.segment_BT > 0).mean()
    assert rows.tokens_BT.shape[1] == 64 and fill > 0.9
    assert [a.dtype for a in rows] == [np.int32, np.int32, np.int32, bool]


@pytest.mark.parametrize("place", [batches.pack, batches.pad])
def test_an_example_longer_than_a_row_is_cut(place):
    (given,) = examples(0, count=1, longest=2)
    long = chat.Example(np.arange(100, 120, dtype=np.int32), np.ones(20, bool))
    rows = place([long, given], 16, PAD)
    assert rows.tokens_BT[0].tolist() == list(range(100, 116))
    assert rows.tokens_BT[1][0] == given.tokens_T[0]


def dealt(source, steps) -> list[list[int]]:
    return [source.batch(step).tokens_BT[:, 0].tolist() for step in steps]


def test_an_epoch_deals_each_row_at_most_once():
    source = batches.Batches(numbered_rows(11), 3, seed=1)
    assert len(source) == 3
    for epoch in range(4):
        rows = sum(dealt(source, range(3 * epoch, 3 * epoch + 3)), [])
        assert len(set(rows)) == 9 and set(rows) <= set(range(1, 12))


def test_batches_depend_on_seed_and_step_alone():
    rows = numbered_rows(11)
    unbroken = dealt(batches.Batches(rows, 3, seed=1), range(9))
    resumed = batches.Batches(rows, 3, seed=1)
    assert dealt(resumed, reversed(range(9))) == unbroken[::-1]
    assert unbroken[:3] != unbroken[3:6]
    assert dealt(batches.Batches(rows, 3, seed=2), range(9)) != unbroken


def test_few_rows_are_filled_up_with_empty_ones():
    source = batches.Batches(numbered_rows(2), 5, seed=0, pad_id=PAD)
    assert len(source) == 1
    batch = source.batch(3)
    assert sorted(batch.tokens_BT[:, 0].tolist()) == [1, 2, PAD, PAD, PAD]
    empty = batch.tokens_BT[:, 0] == PAD
    assert not batch.segment_BT[empty].any() and not batch.response_BT[empty].any()
    assert batch.segment_BT[~empty].all()


def test_load_keeps_all_conversations(talk_tokenizer):
    source, report = batches.load(CONFIG, talk_tokenizer, 512, "train")
    assert report.kept == report.examples == 40 and report.dropped == {}
    assert report.rows == len(source.rows.tokens_BT) < 40 and report.fill > 0.8
    assert report.tokens == (source.rows.segment_BT > 0).sum()
    assert report.response_tokens == source.rows.response_BT.sum()
    answers = [
        message["content"]
        for record in sources.read(CONVERSATIONS)
        for message in record["messages"]
        if message["role"] == "assistant"
    ]
    rows = zip(source.rows.tokens_BT, source.rows.response_BT, strict=True)
    written = "".join(talk_tokenizer.decode(tokens_T[response_T]) for tokens_T, response_T in rows)
    assert sorted(written.split(tk.END)) == sorted([*answers, ""])


@pytest.mark.parametrize("answers", ["turns", "reference"])
def test_ids_are_kept_under_either_rule(talk_tokenizer, tmp_path, answers):
    """The template does not change token ids."""
    ids = {"prompt_ids": [400, 3], "token_ids": [401, 2, 2, 511]}
    records = [
        ids,
        ids | {"token_ids": [*range(100, 400)]},  # cut
        ids | {"prompt_ids": [3] * 256},  # so long that nothing of the answer is left
        ids | {"token_ids": [512]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    changes = {"train": (str(path),), "pack": False, "answers": answers, "rows_per_batch": 1}
    config = dataclasses.replace(CONFIG, **changes)
    source, report = batches.load(config, talk_tokenizer, 512, "train")
    rows = source.rows
    assert rows.tokens_BT[0][rows.segment_BT[0] == 1].tolist() == [400, 3, 401, 2, 2, 511]
    assert rows.tokens_BT[1].tolist() == [400, 3, *range(100, 354)]
    found = [np.flatnonzero(row).tolist() for row in rows.response_BT]
    assert found == [[2, 3, 4, 5], [*range(2, 256)]]
    assert (report.kept, report.full) == (2, 1)
    assert str(report).startswith("2 conversations, 2 dropped (1 x no answer within 256 tokens")


def test_load_refuses(talk_tokenizer):
    for line, vocab_size, changes in (
        ("none of 40 records of", 512, dict(max_length=4)),
        ("no records of the sources space in", 512, dict(sources=("space",))),
        ("an empty list of paths", 512, dict(train=())),
        ("ids outside the vocabulary of 100", 100, {}),
        ("no token 599", 600, dict(answers="reference")),
    ):
        config = dataclasses.replace(CONFIG, **changes)
        assert line in refusal(batches.load, config, talk_tokenizer, vocab_size, "train")
