"""Paths of files: in a file system, or in an object store by URL.

    runs/moa               a pathlib.Path
    gs://bucket/runs/moa   an epath.Path, which has the same methods

A store has no locks, no limit of space, no appending and no renaming of folders: code that needs
any of these checks `is_stored`.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from moa_jax.errors import InputError, TemporaryError

STORE = "gs"  # Google Cloud Storage; other stores are untested
PACKAGES = ("gcsfs", "google.cloud.storage")  # required by epath and Orbax


def place(path: str | os.PathLike[str]) -> Path:
    """A path as a `Path`, or as an `epath.Path` if it is a URL.

    Raises InputError for a URL of an unsupported store, and for a missing package.
    """
    scheme, is_url, _ = os.fspath(path).partition("://")
    if not is_url:
        return Path(path).expanduser()
    if scheme != STORE:
        raise InputError(
            f"{path}: {scheme}:// is no store that is known; use {STORE}://, or mount it"
        )
    for package in PACKAGES:
        if not _is_installed(package):
            raise InputError(f"{path} needs the package {package}; pip install 'moa-jax[gcs]'")
    from etils import epath  # slow to import

    return epath.Path(path)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def files_below(folder: Path) -> Iterator[Path]:
    """All files in a folder and its subfolders, in no particular order."""
    if is_stored(folder):  # epath lists one level at a time
        for path in folder.iterdir():
            yield from files_below(path) if path.is_dir() else [path]
    else:
        yield from (path for path in folder.rglob("*") if path.is_file())


def size_and_time(file: Path) -> tuple[int, float]:
    """Size of a file in bytes, and its modification time in the file system's own unit."""
    status = file.stat()
    if is_stored(file):
        return status.length, status.mtime
    return status.st_size, status.st_mtime_ns


def lock(file: IO[Any], refusal: str) -> None:
    """Lock an open file until it is closed; raises TemporaryError(refusal) if another run has it.

    Prints a line on stderr if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TemporaryError(refusal) from error
    except OSError as error:
        print(f"{file.name}: no lock ({error.strerror}); start one run only", file=sys.stderr)


def lock_output(file: IO[Any], path: Path) -> None:
    """Lock a file that one run writes; raises TemporaryError if another run has the lock."""
    lock(file, f"{path}: another run writes it; wait for its end, or name another --output")


def is_stored(path: Path) -> bool:
    """Whether a path is in an object store."""
    return not isinstance(path, Path)


def check_folder(path: Path) -> None:
    """Raise InputError for a folder that cannot be created or written, before any work is done.

    Links are followed, but a dangling link is refused: it may lead to a disk that is not mounted.
    """
    check_links(path)
    found = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not found.is_dir():
        raise InputError(f"cannot write {path}: {found} is a file; choose a path that can be used")
    if not os.access(found, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot write {path}: {found} is read-only; choose a path that can be used"
        )


def check_file(flag: str, path: Path, what: str = "file") -> None:
    """Raise InputError for a file that cannot be written later; `flag` is its command-line flag."""
    check_links(path)
    is_device = path.exists() and not path.is_file()
    folder = path if is_device else Path(os.path.realpath(path)).parent
    if path.is_dir() or not os.access(folder, os.W_OK if is_device else os.W_OK | os.X_OK):
        raise InputError(f"{flag} {path}: no {what} can be written there; choose another path")


def check_links(path: Path) -> None:
    """Raise InputError if a part of a path is a dangling link."""
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            raise InputError(
                f"cannot write {path}: {each} is a dangling link to {os.readlink(each)}; create "
                "what it leads to, or choose another path"
            )


def user_cache() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/moa-jax or ~/.cache/moa-jax.

    Raises RuntimeError without a home directory.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = given if given.is_absolute() else Path.home() / ".cache"
    return root / "moa-jax"


def writable_cache(name: str) -> Path:
    """A folder of the user's cache; a temporary folder if the cache cannot be written."""
    try:
        root = user_cache() / name
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
        return root
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return _temporary(name)


@functools.cache
def _temporary(name: str) -> Path:
    folder = tempfile.mkdtemp(prefix=f"moa-jax-{name}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
