"""New files in the place of earlier ones of a model folder: others stay, and a kill is noticed.

    OUTPUT/.moa-jax.8x2k/new/    files until all of them are written
    OUTPUT/.moa-jax.8x2k/old/    files that are replaced, until the new ones are in place

What a killed writer leaves there is removed when a later one has written all.

A writer replaces files that it writes itself, and removes earlier weights of ours. It owns neither
README.md nor .git, and no weights of another program.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from moa_jax.errors import InputError
from moa_jax.files.folders import GGUF_INDEX, INDEX, SINGLE, WRITER, keep_mode, read_json
from moa_jax.files.places import check_folder

_SHARD = r"model-\d{5}-of-\d{5}\.safetensors"
_SCRATCH = ".moa-jax."


def check_replaceable(
    folder: Path, mark: str = "config.json", models: Iterable[str] = (".",)
) -> None:
    """Raise InputError for a folder that `replacing` could not write, before work is done for it.

    That is one that `places.check_folder` refuses, one with files but neither `mark` nor .git, and
    one with weights of other writers, which would be read in place of the new ones.
    """
    check_folder(folder)
    if not folder.is_dir():
        return
    was_cut = any(folder.glob(f"{_SCRATCH}*/old/{mark}"))
    is_new_clone = (folder / ".git").exists() and not (folder / SINGLE).exists()
    is_ours = (folder / mark).is_file() or was_cut or is_new_clone or not any(folder.iterdir())
    if not is_ours:
        what = "a model folder" if mark == "config.json" else f"a folder with {mark}"
        raise InputError(f"{folder.absolute()} exists and is not {what}: choose another output")
    for model in (folder / each for each in models):
        _check_weights(model)


def _check_weights(folder: Path) -> None:
    """Raise InputError for weights that are not ours to remove and would be read before ours."""
    for name in ("config.json", SINGLE):
        if (folder / name).is_dir():
            raise InputError(f"cannot write {folder / name}: it is a folder; choose another output")
    for path in (folder / GGUF_INDEX, folder / INDEX):
        if path.exists() and not _is_ours(path):
            raise InputError(
                f"{path} belongs to weights of another program, which would be read in place of "
                "the new ones: remove them or choose another output"
            )


def _is_ours(index: Path) -> bool:
    try:
        return read_json(index)["metadata"]["written_by"] == WRITER
    except (InputError, LookupError, TypeError):
        return False


@contextlib.contextmanager
def replacing(
    folder: Path,
    mark: str = "config.json",
    models: Iterable[str] = (".",),
    stale: Iterable[str] = (),
) -> Iterator[Path]:
    """Yield an empty folder whose files come to `folder` if the block ends well, else vanish.

    A new folder appears whole or not at all, the one behind a link if it is one. Of an existing
    folder these files are replaced, and earlier weights of `models` and files named in `stale`
    go; all else stays. Its config.json goes first and comes last, so that a folder whose writer
    was killed is refused when it is read. Raises InputError as `check_replaceable`.
    """
    models = list(models)
    check_replaceable(folder, mark, models)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=_SCRATCH, dir=folder if folder.exists() else folder.parent)
    fresh, old = Path(scratch, "new"), Path(scratch, "old")
    fresh.mkdir()
    try:
        with _alone_in(Path(scratch)):  # for as long as this process lives
            yield fresh
            if folder.exists():
                _exchange(folder, fresh, old, models, stale)
            else:
                fresh.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
            _remove_left(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        with contextlib.suppress(OSError):  # files that could not be put back stay there
            Path(scratch).rmdir()


def _exchange(
    folder: Path, fresh: Path, old: Path, models: Iterable[str], stale: Iterable[str]
) -> None:
    """Move files of a folder to `old` and those of `fresh` in their place; all or none of them."""
    is_config = lambda name: name.name == "config.json"
    with _alone_in(folder):
        coming = [path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()]
        weights = (Path(model, name) for model in models for name in _weights_in(folder / model))
        leaving = {*coming, *map(Path, stale), *weights}
        leaving = [name for name in leaving if _is_file_or_link(folder / name)]
        moves = [(folder / name, old / name) for name in sorted(leaving, key=is_config)[::-1]]
        moves += [(fresh / name, folder / name) for name in sorted(coming, key=is_config)]
        for name in coming:
            keep_mode(folder / name, fresh / name)
        done: list[tuple[Path, Path]] = []
        try:
            for before, after in moves:
                after.parent.mkdir(parents=True, exist_ok=True)
                done.append((before, after))  # first: Ctrl-C may come between the two
                before.rename(after)
        except BaseException:
            for before, after in reversed(done):
                if _is_file_or_link(after):
                    after.rename(before)
            shutil.rmtree(old, ignore_errors=True)  # by now it has folders only
            raise


def _remove_left(folder: Path) -> None:
    """Remove files of writers that were killed, since there are newer ones in their place."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError), _alone_in(scratch, fcntl.LOCK_NB):
            shutil.rmtree(scratch)


def _weights_in(folder: Path) -> list[str]:
    """The names of weights that an earlier write left: none that other programs made."""
    if not _is_ours(folder / INDEX):
        return [SINGLE]
    files = read_json(folder / INDEX).get("weight_map", {}).values()
    return [SINGLE, INDEX, *{file for file in files if re.fullmatch(_SHARD, file)}]


def _is_file_or_link(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


@contextlib.contextmanager
def _alone_in(folder: Path, how: int = 0) -> Iterator[None]:
    """Hold a folder's lock, and wait for it; with LOCK_NB raise OSError where it is not free."""
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | how)
        except OSError:  # also of a file system without locks
            if how:
                raise
        yield
    finally:
        os.close(number)
