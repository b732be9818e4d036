"""Rows on disk: tokenised and laid out once, then memory-mapped by every run with equal settings.

    CACHE/1f0c.../manifest.json     fingerprint of the rows, report, shards with their sizes
    CACHE/1f0c.../rows-00000.npy    (R, T) of a struct: the arrays of a batch
    CACHE/1f0c....lock              held by the process that builds the rows
    CACHE/1f0c....9d2e.tmp/         a build that is running or was interrupted

The folder's name is a hash of the fingerprint, which determines the rows. The folder appears after
its last shard is written, so a folder with that name is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moa_jax.data import sources
from moa_jax.data.batch import Batch
from moa_jax.data.encode import Coder
from moa_jax.data.report import DataReport
from moa_jax.data.rows import BLOCK
from moa_jax.errors import InputError, first_line
from moa_jax.files.paths import is_stored, size_and_time

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 3  # raise when the same input makes other rows
MANIFEST = "manifest.json"
ABANDONED_S = 3600.0  # a running build writes more often than this
OPEN_FILES = 256  # mapped at a time; each costs a file descriptor

Build = Callable[[], tuple[Iterable[Batch], Callable[[], DataReport]]]


class Column:
    """One array (R, T) of rows in several files; indexing reads only the indexed rows."""

    def __init__(
        self, files: Sequence[Path], ends: np.ndarray, field: str, row_length: int, dtype: Any
    ) -> None:
        self._files, self._ends, self._field = files, ends, field
        self.shape, self.dtype = (int(ends[-1]), row_length), np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows_R: np.ndarray) -> np.ndarray:
        """The rows (R, T) with these numbers, in the given order."""
        found_RT = np.empty((len(rows_R), self.shape[1]), self.dtype)
        file_R = np.searchsorted(self._ends, rows_R, side="right")
        for number in np.unique(file_R):
            shard = _map(self._files[number])
            here = file_R == number
            begin = self._ends[number] - len(shard)
            found_RT[here] = shard[self._field][rows_R[here] - begin]
        return found_RT

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[np.arange(len(self))].astype(dtype or self.dtype)


def fingerprint(paths: Sequence[str], coder: Coder) -> dict[str, Any]:
    """The settings and files that determine the rows of these paths.

    A dataset of another package is identified by its name alone: remove the cache after a new
    version of the dataset.
    """
    config, tokenizer, vocab_size = coder
    settings = ("max_length", "row_length", "pack", "answers", "sources")
    if config.longest_first:  # other rows keep their earlier fingerprint
        settings += ("longest_first",)
    return {
        "format": [FORMAT, BLOCK],
        "vocab_size": vocab_size,
        "tokenizer": tokenizer_hash(tokenizer),
        "paths": {path: [_facts(file) for file in sources.files_of(path)] for path in paths},
        **{name: getattr(config, name) for name in settings},
    }


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The sha256 of the tokenizer settings that determine the tokens of a conversation."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # set by each call
        rules.pop(state, None)
    text = json.dumps([rules, tokenizer.chat_template, tokenizer.special_tokens_map], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def cached(cache: str, made_from: dict[str, Any], build: Build) -> tuple[Batch, DataReport]:
    """The rows of a fingerprint `made_from`, as columns on disk; built if not cached yet.

    One process builds; others that need the same rows wait. Raises InputError for a folder that
    cannot be written and for damaged shards.
    """
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache).expanduser() / key
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with alone(folder.with_name(key + ".lock")):
                if not folder.exists():
                    _make(folder, made_from, build)
        except OSError as error:
            raise InputError(
                f"{folder.parent} cannot be written ({first_line(error)}); change data.cache"
            ) from error
    return _open(folder)


def _facts(file: Path) -> list[Any]:
    name = file if is_stored(file) else file.resolve()
    return [str(name), *size_and_time(file)]


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a lock file, waiting until it is free; a killed process releases its lock."""
    with path.open("a") as file:
        with contextlib.suppress(ImportError, OSError):  # without locks, two processes may build
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, made_from: dict[str, Any], build: Build) -> None:
    for scratch in folder.parent.glob(f"{folder.name}.*.tmp"):  # of interrupted builds
        if time.time() - scratch.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(scratch, ignore_errors=True)
    scratch = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    scratch.mkdir()
    try:
        blocks, report = build()
        shards = [_write(scratch, number, rows) for number, rows in enumerate(blocks)]
        report = dataclasses.asdict(report())
        manifest = {"made_from": made_from, "report": report, "shards": shards}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1))
        try:
            os.rename(scratch, folder)
        except OSError:
            if not folder.exists():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(folder: Path, number: int, rows: Batch) -> dict[str, Any]:
    """Store one block; returns its entry in the manifest."""
    small = np.min_scalar_type(rows.tokens_BT.shape[1])  # holds segments and positions
    types = (np.int32, small, small, np.bool_)
    stored_RT = np.empty(rows.tokens_BT.shape, list(zip(Batch._fields, types, strict=True)))
    for field, array_RT in zip(Batch._fields, rows, strict=True):
        stored_RT[field] = array_RT
    file = folder / f"rows-{number:05}.npy"
    with file.open("wb") as stream:
        np.save(stream, stored_RT)
        stream.flush()
        os.fsync(stream.fileno())
    return {"file": file.name, "rows": len(stored_RT), "bytes": file.stat().st_size}


def _open(folder: Path) -> tuple[Batch, DataReport]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        for shard in manifest["shards"]:
            if (folder / shard["file"]).stat().st_size != shard["bytes"]:
                raise OSError(f"{shard['file']} is cut")
    except (OSError, ValueError) as error:
        raise InputError(
            f"{folder} is damaged ({first_line(error)}); remove it, it is made again"
        ) from error
    files = [folder / shard["file"] for shard in manifest["shards"]]
    ends = np.cumsum([shard["rows"] for shard in manifest["shards"]])
    report = DataReport(**manifest["report"])
    types = (np.int32, np.int32, np.int32, np.bool_)
    columns = (
        Column(files, ends, field, report.row_length, dtype)
        for field, dtype in zip(Batch._fields, types, strict=True)
    )
    return Batch(*columns), report


@functools.lru_cache(maxsize=OPEN_FILES)
def _map(file: Path) -> np.ndarray:
    return np.load(file, mmap_mode="r")
