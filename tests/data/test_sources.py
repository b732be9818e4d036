"""Records are read from every kind of place; unreadable ones raise an error of one line."""

import functools
import gzip
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from moa_jax.data import records
from moa_jax.data import sources as sources_lib
from moa_jax.errors import InputError
from tests.data.conftest import CONVERSATIONS
from tests.model_folders import refusal

MARK = b"\xef\xbb\xbf"
MESSAGES = [{"role": "user", "content": "Hé"}, {"role": "assistant", "content": "Yes"}]
RECORDS = [{"text": f"Nº {i}", "source": f"shop/repo#set{i % 2}"} for i in range(5)]


def lines(records=RECORDS) -> bytes:
    return b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in records)


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def parquet(path: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    return str(path)


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", b"\n" + lines().rstrip() + b"\n \n\n"),
        ("a.jsonl", lines().replace(b"{", MARK + b"{").replace(b"\n", b"\r\n")),
        ("a.jsonl", MARK + json.dumps(RECORDS, indent=1).encode()),
        ("a.json", lines()),
        ("a.jsonl.gz", gzip.compress(lines(), mtime=0)),
        ("a.json.gz", gzip.compress(json.dumps(RECORDS).encode(), mtime=0)),
        ("a.parquet", None),
    ],
)
def test_every_kind_of_file(tmp_path, name, content):
    path = write(tmp_path / name, content) if content else parquet(tmp_path / name)
    assert list(sources_lib.read(path)) == RECORDS
    assert sources_lib.count(path) == len(RECORDS)
    assert sources_lib.files_of(path) == [Path(path)]
    assert list(sources_lib.read(path, ["set1"])) == RECORDS[1::2]
    columns = f"{path}?prompt=text"
    renamed = [{"prompt": each["text"], "source": each["source"]} for each in RECORDS]
    assert list(sources_lib.read(columns)) == renamed and sources_lib.count(columns) == 5
    assert "without the column nowhere" in refusal(list, sources_lib.read(f"{path}?text=nowhere"))


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    write(tmp_path / "b.jsonl", lines(RECORDS[3:]))
    write(tmp_path / "a" / "x.jsonl.gz", gzip.compress(lines(RECORDS[:2])))
    write(tmp_path / "a" / "y.json", json.dumps(RECORDS[2]).encode())
    write(tmp_path / "README.md", b"# not data")
    assert list(sources_lib.read(str(tmp_path))) == RECORDS
    assert sources_lib.count(str(tmp_path)) == len(RECORDS)


def test_sources():
    def names(*sources):
        return {r["source"] for r in sources_lib.read(CONVERSATIONS, sources)}

    assert names("hotel", "talk") == {"moa-jax#hotel", "moa-jax#talk"}
    assert names("moa-jax#hotel") == {"moa-jax#hotel"}
    assert names("otel") == names("moa-jax") == names("hotel#") == set()
    assert len(names()) == 9


def test_data_below_moa_data(tmp_path, monkeypatch):
    write(tmp_path / "chat" / "a.jsonl", lines())
    monkeypatch.setenv("MOA_DATA", str(tmp_path))
    assert list(sources_lib.read("data:chat/a.jsonl")) == RECORDS
    monkeypatch.setenv("MOA_DATA", str(tmp_path / "gone"))
    with pytest.raises(InputError, match="set MOA_DATA"):
        list(sources_lib.read("data:chat/a.jsonl"))


CUT = gzip.compress(lines() * 99, mtime=0)[:-20]


@pytest.mark.parametrize(
    "name, content, fault",
    [
        ("a.jsonl", b"[" * 100000 + b"\n", r"a\.jsonl line 1 is not JSON in UTF-8"),
        ("a.jsonl.gz", CUT, r"a\.jsonl\.gz cannot be read after"),
        ("a.json", b"[{}, 3]", r"a\.json record 2 is not a JSON object"),
        ("a.json", b"[{}", r"a\.json is not JSON"),
        ("a.parquet", b"PAR1 no more", r"a\.parquet is not Parquet"),
        ("a.csv", b"1,2", r"a\.csv is of no known kind"),
    ],
)
def test_unreadable_files(tmp_path, name, content, fault):
    with pytest.raises(InputError, match=fault) as raised:
        list(sources_lib.read(write(tmp_path / name, content)))
    assert "\n" not in str(raised.value)


def test_a_parquet_row_that_is_no_text_spoils_no_other(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = pyarrow.array([b"one", b"\xff", b"three"], pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(3, *texts.buffers()[1:])  # unchecked
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    one, fault, three = (what for _, what in sources_lib.read_all(str(tmp_path)))
    assert (one, three) == ({"text": "one"}, {"text": "three"})
    assert str(fault) == "not text in UTF-8; repair the record"
    with pytest.raises(InputError, match=r"a\.parquet record 2 is not text in UTF-8"):
        list(sources_lib.read(str(tmp_path)))


def test_hub_reads_through_datasets(tmp_path):
    pytest.importorskip("datasets")  # the loader accepts a folder as a hub id
    write(tmp_path / "set" / "train.jsonl", lines())
    assert list(sources_lib.read(f"hub:{tmp_path}/set/train", ["set0"])) == RECORDS[::2]
    assert sources_lib.files_of(f"hub:{tmp_path}/set/train") == [tmp_path / "set" / "train.jsonl"]
    assert sources_lib.count(f"hub:{tmp_path}/set/train") is None
    with pytest.raises(InputError, match="cannot open hub:.*check the name"):
        list(sources_lib.read(f"hub:{tmp_path}/set/test"))
    with pytest.raises(InputError, match="names no split"):
        list(sources_lib.read("hub:ultrachat"))


def test_a_revision_is_requested_from_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    load = Mock(return_value=iter(RECORDS))
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(sources_lib.read("hub:group/talks:en@refs/pr/3/train")) == RECORDS
    rest = dict(revision="refs/pr/3", split="train", streaming=True)
    load.assert_called_once_with("group/talks", "en", **rest)


def test_tfds_reads_a_prepared_dataset(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    text = tfds.features.Text()
    turn = {"role": text, "content": text}

    class SmallChats(tfds.core.GeneratorBasedBuilder):
        __module__ = "__main__"  # a separate builder, in no package
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"messages": tfds.features.Sequence(turn), "count": np.int64}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, _):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield 0, {"messages": MESSAGES, "count": 3}

    in_folder = {"data_dir": tmp_path, "builder_kwargs": {"file_format": "array_record"}}
    monkeypatch.setattr(tfds, "data_source", functools.partial(tfds.data_source, **in_folder))
    (record,) = sources_lib.read("tfds:small_chats/train")
    assert record["count"] == 3
    assert records.messages_of(record) == MESSAGES
    assert sources_lib.count("tfds:small_chats/train") == 1
    with pytest.raises(InputError, match="cannot open tfds:small_chats/test"):
        list(sources_lib.read("tfds:small_chats/test"))


def test_absent_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        list(sources_lib.read("hub:x/y/train"))
