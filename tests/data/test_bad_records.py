"""Records that cannot be trained on are counted, named and skipped, or refused by config."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from moa_jax.config import DataConfig
from moa_jax.data import batches
from moa_jax.errors import InputError

QUESTION, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
GOOD = {"messages": [QUESTION, ANSWER]}
LONG = {"messages": [{"role": "user", "content": "1" * 40}, ANSWER]}

# Lines of a file, and the reason that is counted for each.
BAD: list[tuple[object, str]] = [
    ({}, "unknown style"),
    ({"messages": []}, "`messages` is empty"),
    ({"text": ""}, "an empty text"),
    ({"messages": [QUESTION, {"role": "assistant", "content": " "}]}, "a message without text"),
    (LONG, "no answer within 24 tokens"),
    ({"messages": [QUESTION]}, "without an answer"),
    ({"messages": [QUESTION, {"role": ["user"], "content": "Yes"}]}, r"role \['user'\]"),
    ({"messages": ["Hi", "Yes"]}, "a message that is not an object"),
    ({"messages": [QUESTION, ANSWER | {"tool_calls": ["look"]}]}, "`tool_calls` are not objects"),
    ({"messages": [QUESTION, ANSWER | {"reasoning_content": 1}]}, "`reasoning_content` is not te"),
    ({"messages": [QUESTION, {"role": "tool", "content": "1"}, ANSWER]}, "the role tool"),
    (GOOD | {"tools": "{"}, "`tools` is not JSON"),
    (GOOD | {"chat_template_kwargs": {"tokenize": True}}, "sets tokenize"),
    (b'{"text": "\xc3"}', "not JSON in UTF-8"),
    (b'{"text": "\\ud800"}', "not text in UTF-8"),
    (b"[]", "not a JSON object"),
]


def write(path: Path, lines: list[object]) -> DataConfig:
    """Returns a config that trains on these lines alone."""
    written = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in written))
    return DataConfig((str(path),), (), 24, 24, rows_per_batch=2, seed=0)


@pytest.mark.parametrize("bad, reason", BAD)
def test_each_is_counted_and_named_or_refused(tokenizer, tmp_path, bad, reason):
    config = write(tmp_path / "a.jsonl", [GOOD, bad, GOOD, bad])
    _, report = batches.load(config, tokenizer, len(tokenizer), "train")
    ((why, count),) = report.dropped.items()
    assert (report.kept, count) == (2, 2)
    assert report.first == {why: f"{tmp_path / 'a.jsonl'} line 2"}
    assert f"2 x {why} (first: {tmp_path / 'a.jsonl'} line 2)" in str(report)
    refuse = dataclasses.replace(config, bad_records="refuse")
    with pytest.raises(InputError, match=rf"a\.jsonl line 2: .*{reason}") as raised:
        batches.load(refuse, tokenizer, len(tokenizer), "train")
    assert "\n" not in str(raised.value)


def test_records_that_a_cache_left_out_are_refused_too(tokenizer, tmp_path):
    config = write(tmp_path / "a.jsonl", [GOOD, {}])
    config = dataclasses.replace(config, cache=str(tmp_path / "cache"))
    batches.load(config, tokenizer, len(tokenizer), "train")
    refuse = dataclasses.replace(config, bad_records="refuse")
    with pytest.raises(InputError, match=r"a\.jsonl line 2: .*unknown style"):
        batches.load(refuse, tokenizer, len(tokenizer), "train")


def test_records_of_other_sources_may_be_bad(tokenizer, tmp_path):
    lines = [{"source": "a"}, GOOD | {"source": "b"}]
    config = write(tmp_path / "a.jsonl", lines)
    config = dataclasses.replace(config, sources=("b",), bad_records="refuse")
    _, report = batches.load(config, tokenizer, len(tokenizer), "train")
    assert (report.kept, report.dropped) == (1, {})
