"""`tuned.json` beside a drafter: the fastest way to draft on each device that was measured.

    {"tuned": [{"device_kind": "NVIDIA H200", "dtype": "bfloat16", "batch": 1,
                "mode": "chain", "depth": 4, "breadth": 1, "total_tokens": null,
                "tokens_per_s": 400.0, "speedup": 2.1}]}

It has one entry for each device kind, dtype and batch; none of them says anything of another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moa_jax.config import DraftShape
from moa_jax.errors import InputError
from moa_jax.files.folders import read_json, write_json

FILE = "tuned.json"
PLACE = ("device_kind", "dtype", "batch")


def save_tuned(folder: Path, entry: dict[str, Any]) -> Path:
    """Put an entry in the file, over that of the same device; it appears whole or not at all."""
    path = folder / FILE
    others = [old for old in _entries(path) if any(old[k] != entry[k] for k in PLACE)]
    write_json(path, {"tuned": [*others, entry]})
    return path


def load_tuned(folder: Path, device_kind: str, dtype: str, batch: int = 1) -> DraftShape | None:
    """The shape found for this device, None where there is none; depth 1 is plain decoding."""
    place = dict(zip(PLACE, (device_kind, dtype, batch), strict=True))
    for entry in _entries(folder / FILE):
        if all(entry[key] == value for key, value in place.items()):
            return DraftShape(entry["depth"], entry["breadth"], entry["total_tokens"])
    return None


def _entries(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    needed = {*PLACE, "depth", "breadth", "total_tokens"}
    found = read_json(path).get("tuned")
    if not isinstance(found, list) or not all(
        isinstance(entry, dict) and needed <= entry.keys() for entry in found
    ):
        raise InputError(f"{path} is not what infer.bench --tune writes: remove it")
    return found
