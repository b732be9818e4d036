"""Compiled programs, kept between starts: a second start takes seconds where the first takes more.

    (nothing set)                   $XDG_CACHE_HOME/moa-jax/compiled, or the same in ~/.cache
    JAX_COMPILATION_CACHE_DIR=DIR   another folder, whose size has no bound
    JAX_COMPILATION_CACHE_DIR=      no cache

jax itself tells versions, compiler options and accelerators apart. XLA keeps machine code for CPUs,
so each kind of CPU has a folder of its own, each with that bound: machines may share a home.
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
from moa_jax.files.places import user_cache

FOLDER = "JAX_COMPILATION_CACHE_DIR"  # jax reads its settings from such variables
SIZE = "JAX_COMPILATION_CACHE_MAX_SIZE"
MAX_BYTES = 2 * 1024**3
SECONDS_OF_A_WRITE = 60  # another program may be at it
CPU_FACTS = ("vendor_id", "cpu family", "model", "flags", "CPU ", "Features")  # of /proc/cpuinfo


def use() -> None:
    """Turns jax's compilation cache on, or off where the user wants none.

    Without a folder that can be written there is no cache. Nothing is ever printed.
    """
    wanted = os.environ.get(FOLDER)
    if wanted == "" or not is_utf8(wanted or ""):  # jax takes no other path
        _default("JAX_ENABLE_COMPILATION_CACHE", False)
        return
    try:
        own = default_folder()
        if wanted in (None, str(own)):  # our own where a program of ours started this one
            _default(SIZE, MAX_BYTES)
            _prepare(own)
            _default(FOLDER, str(own))
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        if wanted is None:
            return
    # Many small programs take as long to compile as one large one.
    _default("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", 0.0)
    # A program that cannot be read or stored is compiled as if there were no cache.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")


def default_folder() -> Path:
    """The user's folder for programs that are compiled for this kind of CPU."""
    return user_cache() / "compiled" / _cpu()


def _cpu() -> str:
    """A name for all CPUs with the same instructions."""
    facts = [platform.processor()]
    if (info := Path("/proc/cpuinfo")).exists():
        with info.open(encoding="utf-8", errors="replace") as lines:
            for line in iter(lines.readline, "\n"):  # of the first core
                if not line:
                    break
                facts += [line] if line.startswith(CPU_FACTS) else []
    return f"{platform.machine()}-{hashlib.sha256(''.join(facts).encode()).hexdigest()[:8]}"


def _prepare(folder: Path) -> None:
    """Makes the folder, and removes what a kill during a write left behind: jax stumbles on it.

    Where the size is bounded, a program in the cache has two files, and the second is written last.
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
    """Sets one of jax's settings, for child processes too, unless the user has set it."""
    if name not in os.environ:
        os.environ[name] = str(value)
        if "jax" in sys.modules:  # it has read its variables already
            sys.modules["jax"].config.update(name.lower(), value)


def num_bytes(folder: Path) -> int:
    """What a cache holds; files that another program removes meanwhile do not count."""
    total = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
