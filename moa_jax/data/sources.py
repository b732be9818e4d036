"""Records from files, folders, the Hugging Face hub and TensorFlow Datasets.

    chat.jsonl  chat.json  chat.parquet     a file, or a folder of these; JSON also with .gz
    data:chat/train.jsonl.gz                below $MOA_DATA, else ../shared/data
    hub:HuggingFaceH4/ultrachat_200k/train_sft   through `datasets`, streamed
    hub:openai/gsm8k:main/test                   one configuration of a dataset that has several
    hub:HuggingFaceH4/ultrachat_200k@REVISION/train_sft    at a commit, a tag or a branch
    hub:FOLDER/SPLIT                        a folder of data files, or of `save_to_disk`
    tfds:NAME/SPLIT                         through `tensorflow_datasets`
    PATH?messages=dialog&system=rules       any of these whose columns have other names

JSON Lines and datasets are streamed; only the current record is kept in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moa_jax.data import files
from moa_jax.data.files import Found, locate
from moa_jax.data.records import COLUMNS
from moa_jax.errors import InputError, first_line
from moa_jax.files.hub import quiet_hub

__all__ = [
    "count",
    "files_of",
    "hub_id",
    "is_from",
    "locate",
    "read",
    "read_all",
    "read_numbered",
    "read_some",
    "sound",
]

Records = Iterator[tuple[str, dict]]  # each with its location, `FILE line N`


def read(path: str, sources: Sequence[str] = ()) -> Iterator[dict]:
    """Stream the records of a path of any kind above; a folder's files are sorted by name.

    `sources` selects records whose `source` equals one of these names, or ends with `#` and such a
    name. Raises InputError, naming the file and line, for data that is missing or unreadable.
    """
    records = read_numbered(path, sources)
    return (record for _, record in records)


def read_numbered(path: str, sources: Sequence[str] = ()) -> Records:
    """The records of `read`, each with its location for messages: `FILE line N` or `record N`."""
    return (found for found in _sound(read_all(path)) if is_from(found[1], sources))


def read_all(path: str) -> Found:
    """Records of all sources with their locations; an InputError stands for an unreadable record.

    The error does not name the location, so that equal faults can be counted. Faults that affect
    more than one record are raised, as by `read`.
    """
    kind, name = _kind(path)
    if kind == "hub":
        found = _read_hub(name)
    elif kind == "tfds":
        found = _read_tfds(name)
    else:
        parts = (files.kind_of(file).read(file) for file in files_of(path))
        found = itertools.chain.from_iterable(parts)
    columns = _columns_of(path)
    return ((place, _renamed(record, columns)) for place, record in found) if columns else found


def read_some(path: str, sources: Sequence[str]) -> Found:
    """The records of some sources, () for all, and an InputError per unreadable record."""
    for place, record in read_all(path):
        if isinstance(record, InputError) or is_from(record, sources):
            yield place, record


def sound(record: dict | InputError) -> dict:
    """A record of `read_all`; raises InputError for an unreadable record."""
    if isinstance(record, InputError):
        raise InputError(f"a record that is {record}") from record
    return record


def is_from(record: dict, sources: Sequence[str]) -> bool:
    """Whether a record comes from one of `sources`, as in `read`; () matches all records."""
    endings = tuple(f"#{name}" for name in sources)
    return not sources or f"#{record.get('source')}".endswith(endings)


def count(path: str) -> int | None:
    """Number of records that `read_all` yields; None if no quick count is available."""
    kind, name = _kind(path)
    if kind == "hub":
        records = _open_hub(name)
        if hasattr(records, "__len__"):
            return len(records)
        split = (records.info.splits or {}).get(_name_and_split("hub", name)[1])
        return (split and split.num_examples) or None
    if kind == "tfds":
        return len(_open_tfds(name))
    return sum(files.kind_of(file).count(file) for file in files_of(path))


def files_of(path: str) -> list[Path]:
    """The local files of a path, in reading order; none for a hub id or tfds name."""
    path = _without_columns(path)
    kind, name = _kind(path)
    if kind == "tfds":
        return []
    if kind == "hub":
        folder = Path(_name_and_split(kind, name)[0]).expanduser()
        return sorted(file for file in folder.rglob("*") if file.is_file())
    return files.below(locate(path))


def hub_id(path: str) -> str | None:
    """The id of a `hub:` dataset; None for files, for tfds and for a folder of this machine."""
    kind, name = _kind(path)
    dataset = name.rpartition("/")[0]
    if kind != "hub" or Path(dataset).expanduser().exists():
        return None
    return dataset.partition("@")[0].partition(":")[0]


def _kind(path: str) -> tuple[str, str]:
    path = _without_columns(path)
    kind, _, name = path.partition(":")
    return (kind, name) if kind in ("hub", "tfds") else ("", path)


def _without_columns(path: str) -> str:
    return path.rpartition("?")[0] if _columns_of(path) else path


def _columns_of(path: str) -> dict[str, str]:
    """The column of each key that the end of a path renames: `?messages=dialog&system=rules`."""
    name, _, query = path.rpartition("?")
    if not name or "=" not in query:
        return {}
    pairs = [pair.partition("=")[::2] for pair in query.split("&")]
    for key, column in pairs:
        if key not in COLUMNS or not column:
            known = ", ".join(COLUMNS)
            fault = f"{key!r} names no key of records" if column else f"{key} names no column"
            raise InputError(f"{path}: {fault}; write KEY=COLUMN with a key of {known}")
    return dict(pairs)


def _renamed(record: dict | InputError, columns: dict[str, str]) -> dict | InputError:
    """A record with its columns under the names of keys; an InputError if it has none of them."""
    if isinstance(record, InputError):
        return record
    if not columns.values() & record.keys():
        return InputError(f"without the column {' or '.join(columns.values())}; see the path")
    rest = {name: each for name, each in record.items() if name not in columns.values()}
    return rest | {key: record[name] for key, name in columns.items() if name in record}


def _sound(found: Found) -> Records:
    for place, record in found:
        if isinstance(record, InputError):
            detail = f" ({first_line(record.__cause__)})" if record.__cause__ else ""
            raise InputError(f"{place} is {record}{detail}") from record
        yield place, record


def _read_hub(name: str) -> Found:
    records = _open_hub(name)
    try:
        yield from files.numbered(f"hub:{name}", records)
    except Exception as error:  # the network may fail at any record
        raise _unavailable("hub", name, error) from error


def _open_hub(name: str) -> Any:
    dataset, split = _name_and_split("hub", name)
    try:
        import datasets

        saved = Path(dataset).expanduser() / split
        if (saved / "state.json").is_file():
            return datasets.load_from_disk(saved)
        at = ("",) if Path(dataset).exists() else dataset.partition("@")[1:]
        name_on_hub, _, config = dataset.removesuffix("".join(at)).partition(":")
        rest = {"revision": at[-1] or None, "split": split, "streaming": True}
        with quiet_hub():
            return datasets.load_dataset(name_on_hub, config or None, **rest)
    except Exception as error:  # network, unknown name, unknown split: each of another type
        raise _unavailable("hub", name, error) from error


def _read_tfds(name: str) -> Found:
    source = _open_tfds(name)
    yield from files.numbered(f"tfds:{name}", (_readable(source[i]) for i in range(len(source))))


def _open_tfds(name: str) -> Sequence[dict]:
    dataset, split = _name_and_split("tfds", name)
    try:
        import tensorflow_datasets

        return tensorflow_datasets.data_source(dataset, split=split)
    except Exception as error:
        raise _unavailable("tfds", name, error) from error


def _name_and_split(kind: str, name: str) -> tuple[str, str]:
    dataset, _, split = name.rpartition("/")
    if not dataset or not split:
        raise InputError(f"{kind}:{name} names no split; write {kind}:NAME/SPLIT")
    return dataset, split


def _readable(record: dict) -> dict | InputError:
    try:
        return _plain(record)
    except UnicodeDecodeError as error:
        return files.fault("not text in UTF-8; repair the record", error)


def _plain(value: Any) -> Any:
    """Strings for bytes and lists for arrays; TensorFlow Datasets has text as bytes in arrays."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [_plain(item) for item in value]


def _unavailable(kind: str, name: str, error: Exception) -> InputError:
    if isinstance(error, ImportError) and error.name:
        return files.missing(error, f"{kind}:{name}")
    reason = first_line(error)
    return InputError(f"cannot open {kind}:{name} ({reason}); check the name, split and network")
