"""Rows on disk: equal to those in memory, made once, whole or not there at all."""

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
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moa_jax.config import DataConfig
from moa_jax.data import batches, encode, rows, shards, sources, workers
from moa_jax.data import tokenizer as tk
from moa_jax.errors import InputError
from tests.meeting import wait_for

CONVERSATIONS = Path(__file__).parent / "conversations.jsonl"
VOCAB_SIZE = 512


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    texts = (m["content"] for r in sources.read(str(CONVERSATIONS)) for m in r["messages"])
    tk.train_tokenizer(texts, VOCAB_SIZE, folder)
    return tk.load_tokenizer(folder)


@pytest.fixture
def data(tmp_path) -> Path:
    """Conversations, a few of which cannot be used."""
    path = tmp_path / "talks.jsonl"
    lines = CONVERSATIONS.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:20], b'{"messages": []}\n', b"\xff\n", *lines[20:]]))
    return path


@pytest.fixture
def config(data, tmp_path, monkeypatch) -> DataConfig:
    monkeypatch.setattr(rows, "BLOCK", 16)  # three shards
    return DataConfig(
        train=(str(data),),
        validation=(str(CONVERSATIONS),),
        max_length=200,
        row_length=240,
        rows_per_batch=4,
        seed=5,
        cache=str(tmp_path / "cache"),
    )


@pytest.fixture
def load(config, tokenizer):
    def load(split="train", watch=None, **changes):
        changed = dataclasses.replace(config, **changes)
        return batches.load(changed, tokenizer, VOCAB_SIZE, split, watch)

    return load


@pytest.fixture
def no_encoding(monkeypatch):
    """Whoever encodes after this fails."""

    def never(*_):
        raise AssertionError("encoded again")

    return lambda: monkeypatch.setattr(encode, "encode_chunk", never)


def folders(load_config: DataConfig) -> list[Path]:
    """What the cache holds beside locks."""
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
@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_processes_makes_the_same_rows(load, monkeypatch, workers):
    monkeypatch.setattr(encode, "CHUNK", 4)
    (memory, report), (disk, same_report) = load(cache=None, workers=1), load(workers=workers)
    assert_equal(memory.rows, disk.rows)
    assert same_report == report


def test_a_block_is_laid_out_before_the_next_is_read(config):
    taken = []
    examples = [batches.chat.Example(np.arange(3, dtype=np.int32), np.ones(3, bool))] * 40
    stream = (taken.append(1) or example for example in examples)
    for number, block in enumerate(rows.blocks(stream, False, 8, 0), start=1):
        assert len(taken) == min(16 * number, 40) and len(block.tokens_BT) <= 16
    assert number == 3


@pytest.mark.parametrize("cache", [True, False])
def test_a_process_takes_its_slice_of_a_batch(load, cache):
    source, _ = load(**({} if cache else {"cache": None}))
    for step in (0, 7):
        whole = source.batch(step)
        parts = [source.batch(step, rows=slice(i, i + 2)) for i in (0, 2)]
        joined = type(whole)(*map(np.concatenate, zip(*parts, strict=True)))
        assert_equal(joined, whole)


# ---- made once ----------------------------------------------------------------------------


def test_a_second_run_encodes_nothing(load, no_encoding):
    first, report = load()
    no_encoding()
    second, same_report = load(rows_per_batch=3, seed=9, workers=7, bad_records="skip")
    assert same_report == report
    assert_equal(first.rows, second.rows)
    with pytest.raises(AssertionError, match="encoded again"):
        load(max_length=100)


def test_all_that_decides_the_rows_is_in_the_fingerprint(
    config, tokenizer, data, monkeypatch, tmp_path
):
    def made(vocab_size=VOCAB_SIZE, using=tokenizer, **changes):
        coder = encode.Coder(dataclasses.replace(config, **changes), using, vocab_size)
        return json.dumps(shards.fingerprint(coder.config.train, coder), sort_keys=True)

    base = made()
    tokenizer("Used, so that its state has changed.", truncation=True, max_length=3)
    assert made(rows_per_batch=9, seed=9, workers=9, bad_records="refuse") == base == made()
    found = {base, made(600), made(max_length=99), made(row_length=99), made(pack=False)}
    found |= {made(answers="reference"), made(sources=("hotel",)), made(train=(str(data),) * 2)}
    found.add(made(train=("hub:group/talks/train",)))
    tk.train_tokenizer(iter(["Another text altogether. " * 9]), 300, tmp_path / "other")
    found.add(made(using=tk.load_tokenizer(tmp_path / "other")))
    times = data.stat().st_mtime_ns
    os.utime(data, ns=(times, times + 1))
    found.add(made())
    os.utime(data, ns=(times, times))
    content = data.read_bytes()
    data.write_bytes(content + b"\n")
    os.utime(data, ns=(times, times))
    found.add(made())
    data.write_bytes(content)
    os.utime(data, ns=(times, times))
    assert made() == base
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", tokenizer.chat_template + " ")
        found.add(made())
    monkeypatch.setattr(shards, "FORMAT", shards.FORMAT + 1)
    found.add(made())
    assert len(found) == 13


