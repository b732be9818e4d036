"""Rows on disk equal rows in memory; a cache is built once, and is complete or absent."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from moa_jax.config import DataConfig
from moa_jax.data import batches, encode, rows, shards, workers
from moa_jax.errors import InputError
from tests.data.conftest import CONFIG, CONVERSATIONS
from tests.meeting import wait_for
from tests.model_folders import refusal

VOCAB_SIZE = 512


@pytest.fixture
def data(tmp_path) -> Path:
    """Returns conversations, some of which cannot be used."""
    path = tmp_path / "talks.jsonl"
    lines = Path(CONVERSATIONS).read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:20], b'{"messages": []}\n', b"\xff\n", *lines[20:]]))
    return path


@pytest.fixture
def config(data, tmp_path, monkeypatch) -> DataConfig:
    monkeypatch.setattr(rows, "BLOCK", 16)  # three shards
    places = {"train": (str(data),), "cache": str(tmp_path / "cache")}
    return dataclasses.replace(CONFIG, max_length=200, row_length=240, **places)


@pytest.fixture
def load(config, talk_tokenizer):
    def load(split="train", watch=None, **changes):
        changed = dataclasses.replace(config, **changes)
        return batches.load(changed, talk_tokenizer, VOCAB_SIZE, split, watch)

    return load


def folders(load_config: DataConfig) -> list[Path]:
    """Returns the contents of the cache, without lock files."""
    found = Path(load_config.cache).glob("*")
    return sorted(path for path in found if path.suffix != ".lock")


def assert_equal(one, other) -> None:
    for name, a, b in zip(one._fields, one, other, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("pack", [True, False])
def test_rows_and_batches_equal_those_in_memory(load, config, pack):
    memory, report = load(cache=None, pack=pack)
    disk, same_report = load(pack=pack)
    (folder,) = folders(config)
    assert len(list(folder.glob("rows-*.npy"))) == 3
    assert same_report == report and report.kept == 40 and len(report.dropped) == 2
    assert_equal(memory.rows, disk.rows)
    assert len(memory) == len(disk) > 1 and memory.rows.position_BT.max() > 127
    for step in range(2 * len(memory) + 1):
        assert_equal(memory.batch(step), disk.batch(step))


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_rows(load, monkeypatch):
    monkeypatch.setattr(encode, "CHUNK", 4)
    (memory, report), (disk, same_report) = load(cache=None, workers=1), load(workers=3)
    assert_equal(memory.rows, disk.rows)
    assert same_report == report


@pytest.mark.parametrize("cache", [True, False])
def test_a_process_takes_its_slice_of_a_batch(load, cache):
    source, _ = load(**({} if cache else {"cache": None}))
    for step in (0, 7):
        whole = source.batch(step)
        parts = [source.batch(step, rows=slice(i, i + 2)) for i in (0, 2)]
        joined = type(whole)(*map(np.concatenate, zip(*parts, strict=True)))
        assert_equal(joined, whole)


# ---- made once ----------------------------------------------------------------------------


def test_a_second_run_encodes_nothing(load, monkeypatch):
    first, report = load()
    monkeypatch.setattr(encode, "encode_chunk", Mock(side_effect=AssertionError("encoded again")))
    second, same_report = load(rows_per_batch=3, seed=9, workers=7, bad_records="skip")
    assert same_report == report
    assert_equal(first.rows, second.rows)
    with pytest.raises(AssertionError, match="encoded again"):
        load(max_length=100)


def test_all_that_decides_the_rows_is_in_the_fingerprint(
    config, talk_tokenizer, data, monkeypatch, tmp_path, tokenizer
):
    def made(vocab_size=VOCAB_SIZE, using=talk_tokenizer, **changes):
        coder = encode.Coder(dataclasses.replace(config, **changes), using, vocab_size)
        return json.dumps(shards.fingerprint(coder.config.train, coder), sort_keys=True)

    base = made()
    talk_tokenizer("Used, so that its state has changed.", truncation=True, max_length=3)
    assert made(rows_per_batch=9, seed=9, workers=9, bad_records="refuse") == base == made()
    found = {base, made(600), made(max_length=99), made(row_length=99), made(pack=False)}
    found |= {made(answers="reference"), made(sources=("hotel",))}
    found |= {made(train=("hub:group/talks/train",)), made(using=tokenizer)}
    times = data.stat().st_mtime_ns
    os.utime(data, ns=(times, times + 1))
    found.add(made())
    data.write_bytes(data.read_bytes() + b"\n")
    os.utime(data, ns=(times, times))
    found.add(made())
    (tmp_path / "folder").mkdir()
    for name in "ab":
        (tmp_path / "folder" / f"{name}.jsonl").write_bytes(data.read_bytes())
        found.add(made(train=(str(tmp_path / "folder"),)))
    monkeypatch.setattr(talk_tokenizer, "chat_template", talk_tokenizer.chat_template + " ")
    found.add(made())
    assert len(found) == 14


# ---- whole or not there -------------------------------------------------------------------


BUILD = """
import sys
import time
from moa_jax.config import DataConfig
from moa_jax.data import batches, encode, rows, shards
from moa_jax.data.tokenizer import load_tokenizer

