"""Records from wherever text lies: files, folders, the hub, TensorFlow Datasets.

    chat.jsonl  chat.jsonl.gz  chat.json  chat.parquet   a file, or a folder of these
    data:chat/train.jsonl.gz                             below $MOA_DATA, else ../shared/data
    hub:HuggingFaceH4/ultrachat_200k/train_sft           through `datasets`, streamed
    tfds:NAME/SPLIT                                      through `tensorflow_datasets`

JSON Lines and datasets are streamed; nothing is kept in memory but the record at hand.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from moa_jax.errors import InputError, first_line

Records = Iterator[tuple[str, dict]]  # each with its place, `FILE line N`


def read(path: str, sources: Sequence[str] = ()) -> Iterator[dict]:
    """Stream the records of a path, of any kind above; a folder's files in the order of names.

    With `sources`, only records whose `source` is one of these or ends with `#` and one of them.
    Raises InputError for what does not exist or cannot be read, naming the file and line.
    """
    records = read_numbered(path, sources)
    return (record for _, record in records)


def read_numbered(path: str, sources: Sequence[str] = ()) -> Records:
    """The records of `read`, each behind its place for messages: `FILE line N` or `record N`."""
    kind, _, rest = path.partition(":")
    reader = {"hub": _read_hub, "tfds": _read_tfds}.get(kind)
    records = reader(rest) if reader else _read_files(locate(path))
    if not sources:
        return records
    endings = tuple(f"#{name}" for name in sources)
    return (found for found in records if f"#{found[1].get('source')}".endswith(endings))


def locate(path: str) -> Path:
    """The file or folder that a path means, `data:` resolved; InputError if it does not exist."""
    if path.startswith("data:"):
        beside = Path(__file__).resolve().parents[3] / "shared" / "data"
        root = Path(os.environ.get("MOA_DATA") or beside)
        if not root.is_dir():
            raise InputError(f"no data folder for {path}: set MOA_DATA to the folder that holds it")
        found = root / path.removeprefix("data:")
    else:
        found = Path(path).expanduser()
    if not found.exists():
        raise InputError(f"no file or folder {found}: check the path of the data")
    return found


def _read_files(path: Path) -> Records:
    if path.is_file():
        files = [path]
    else:
        files = sorted(file for file in path.rglob("*") if file.is_file() and _reader_of(file))
    if not files:
        raise InputError(f"{path} holds no data: put {', '.join(READERS)} files there")
    for file in files:
        reader = _reader_of(file)
        if reader is None:
            raise InputError(f"{file} is of no known kind: use {', '.join(READERS)}")
        yield from reader(file)


def _reader_of(file: Path) -> Callable[[Path], Records] | None:
    return next((read for end, read in READERS.items() if file.name.endswith(end)), None)


def _read_jsonl(file: Path) -> Records:
    opener = gzip.open if file.name.endswith(".gz") else open
    number = 0
    try:
        with opener(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    where = f"{file} line {number}"
                    yield where, _parse(line, where)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{file} cannot be read after line {number} ({error}): restore the file"
        ) from error


def _read_json(file: Path) -> Records:
    try:
        records = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file} is not JSON in UTF-8 ({error}): repair the file") from error
    for number, record in enumerate(records if isinstance(records, list) else [records], start=1):
        where = f"{file} record {number}"
        yield where, _checked(record, where)


def _read_parquet(file: Path) -> Records:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise _missing(error, str(file)) from error
    try:
        with parquet.ParquetFile(file) as table:
            parts = table.iter_batches(batch_size=1024)
            yield from _numbered(str(file), (row for part in parts for row in part.to_pylist()))
    except (OSError, ArrowException) as error:
        raise InputError(f"{file} is not Parquet ({error}): restore the file") from error


READERS: dict[str, Callable[[Path], Records]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}


def _read_hub(name: str) -> Records:
    dataset, split = _name_and_split("hub", name)
    try:
        import datasets

        records = datasets.load_dataset(dataset, split=split, streaming=True)
        yield from _numbered(f"hub:{name}", records)
    except Exception as error:  # network, unknown name, unknown split: all of other types
        raise _unavailable("hub", name, error) from error


def _read_tfds(name: str) -> Records:
    dataset, split = _name_and_split("tfds", name)
    try:
        import tensorflow_datasets

        source = tensorflow_datasets.data_source(dataset, split=split)
    except Exception as error:
        raise _unavailable("tfds", name, error) from error
    yield from _numbered(f"tfds:{name}", (_plain(source[i]) for i in range(len(source))))


def _numbered(place: str, records: Iterable[dict]) -> Records:
    for number, record in enumerate(records, start=1):
        yield f"{place} record {number}", record


def _name_and_split(kind: str, name: str) -> tuple[str, str]:
    dataset, _, split = name.rpartition("/")
    if not dataset or not split:
        raise InputError(f"{kind}:{name} names no split: write {kind}:NAME/SPLIT")
    return dataset, split


def _plain(value):
    """Text for bytes and lists for arrays: TensorFlow Datasets gives text as bytes in arrays."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [_plain(item) for item in value]


def _parse(line: bytes, where: str) -> dict:
    try:
        record = json.loads(line)
    except ValueError as error:  # a UnicodeDecodeError is one, too
        raise InputError(f"{where} is not JSON in UTF-8 ({error}): repair the line") from error
    return _checked(record, where)


def _checked(record: object, where: str) -> dict:
    if not isinstance(record, dict):
        raise InputError(f"{where} is not a JSON object: write one record in braces")
    return record


def _unavailable(kind: str, name: str, error: Exception) -> InputError:
    if isinstance(error, ImportError) and error.name:
        return _missing(error, f"{kind}:{name}")
    reason = first_line(error)
    return InputError(f"cannot open {kind}:{name} ({reason}): check the name, split and network")


def _missing(error: ImportError, path: str) -> InputError:
    return InputError(f"{path} needs the package {error.name}: pip install {error.name}")
