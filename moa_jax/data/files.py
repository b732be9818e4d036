"""Records from files: JSON Lines, JSON and Parquet, streamed and counted.

An unreadable record does not end the stream: an InputError takes its place.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moa_jax.errors import InputError
from moa_jax.files.paths import files_below, is_stored, place

Found = Iterator[tuple[str, dict | InputError]]  # (location `FILE line N`, record)


class FileKind(NamedTuple):
    """Functions that read files with one extension and count their records."""

    read: Callable[[Path], Found]
    count: Callable[[Path], int]


def kind_of(file: Path) -> FileKind:
    """The reader for a file's extension; raises InputError for an unknown extension."""
    kind = next((kind for end, kind in KINDS.items() if file.name.endswith(end)), None)
    if kind is None:
        raise InputError(f"{file} is of no known kind; use {', '.join(KINDS)}")
    return kind


def below(path: Path) -> list[Path]:
    """The file itself, or a folder's data files sorted by name.

    Raises InputError if the folder has no data files, lacks a file of a set with numbers, or has a
    data file that is unfinished or in an unsupported compression, whose records would be missing
    silently.
    """
    if path.is_file():
        return [path]
    endings = tuple(KINDS)
    found = sorted(files_below(path))
    data = [file for file in found if file.name.endswith(endings)]
    for file in found:
        if file.suffix in UNREAD and file.stem.endswith(endings):
            raise InputError(f"{file} cannot be read as it is; finish its run, unpack or remove it")
    if not data:
        raise InputError(f"{path} holds no data; put {', '.join(endings)} files there")
    if absent := _absent(data):
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise InputError(
            f"{path} lacks {absent[0]}{more}; write the missing shards, or name the files instead"
        )
    return data


def _absent(data: list[Path]) -> list[str]:
    """The missing ones of sets of files like all-00003-of-00008.jsonl, from 0 or 1 on."""
    present = {str(file) for file in data}
    parts = {found.group(1, 3, 4) for found in map(SHARD.fullmatch, present) if found}
    every = {
        f"{start}-{number:05}-of-{count}{end}"
        for start, count, end in parts
        for first in [int(f"{start}-{count}-of-{count}{end}" in present)]
        for number in range(first, first + int(count))
    }
    return sorted(every - present)


def locate(path: str) -> Path:
    """The file or folder of a path, `data:` resolved; raises InputError if it does not exist."""
    if path.startswith("data:"):
        beside = Path(__file__).resolve().parents[3] / "shared" / "data"
        root = Path(os.environ.get("MOA_DATA") or beside)
        if not root.is_dir():
            raise InputError(f"no data folder for {path}; set MOA_DATA to the folder that holds it")
        found = root / path.removeprefix("data:")
    else:
        found = place(path)
    if not found.exists():
        raise InputError(f"no file or folder {found}; check the path of the data")
    return found


def fault(text: str, cause: Exception) -> InputError:
    """The error of a record, with equal text for equal faults; `cause` has the details."""
    error = InputError(text)
    error.__cause__ = cause
    return error


def numbered(place: str, records: Iterable[dict | InputError]) -> Found:
    """Records with the locations `PLACE record 1`, `PLACE record 2`, ..."""
    for number, record in enumerate(records, start=1):
        yield f"{place} record {number}", record


def missing(error: ImportError, path: str) -> InputError:
    """The error for a package that is not installed."""
    return InputError(f"{path} needs the package {error.name}; pip install {error.name}")


def _open(file: Path) -> BinaryIO:
    if not file.name.endswith(".gz"):
        return file.open("rb")
    return gzip.open(file.open("rb") if is_stored(file) else file, "rb")


def _read_json(file: Path) -> Found:
    values = _array_of(file)
    return _read_lines(file) if values is None else numbered(str(file), map(_checked, values))


def _count_json(file: Path) -> int:
    values = _array_of(file)
    return sum(1 for _ in _lines(file)) if values is None else len(values)


def _array_of(file: Path) -> list[Any] | None:
    """The records of a file with one JSON value; None for JSON Lines, whatever the extension."""
    _, first = next(_lines(file), (0, b""))
    has_lines = file.name.endswith((".jsonl", ".jsonl.gz"))
    if not first.lstrip().startswith(b"[") and (has_lines or _is_object(first)):
        return None
    try:
        values = _values(file)
    except InputError:
        if has_lines:  # whose first line is not a record
            return None
        raise
    return values if not has_lines or any(isinstance(value, dict) for value in values) else None


def _is_object(line: bytes) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(_parsed(line), dict)
    return False


def _read_lines(file: Path) -> Found:
    for number, line in _lines(file):
        try:
            record = _checked(_parsed(line), escaped=b"\\ud" in line or b"\\uD" in line)
        except (ValueError, RecursionError) as error:  # includes UnicodeDecodeError
            record = fault("not JSON in UTF-8; repair the line", error)
        yield f"{file} line {number}", record


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers."""
    number = 0
    try:
        with _open(file) as lines:
            for number, line in enumerate(lines, start=1):
                line = line.removeprefix(codecs.BOM_UTF8)  # of the file or an appended file
                if line and not line.isspace():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{file} cannot be read after line {number} ({error}); restore the file"
        ) from error


def _parsed(content: bytes) -> Any:
    """The value of a JSON document; NaN, which tables write for a missing value, becomes None."""
    named = {"NaN": None, "Infinity": math.inf, "-Infinity": -math.inf}
    return json.loads(content.decode("utf-8-sig"), parse_constant=named.get)


def _values(file: Path) -> list[Any]:
    try:
        with _open(file) as content:
            values = _parsed(content.read())
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON in UTF-8 ({error}); repair the file") from error
    return values if isinstance(values, list) else [values]


def _checked(record: object, escaped: bool = True) -> dict | InputError:
    if not isinstance(record, dict):
        return InputError("not a JSON object; write one record in braces")
    try:
        if escaped:  # an escape like \ud800 is half a character, which UTF-8 cannot encode
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return fault("not text in UTF-8; repair the record", error)
    return record


def _read_parquet(file: Path) -> Found:
    with _open_parquet(file) as table:
        parts = table.iter_batches(batch_size=1024)
        yield from numbered(str(file), (row for part in parts for row in _rows(part)))


def _count_parquet(file: Path) -> int:
    with _open_parquet(file) as table:
        return table.metadata.num_rows


@contextlib.contextmanager
def _open_parquet(file: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise missing(error, str(file)) from error
    try:
        with file.open("rb") as content, parquet.ParquetFile(content) as table:
            yield table
    except (OSError, ArrowException) as error:
        raise InputError(f"{file} is not Parquet ({error}); restore the file") from error


def _rows(part: Any) -> list[dict | InputError]:
    """The rows of a piece of a table; a piece with text that is not UTF-8 is decoded row by row."""
    try:
        return part.to_pylist()
    except UnicodeDecodeError as error:
        if part.num_rows == 1:
            return [fault("not text in UTF-8; repair the record", error)]
        return [row for i in range(part.num_rows) for row in _rows(part.slice(i, 1))]


SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w[^/]*)", re.DOTALL)
UNREAD = (".partial", ".zst", ".xz", ".bz2", ".zip")  # after the extension of a data file
JSON = FileKind(_read_json, _count_json)
KINDS: dict[str, FileKind] = {
    ".jsonl": JSON,
    ".jsonl.gz": JSON,
    ".json": JSON,
    ".json.gz": JSON,
    ".parquet": FileKind(_read_parquet, _count_parquet),
}