if __name__ == "__main__":
    path, cache, tokenizer = sys.argv[1:]
    rows.BLOCK, encode.CHUNK = 16, 4
    write = shards._write
    waiting = lambda folder, number, block: time.sleep(600 * (number == 3))  # for its end
    shards._write = lambda *block: waiting(*block) or write(*block)
    config = DataConfig((path,), (), 200, 240, 4, cache=cache, workers=2)
    batches.load(config, load_tokenizer(tokenizer), 512, "train")
"""


@pytest.mark.slow
def test_a_killed_build_leaves_no_rows_and_no_processes(load, config, talk_tokenizer, tmp_path):
    many = tmp_path / "many.jsonl"
    many.write_bytes(Path(CONVERSATIONS).read_bytes() * 50)
    (tmp_path / "build.py").write_text(BUILD)
    paths = [str(many), config.cache, talk_tokenizer.name_or_path]
    command = [sys.executable, str(tmp_path / "build.py"), *paths]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        wait_for(lambda: list(Path(config.cache).glob("*.tmp/rows-00001.npy")), 120)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_for(lambda: not is_alive(process.pid), 120)
    (left,) = folders(config)
    assert left.suffix == ".tmp"
    assert load(train=(str(many),), workers=1)[1].kept == 2000
    assert [path.suffix for path in folders(config)] == ["", ".tmp"]


def is_alive(leader: int) -> bool:
    """Returns whether the process group of `leader` has a process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, 0)
        return True
    return False


def test_two_at_a_time_make_one_cache(load, config, monkeypatch):
    """Without locks in the file system, the second build is made and discarded."""
    make, both = shards._make, threading.Barrier(2)

    def slow(*arguments):
        both.wait(30)  # both have seen that there is no folder yet
        make(*arguments)

    monkeypatch.setattr(shards, "_make", slow)
    monkeypatch.setattr(shards, "alone", lambda path: contextlib.nullcontext())
    with ThreadPoolExecutor() as pool:
        one, other = pool.map(lambda _: load()[0].rows, range(2))
    assert_equal(one, other)
    (folder,) = folders(config)
    assert folder.suffix == ""


@pytest.mark.parametrize("name", ["rows-00001.npy", "manifest.json"])
def test_a_damaged_cache_is_named(load, config, name):
    load()
    (folder,) = folders(config)
    os.truncate(folder / name, (folder / name).stat().st_size - 1)
    line = refusal(load)
    assert f"{folder}" in line and "is damaged" in line and "; remove it, it is made again" in line


def test_a_full_disk_is_one_line(load, config, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(shards.np, "save", Mock(side_effect=full))
    line = refusal(load)
    assert "No space left on device" in line and "change data.cache" in line
    assert folders(config) == []


# ---- processes ----------------------------------------------------------------------------


def failing_item(number: int, shared: None) -> int:
    if number == 13:
        raise InputError("no luck")
    os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "item, fault", [(13, "no luck"), (17, "a process of 2 .* ended, .*; lower data.workers")]
)
def test_failures_in_a_process_are_named(item, fault):
    with pytest.raises(InputError, match=fault):
        list(workers.ordered_map(failing_item, [item], None, workers=2))
