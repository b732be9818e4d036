"""Facts of the files that a grid's drafters come from: their bytes and hashes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path
from typing import Any

from moa_jax.config import DistillConfig, GridConfig
from moa_jax.data import corpora
from moa_jax.decode.vocabulary import FILE as VOCABULARY
from moa_jax.errors import InputError
from moa_jax.files.folders import file_hash
from moa_jax.files.places import size_and_time
from moa_jax.pretrained import Target

HASH_LENGTH = 16  # hexadecimal digits kept of a SHA-256


def files_of(config: DistillConfig) -> dict[str, Any]:
    """Facts of the local data files that a run reads, where they are at hand."""
    found = {}
    for path in (*config.data.train, *config.data.validation):
        with contextlib.suppress(InputError):  # a report needs no data
            if files := corpora.files_of(path):
                found[path] = facts(*files)
    if config.vocabulary:
        files = Path(config.vocabulary), Path(config.vocabulary, VOCABULARY)
        found |= {str(file): facts(file) for file in files if file.is_file()}
    return found


def inputs_of(grid: GridConfig, target: Target) -> dict[str, Any]:
    """Facts of the files that all drafters come from: the target's and the data's."""
    name = grid.cells[0][1].target
    kinds = ("*.json", "*.safetensors", "*.gguf")
    model = sorted(file for kind in kinds for file in target.folder.glob(kind))
    found = {f"{name}: {file.name}": facts(file) for file in model}
    return functools.reduce(dict.__or__, (files_of(config) for _, config in grid.cells), found)


def facts(*files: Path) -> dict[str, Any]:
    """Bytes and shortened hash of a file; of several the sum, and the hash of their hashes."""
    stats = [size_and_time(file) for file in files]
    hashes = [_hash(file, *stat) for file, stat in zip(files, stats, strict=True)]
    many = hashlib.sha256("".join(hashes).encode()).hexdigest()
    return {
        "bytes": sum(size for size, _ in stats),
        "sha256": (hashes[0] if len(hashes) == 1 else many)[:HASH_LENGTH],
    }


@functools.cache
def _hash(file: Path, size: int, changed: float) -> str:
    """The hash of a file, read once unless it changes, though every run of the grid asks."""
    return file_hash(file) or ""