def test_a_folder_of_files_is_part_of_the_fingerprint(load, config, tmp_path, data):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_bytes(data.read_bytes())
    _, one = load(train=(str(tmp_path / "folder"),))
    (tmp_path / "folder" / "b.jsonl").write_bytes(data.read_bytes())
    _, two = load(train=(str(tmp_path / "folder"),))
    assert (one.kept, two.kept, len(folders(config))) == (40, 80, 2)


def test_progress_counts_records_once(load):
    shown = []

    @contextlib.contextmanager
    def watch(total, label):
        shown.append([total, label, 0])

        def step(count):
            shown[-1][2] += count

        yield SimpleNamespace(step=step)

    load(watch=watch, sources=("hotel",))
    load(watch=watch, sources=("hotel",))
    assert shown == [[42, "records", 42]]  # those of other sources are looked at, too


# ---- whole or not there -------------------------------------------------------------------


def test_a_cut_build_leaves_nothing_that_looks_whole(load, config, monkeypatch):
    write = shards._write

    def cut(folder, number, block):
        if number == 1:
            raise KeyboardInterrupt
        return write(folder, number, block)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "_write", cut)
        load()
    assert folders(config) == []
    assert_equal(load()[0].rows, load(cache=None)[0].rows)


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
def test_a_killed_build_leaves_no_rows_and_no_processes(load, config, tokenizer, tmp_path):
    many = tmp_path / "many.jsonl"
    many.write_bytes(CONVERSATIONS.read_bytes() * 50)
    (tmp_path / "build.py").write_text(BUILD)
    paths = [str(many), config.cache, tokenizer.name_or_path]
    command = [sys.executable, str(tmp_path / "build.py"), *paths]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        wait_for(lambda: list(Path(config.cache).glob("*.tmp/rows-00001.npy")), 120)
        assert len(group(process.pid)) >= 3
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    wait_for(lambda: not group(process.pid), 120)
    (left,) = folders(config)
    assert left.suffix == ".tmp"
    assert load(train=(str(many),), workers=1)[1].kept == 2000
    assert [path.suffix for path in folders(config)] == ["", ".tmp"]


def group(leader: int) -> list[int]:
    """The processes that live in the process group of `leader`."""
    alive = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, number = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(number) == leader and state != "Z":
                alive.append(int(folder.name))
    return alive


@pytest.mark.parametrize("locks", [True, False])
def test_two_at_a_time_make_one_cache(load, config, monkeypatch, locks):
    """The second waits; where a file system has no locks, it makes its own and discards it."""
    built, make, both = [], shards._make, threading.Barrier(2)

    def slow(*arguments):
        built.append(1)
        if not locks:
            both.wait(30)  # both have seen that there is no folder yet
        make(*arguments)

    monkeypatch.setattr(shards, "_make", slow)
    if not locks:
        monkeypatch.setattr(shards, "alone", lambda path: contextlib.nullcontext())
    found = []
    threads = [threading.Thread(target=lambda: found.append(load()[0].rows)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == (1 if locks else 2)
    assert_equal(*found)
    (folder,) = folders(config)
    assert folder.suffix == ""


def test_what_cut_builds_left_is_swept(load, config):
    load()
    (folder,) = folders(config)
    old, young = folder.with_name(f"{folder.name}.1.tmp"), folder.with_name(f"{folder.name}.2.tmp")
    for path in (old, young):
        path.mkdir()
    os.utime(old, (0, 0))
    folder.rename(folder.with_name("elsewhere"))
    load()
    assert folders(config) == sorted([folder, young, folder.with_name("elsewhere")])


def damage(folder: Path, kind: str) -> None:
    shard = folder / "rows-00001.npy"
    if kind == "cut":
        os.truncate(shard, shard.stat().st_size - 1)
    elif kind == "gone":
        shard.unlink()
    else:
        (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize("kind", ["cut", "gone", "manifest"])
def test_a_damaged_cache_is_named(load, config, kind):
    load()
    (folder,) = folders(config)
    damage(folder, kind)
    with pytest.raises(InputError, match="is damaged .*; remove it, it is made again") as raised:
        load()
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


def test_a_full_disk_is_one_line(load, config, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.np, "save", full)
    with pytest.raises(InputError, match="No space left on device.*change data.cache"):
        load()
    assert folders(config) == []


def test_a_cache_that_is_no_folder_is_refused(load, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written .* change data.cache"):
        load(cache=str(tmp_path / "file"))


# ---- processes ----------------------------------------------------------------------------


def power(number: int, exponent: int) -> int:
    if number == 13:
        raise InputError("no luck")
    if number == 17:
        os._exit(1)
    time.sleep(0.02 * (number % 3 == 0))  # so that later ones are done sooner
    return number**exponent


@pytest.mark.slow
def test_a_map_over_processes_keeps_the_order_and_reads_little_ahead():
    taken = []
    numbers = (taken.append(n) or n for n in range(100, 200))
    found = workers.ordered_map(power, numbers, 2, workers=2)
    assert [next(found), next(found)] == [100**2, 101**2]
    assert len(taken) <= 2 + workers.AHEAD * 2 + 1
    assert list(found) == [n**2 for n in range(102, 200)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "item, fault", [(13, "no luck"), (17, "a process of 2 .* ended, .*; lower data.workers")]
)
def test_what_fails_in_a_process_is_told(item, fault):
    with pytest.raises(InputError, match=fault):
        list(workers.ordered_map(power, [1, 2, item], 2, workers=2))
