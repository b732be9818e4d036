"""Activations of a frozen target that drafters read, stored for every row of training data.

    CACHE/cache.json       the target, rows and dtype of the cache
    CACHE/last             (T, D) per row: the output of the last layer
    CACHE/keys, values     (L, K, T, E) per row: all layers, keys after RoPE
    CACHE/stream-2         (T, D) per row: the input of layer 2
    CACHE/NAME.partial     an unfinished part of a running or interrupted build; never read
    CACHE/lock             held by the process that builds

These arrays are called parts. A part has one record per row, in order: the CRC-32 of the row's
bytes, then the bytes, in the dtype of the run or rounded to bfloat16. A part gets its final name
when its last record is on the disk, so a part with that name is complete. Parts that a later
drafter needs are added.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import TargetConfig
from moa_jax.data.batches import Batches, Mixture
from moa_jax.data.shards import alone
from moa_jax.drafters.api import TapSpec, TargetActivations
from moa_jax.errors import InputError, TemporaryError, first_line
from moa_jax.files.paths import check_folder
from moa_jax.files.whole_files import read_json, write_json
from moa_jax.model import llama
from moa_jax.model.cache import KV

Array = jax.Array
Parts = dict[str, Any]  # by name, (B, ...) each

FORMAT = 1  # raise when the layout of parts changes
MANIFEST = "cache.json"
LOCK, PARTIAL = "lock", ".partial"
LAST = "last"  # a part's name
CRC_BYTES = 4
GB = 1e9
ROWS_HASHED = 1024  # at a time


def part_names(taps: TapSpec) -> list[str]:
    """Names of the parts that `taps` needs, always including the output of the last layer."""
    rows = ["keys", "values"] if taps.rows else []
    return [LAST, *rows, *(f"stream-{layer}" for layer in taps.streams)]


def parts_of(taps: TapSpec, rows_LBKTE: KV, streams: Sequence[Array], last_BTD: Array) -> Parts:
    """The parts that `part_names` names, as arrays (B, ...).

    The final norm is not stored but recomputed: a compiler fuses the norm with the operations
    after it, so training rounds equally with and without a cache.
    """
    rows = [jnp.moveaxis(x_LBKTE, 1, 0) for x_LBKTE in rows_LBKTE] if taps.rows else []
    return dict(zip(part_names(taps), [last_BTD, *rows, *streams], strict=True))


def tapped_of(cfg: TargetConfig, taps: TapSpec, params: Any, parts: Parts) -> TargetActivations:
    """The activations that `taps` needs, from parts that may hold more."""
    last_BTD, *rest = (parts[name] for name in part_names(taps))
    rows_LBKTE = None
    if taps.rows:
        k_BLKTE, v_BLKTE, *rest = rest
        rows_LBKTE = KV(jnp.moveaxis(k_BLKTE, 0, 1), jnp.moveaxis(v_BLKTE, 0, 1))
    return TargetActivations(rows_LBKTE, tuple(rest), llama.final_norm(cfg.block, params, last_BTD))


def union(taps: Sequence[TapSpec]) -> TapSpec:
    """All activations that any of several drafters reads."""
    streams = sorted({layer for each in taps for layer in each.streams})
    return TapSpec(any(each.rows for each in taps), tuple(streams))


def rows_hash(source: Batches | Mixture) -> str:
    """The sha256 of the rows' arrays that the target reads, in order."""
    digest = hashlib.sha256()
    for start in range(0, source.num_rows, ROWS_HASHED):
        stop = min(start + ROWS_HASHED, source.num_rows)
        batch = source.take(np.arange(start, stop))
        for array_RT in (batch.tokens_BT, batch.segment_BT, batch.position_BT):
            digest.update(np.ascontiguousarray(array_RT, np.int32))
    return digest.hexdigest()


