"""JSON objects are checked when they are read; files are written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises InputError if it is missing, malformed or has conflicting keys."""
    try:
        # Given bytes, json detects UTF-16 and a byte order mark.
        content = json.loads(path.read_bytes(), object_pairs_hook=_once)
    except FileNotFoundError as error:
        raise InputError(
            f"{path} is missing; check that {path.parent} is a model folder"
        ) from error
    except ValueError as error:  # not JSON, not UTF-8, or a key with two values
        raise InputError(f"{path} is not valid JSON ({error}); fetch or write it again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no JSON object; fetch or write it again")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError for a key with two values, of which json keeps the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        for key, value in pairs:
            if value != found[key]:
                raise ValueError(f"{key!r} is {value!r} and {found[key]!r}")
    return found


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as `whole_file` does; raises OSError on failure and leaves the previous file.

    A device or a pipe, such as /dev/stdout, is written in place.
    """
    # Paths that are not UTF-8 have surrogates, which a report shows as \\udce9.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with whole_file(path) as fresh:
        fresh.write_bytes(data)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds and is removed otherwise.

    A symbolic link stays and its target is replaced; the replaced file's mode is kept.
    """
    path = Path(os.path.realpath(path))
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        fresh = Path(scratch, path.name)
        yield fresh
        keep_mode(path, fresh)
        os.replace(fresh, path)


def keep_mode(old: Path, new: Path) -> None:
    """Give a new file the mode of the file that it replaces, if any."""
    if old.is_file():
        new.chmod(stat.S_IMODE(old.stat().st_mode))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically and as Hugging Face does, indented and with sorted keys."""
    write_whole(path, to_json(content, indent=2, sort_keys=True) + "\n")
