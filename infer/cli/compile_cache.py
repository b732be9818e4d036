"""Configures jax's persistent compilation cache, so that later starts do not recompile.

    (nothing set)                   $XDG_CACHE_HOME/moa-jax/compiled, or the same in ~/.cache
    JAX_COMPILATION_CACHE_DIR=DIR   another folder, of unbounded size
    JAX_COMPILATION_CACHE_DIR=      no cache

jax's cache keys include versions, compiler options and the kind of accelerator. XLA stores machine
code for CPUs, so each CPU type has its own folder, bounded to `MAX_BYTES`: machines may share a
home directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import time
import warnings
from pathlib import Path

from moa_jax.config.checks import is_utf8
from moa_jax.files.paths import user_cache

FOLDER = "JAX_COMPILATION_CACHE_DIR"  # jax reads its options from such variables
SIZE = "JAX_COMPILATION_CACHE_MAX_SIZE"
MAX_BYTES = 2 * 1024**3
SECONDS_OF_A_WRITE = 60  # a younger entry may still be incomplete
CPU_FACTS = ("vendor_id", "cpu family", "model", "flags", "CPU ", "Features")  # of /proc/cpuinfo


def use() -> None:
    """Turns jax's compilation cache on, or off if JAX_COMPILATION_CACHE_DIR is empty.

    Without a writable default folder the cache is not configured. Nothing is ever printed.
    """
    wanted = os.environ.get(FOLDER)
    if wanted == "" or not is_utf8(wanted or ""):  # jax accepts only UTF-8 paths
        _default("JAX_ENABLE_COMPILATION_CACHE", False)
        return
    try:
        own = default_folder()
        if wanted in (None, str(own)):  # `own`: set by a parent program of this project
            _default(SIZE, MAX_BYTES)
            _prepare(own)
            _default(FOLDER, str(own))
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        if wanted is None:
            return
    # Small programs are cached too: many of them take as long to compile as one large one.
    _default("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 0.0)
    # A failed read or write of the cache costs a compilation and nothing else.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def default_folder() -> Path:
    """The user's cache folder for programs compiled on this CPU type."""
    return user_cache() / "compiled" / _cpu()


def _cpu() -> str:
    """A name that CPUs with the same instruction set share."""
    facts = [platform.processor()]
    if (info := Path("/proc/cpuinfo")).exists():
        with info.open(encoding="utf-8", errors="replace") as lines:
            for line in iter(lines.readline, "\n"):  # fields of the first core
                if not line:
                    break
                facts += [line] if line.startswith(CPU_FACTS) else []
    return f"{platform.machine()}-{hashlib.sha256(''.join(facts).encode()).hexdigest()[:8]}"


def _prepare(folder: Path) -> None:
    """Creates the folder and removes the incomplete entries of killed processes: jax fails on them.

    With a size bound an entry has two files, NAME-cache and, written after it, NAME-atime.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK) or not is_utf8(str(folder)):
        raise PermissionError(folder)
    if os.environ[SIZE] == "-1":
        return
    names = {entry.name for entry in os.scandir(folder)}
    for name in names:
        if name.endswith("-cache") and f"{name.removesuffix('-cache')}-atime" not in names:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - (folder / name).stat().st_mtime > SECONDS_OF_A_WRITE:
                    (folder / name).unlink()


def _default(name: str, value: object) -> None:
    """Sets a jax option here and for child processes, unless the user has set the variable."""
    if name not in os.environ:
        os.environ[name] = str(value)
        if "jax" in sys.modules:  # jax has read its variables already
            sys.modules["jax"].config.update(name.lower(), value)


def num_bytes(folder: Path) -> int:
    """Total file size of a cache in bytes, files removed during the scan excluded."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