class TargetCache:
    """The parts of a target's pass over all rows, as specified by `made_from` and `kinds`.

    `made_from` has `target` and `data` (hashes), `rows`, `row_length` and `dtype`; `kinds` has the
    shape and dtype of each part of one row. Raises InputError for a folder with another
    `made_from` or with other files, and for a part of another size.
    """

    def __init__(
        self, folder: Path, made_from: Mapping[str, Any], kinds: Mapping[str, jax.ShapeDtypeStruct]
    ) -> None:
        self.folder, self._kinds = folder, kinds
        self._made_from = {"format": FORMAT} | dict(made_from)
        self._rows = int(made_from["rows"])
        self._maps: dict[str, np.ndarray] = {}
        self._sound = {name: np.zeros(self._rows, bool) for name in kinds}  # rows that were checked
        self._check()

    def missing(self) -> list[str]:
        """Names of the required parts that are not in the folder."""
        return [name for name in self._kinds if not (self.folder / name).exists()]

    def num_bytes(self, names: Sequence[str]) -> int:
        """Size of these parts on disk, in bytes."""
        return sum(self._rows * self._record_bytes(name) for name in names)

    def described(self) -> str:
        """One line on the contents of the cache and the bytes to be written."""
        names, lacking = list(self._kinds), self.missing()
        rest = f"{self.num_bytes(lacking) / GB:.3g} GB to write" if lacking else "all there"
        rows, length = self._rows, self._made_from["row_length"]
        return (
            f"target cache {self.folder}: {self.num_bytes(names) / GB:.3g} GB, {rest}: "
            f"{', '.join(names)} of {rows:,} rows of {length} tokens in {self._made_from['dtype']}"
        )

    def check_room(self, most_gb: float) -> None:
        """Raises InputError if the cache would exceed `most_gb` or the free space of the disk."""
        lacking = self.num_bytes(self.missing())
        cut = _size(self.folder.glob(f"*{PARTIAL}"))  # is overwritten
        whole = _size(self.folder.glob("*")) - cut + lacking
        if whole > most_gb * GB:
            raise InputError(
                f"{self.folder}: a target cache of {whole / GB:.3g} GB is above the limit of "
                f"{most_gb:g}; raise --target-cache-gb, or train on fewer rows"
            )
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free + cut
        if lacking > free:
            raise TemporaryError(
                f"{self.folder}: a target cache needs {lacking / GB:.3g} GB more and the disk has "
                f"{free / GB:.3g}; make room, or leave --target-cache out"
            )

    def build(self, keep: Callable[[np.ndarray], Parts], at_once: int, watch: Any) -> None:
        """Adds the missing parts; of several processes, one builds and the others wait.

        `keep` computes the parts of `at_once` rows from their numbers. An interrupted build starts
        over. Raises InputError for a folder that cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with alone(self.folder / LOCK):
                self._check()
                if names := self.missing():
                    write_json(self.folder / MANIFEST, self._made_from)
                    self._write(names, keep, at_once, watch)
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be written ({first_line(error)}); make room, or change "
                "--target-cache"
            ) from error

    def parts(self, names: Sequence[str], number_B: np.ndarray) -> Parts:
        """These parts (B, ...) of the rows with these numbers; InputError for a damaged part."""
        return {name: self._read(name, number_B) for name in names}

    def _check(self) -> None:
        if not (self.folder / MANIFEST).is_file():
            others = [path for path in self.folder.glob("[!.]*") if path.name != LOCK]
            if others or self.folder.is_file():
                raise InputError(
                    f"{self.folder} is no target cache, as it holds no {MANIFEST}; name a new "
                    "folder"
                )
            check_folder(self.folder)
            return
        found = read_json(self.folder / MANIFEST)
        words = {"target": "another target", "data": "other data"}  # these are hashes
        if differences := [
            words.get(name, f"{name} {found.get(name)}, not {value}")
            for name, value in self._made_from.items()
            if found.get(name) != value
        ]:
            raise InputError(
                f"{self.folder} is a target cache of {', '.join(differences)}; name another "
                "folder, or remove this one"
            )
        for name in self._kinds:
            path, expected = self.folder / name, self.num_bytes([name])
            if path.exists() and path.stat().st_size != expected:
                raise InputError(
                    f"{path} is damaged ({path.stat().st_size} of {expected} bytes); remove it, "
                    "it is made again"
                )

    def _write(
        self, names: list[str], keep: Callable[[np.ndarray], Parts], at_once: int, watch: Any
    ) -> None:
        partial = {name: self.folder / f"{name}{PARTIAL}" for name in names}
        try:
            with contextlib.ExitStack() as stack:
                files = {n: stack.enter_context(path.open("wb")) for n, path in partial.items()}
                bar = stack.enter_context(watch(self._rows, "rows of the target cache"))
                for start in range(0, self._rows, at_once):
                    count = min(at_once, self._rows - start)
                    number_B = np.minimum(np.arange(start, start + at_once), self._rows - 1)
                    found = keep(number_B)  # a fixed number of rows: one program
                    for name, file in files.items():
                        file.writelines(_records(found[name][:count]))
                    bar.step(count)
                for file in files.values():
                    file.flush()
                    os.fsync(file.fileno())
            for name, path in partial.items():
                path.rename(self.folder / name)
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)

    def _read(self, name: str, number_B: np.ndarray) -> np.ndarray:
        kind, sound_R, path = self._kinds[name], self._sound[name], self.folder / name
        if name not in self._maps:
            shape = (self._rows, self._record_bytes(name))
            self._maps[name] = np.memmap(path, np.uint8, "r", shape=shape)
        found_BX = np.empty((len(number_B), *kind.shape), kind.dtype)
        for place, number in enumerate(number_B):
            record = self._maps[name][number]
            if not sound_R[number]:
                if zlib.crc32(record[CRC_BYTES:]) != int(record[:CRC_BYTES].view("<u4")[0]):
                    raise InputError(
                        f"{path} is damaged (row {number} has changed); remove it, it is made again"
                    )
                sound_R[number] = True
            found_BX[place] = record[CRC_BYTES:].view(kind.dtype).reshape(kind.shape)
        return found_BX

    def _record_bytes(self, name: str) -> int:
        kind = self._kinds[name]
        return CRC_BYTES + math.prod(kind.shape) * np.dtype(kind.dtype).itemsize


def _records(array_BX: np.ndarray) -> Iterator[bytes]:
    for row_X in array_BX:
        content = row_X.tobytes()
        yield zlib.crc32(content).to_bytes(CRC_BYTES, "little")
        yield content


def _size(paths: Iterable[Path]) -> int:
    """Total bytes of files, which another process may be renaming."""
    total = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
